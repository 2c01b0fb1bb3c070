"""The real server at a Unix socket under a prefix, with values in the place of the checkpoint's."""

import json
import os
import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest

from server.command.cli import main
from server.edge.http.listening import listen_unix
from tests.e2e.serving import running_server

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %} and then"


def test_a_server_at_a_socket_serves_what_the_operator_set(tmp_path: Path, capsys) -> None:
    path, template = tmp_path / "yard.sock", tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    socket_path = str(path)
    options = (
        *("--uds", socket_path, "--root-path", "/llm", "--chat-template", str(template)),
        *("--override-generation-config", '{"temperature": 0.0}'),
        *("--hf-overrides", '{"max_position_embeddings": 96}', "--cpu-kernels", "off"),
    )
    transport = httpx.HTTPTransport(uds=socket_path)
    with running_server(tmp_path, *options) as server:
        assert server.url == socket_path
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        with httpx.Client(transport=transport, base_url="http://yard", timeout=60) as client:
            (model,) = client.get("/llm/v1/models").json()["data"]
            assert model["max_model_len"] == 96
            foreign = client.get("/llm/v1/models", headers={"host": "evil.example"})
            assert (foreign.status_code, "--allowed-host evil.example" in foreign.text) == (403, True)
            asked = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 8}
            replies = [client.post("/llm/v1/chat/completions", json=asked).json() for _ in range(2)]
            texts = {reply["choices"][0]["message"]["content"] for reply in replies}
            assert len(texts) == 1, "without a temperature of its own a request is greedy"
            rendered = client.post("/llm/tokenize", json={"messages": asked["messages"]}).json()
            plain = {"prompt": "Once upon a time and then", "add_special_tokens": False}
            assert rendered["tokens"] == client.post("/tokenize", json=plain).json()["tokens"]
        assert main(["serve", "--uds", socket_path]) == 98
        assert "listens there already" in capsys.readouterr().err
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


@pytest.mark.night
def test_a_socket_left_behind_is_replaced_and_a_file_is_not(tmp_path: Path, capsys) -> None:
    dead, file = tmp_path / "dead", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead))
    with listen_unix(str(dead)) as listener:
        assert listener.getsockname() == str(dead)
    assert not dead.exists()
    file.write_text("mine")
    assert main(["doctor", "--uds", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert any("this is a file" in each["what"] for each in found)
    assert file.read_text() == "mine"
