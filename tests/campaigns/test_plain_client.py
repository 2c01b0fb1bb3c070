"""The second client of the campaigns, against a server whose replies are made up."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from campaigns.servers.free_ports import free_port

SERVED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\ndata: {}\n\ndata: [DONE]\n\n"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def port() -> Iterator[int]:
    """Serve every other request; refuse the rest."""
    listener = socket.create_server(("127.0.0.1", free_port()))
    over = threading.Event()

    def answer() -> None:
        number = 0
        while not over.is_set():
            connection, _ = listener.accept()
            with connection:
                seen = received = b""
                while b"\r\n\r\n" not in seen or not seen.endswith(b"}"):
                    received = connection.recv(65_536)
                    if not received:
                        break
                    seen += received
                if received:
                    number += 1
                    connection.sendall(SERVED if number % 2 else REFUSED)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    over.set()
    socket.create_connection(listener.getsockname()).close()  # wakes it
    thread.join()
    listener.close()


@pytest.mark.parametrize("words", [("rate", "100"), ("clients", "3")])
def test_it_times_what_is_served_and_what_is_refused(port: int, words: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "campaigns.servers.plain_client", str(port), "model", "8", "0.5", *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = json.loads(said)
    assert len(found["e2e_s"]) == len(found["ttft_s"]) > 2
    assert abs(len(found["refused_s"]) - len(found["e2e_s"])) <= 1
    assert set(found["retry_after_s"]) == {3}
    assert found["others"] == {}
    assert all(0 < first <= whole for first, whole in zip(found["ttft_s"], found["e2e_s"], strict=True))
