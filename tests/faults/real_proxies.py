"""HAProxy and nginx with the configurations of deploy/proxies, on ports of this machine.

Owns: their processes, in the foreground and in a folder of their own. Of the files only addresses change.
Never: the system's configuration of either.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.servers.free_ports import free_port
from tests.e2e.serving import ROOT, wait_for

FOLDER = ROOT / "deploy" / "proxies"
NAMES = ("haproxy", "nginx")
_REPLICAS = ("10.0.0.11:8000", "10.0.0.12:8000")
_LISTENS = "127.0.0.1:8080"
_NGINX_MAIN = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr warn;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include tokenyard.conf;
}
"""


@dataclass(frozen=True)
class RealProxy:
    name: str
    url: str
    process: subprocess.Popen[bytes]


def program(name: str) -> str | None:
    """Path of a program where it is installed; the folders of administrators are not in everybody's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin")


def installed() -> tuple[str, ...]:
    return tuple(name for name in NAMES if program(name))


@contextlib.contextmanager
def running_proxy(name: str, folder: Path, replicas: Sequence[str]) -> Iterator[RealProxy]:
    """Accepts connections when this yields. `replicas` are two addresses with ports."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    addresses = dict(zip((*_REPLICAS, _LISTENS), (*replicas, address), strict=True))
    command = [program(name) or name, *_arguments(name, folder, addresses)]
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
    try:
        wait_for(lambda: process.poll() is not None or _accepts(address))
        assert process.poll() is None, f"{name} did not start:\n{log.read_text()}"
        yield RealProxy(name, f"http://{address}", process)
    finally:
        process.terminate()  # at once, for both
        process.wait(10)


def _arguments(name: str, folder: Path, addresses: dict[str, str]) -> list[str]:
    if name == "haproxy":
        _copy("haproxy.cfg", folder / "haproxy.cfg", addresses)
        return ["-db", "-f", str(folder / "haproxy.cfg")]
    _copy("nginx.conf", folder / "tokenyard.conf", addresses)
    (folder / "main.conf").write_text(_NGINX_MAIN)
    return ["-p", str(folder), "-c", str(folder / "main.conf")]


def _copy(name: str, target: Path, addresses: dict[str, str]) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    for placeholder, address in addresses.items():
        assert text.count(placeholder) == 1, placeholder
        text = text.replace(placeholder, address)
    target.write_text(text, encoding="utf-8")


def _accepts(address: str) -> bool:
    host, port = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False
