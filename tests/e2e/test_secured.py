"""A server with TLS, a file of keys and an admin port, as an operator would start it."""

import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.command.cli import main
from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.server.certificates import needs_openssl, self_signed

pytestmark = needs_openssl
BODY = {"prompt": "Once", "max_tokens": 3}


class Secured:
    def __init__(self, server: RunningServer, folder: Path) -> None:
        self.server = server
        self.keys_file = folder / "keys.yaml"
        self.trust = ssl.create_default_context(cafile=str(folder / "server.pem"))
        found = re.search(r"admin routes at (https://\S+)", server.text())
        assert found
        self.admin_url = found[1]

    def call(self, method: str, url: str, key: str | None, **rest) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(verify=self.trust, timeout=30) as client:
            return client.request(method, url, headers=headers, **rest)


def new_key(name: str, capsys) -> tuple[str, str]:
    """The key, and its entry."""
    main(["keys", "new", name])
    shown = capsys.readouterr()
    return shown.err.split()[-1], shown.out


@pytest.fixture
def secured(tiny_model: Path, tmp_path: Path, monkeypatch) -> Iterator[Secured]:
    pair = self_signed(tmp_path, "server")
    file = tmp_path / "keys.yaml"
    file.touch(0o600)
    file.write_text('- {name: first, sha256: "' + "0" * 64 + '"}\n')
    monkeypatch.setenv("TOKENYARD_API_KEY", "operators-own-key")
    options = ("--api-keys-file", str(file), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    with running_server(tmp_path, str(tiny_model), *options, "--admin-port", "0") as server:
        yield Secured(server, tmp_path)


def test_keys_come_with_their_file_and_the_admin_routes_have_their_port(secured: Secured, capsys) -> None:
    url = secured.server.url
    assert url.startswith("https://")
    key, entry = new_key("team-a", capsys)
    assert secured.call("POST", f"{url}/v1/completions", key, json=BODY).status_code == 401
    with secured.keys_file.open("a") as file:
        file.write(entry)
    wait_for(lambda: secured.call("GET", f"{url}/v1/models", key).status_code == 200)
    assert secured.call("POST", f"{url}/v1/completions", key, json=BODY).status_code == 200
    assert secured.call("GET", f"{url}/admin/requests", "operators-own-key").status_code == 404
    assert secured.call("GET", f"{secured.admin_url}/admin/requests", key).status_code == 403
    answer = secured.call("GET", f"{secured.admin_url}/admin/requests", "operators-own-key")
    assert answer.json() == {"requests": [], "total": 0}
    assert secured.call("GET", f"{url}/health/ready", None).status_code == 200
    assert key not in secured.server.text()
    assert "operators-own-key" not in secured.server.text()
    secured.server.process.terminate()
    assert secured.server.wait() == 0
