"""A crowd of connections that say nothing, or no more than the first message of a handshake.

    python -m tests.faults.silent_crowd PORT NUM nothing|hello

Opens them, says so in one line, and holds those that the server has not ended until its standard input ends.

Owns: its own limit of open files, which it raises as far as it may.
"""

import contextlib
import resource
import socket
import ssl
import sys

_PATIENCE_S = 60.0


def client_hello() -> bytes:
    """The first message of a handshake as a usual client sends it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def main(port: int, num: int, says: str) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hello = client_hello() if says == "hello" else b""
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) for _ in range(num)]
    for each in crowd if hello else ():  # now, so that all of them speak at once
        with contextlib.suppress(OSError):  # the server has ended it for the sake of a later one
            each.sendall(hello)
    print("all are here", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
