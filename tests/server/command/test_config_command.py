"""`tokenyard config`: what holds, who said so, and no secret."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.options.options import BY_KEY, Group
from engine.options.schema import file_schema
from server.command.cli import main


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENYARD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def read(*words: str) -> dict[str, Any]:
        assert main(["config", "show", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)["options"]

    return read


def test_every_option_is_shown_with_who_decided_it(show, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 1\nport: 1\nwatermark: 2%\n")
    monkeypatch.setenv("TOKENYARD_CONFIG", str(file))
    monkeypatch.setenv("TOKENYARD_PORT", "2")
    monkeypatch.setenv("TOKENYARD_MAX_NUM_SEQS", "2")
    rows = show("--max-num-seqs", "3")
    assert rows.keys() == BY_KEY.keys()
    found = {key: (rows[key]["value"], rows[key]["origin"]) for key in ("max-num-seqs", "port", "watermark")}
    assert found == {
        "max-num-seqs": (3, "command line"),
        "port": (2, "environment"),
        "watermark": (0.02, "file"),
    }
    others = {row["origin"] for key, row in rows.items() if key not in found}
    assert others == {"default"}


def test_a_model_that_is_not_there_is_still_shown(show) -> None:
    assert show("/no/such/folder")["model"] == {
        "value": "/no/such/folder",
        "shown": "/no/such/folder",
        "origin": "command line",
    }


def test_a_key_is_never_shown(show, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TOKENYARD_API_KEY", "sk-1234,sk-5678")
    assert show()["api-key"] == {"value": ["***", "***"], "shown": "***, ***", "origin": "environment"}
    assert main(["config", "show"]) == 0
    assert "sk-" not in capsys.readouterr().out


def test_for_people_each_option_is_a_line_with_units(capsys) -> None:
    assert main(["config", "show", "--kv-cache-memory", "2G"]) == 0
    lines = capsys.readouterr().out.splitlines()
    options = [line for line in lines if line.startswith("  ")]
    assert [line.split()[0] for line in options] == list(BY_KEY)
    assert [line.rstrip(":") for line in lines if line and line not in options] == [
        each.value for each in Group
    ]
    assert any(line.split() == ["kv-cache-memory", "command", "line", "2", "GiB"] for line in lines)


def test_only_what_was_set_is_shown_on_request(show, capsys) -> None:
    assert show("--changed", "--dtype", "half") == {
        "dtype": {"value": "float16", "shown": "float16", "origin": "command line"}
    }
    assert main(["config", "show", "--changed"]) == 0
    assert "default" in capsys.readouterr().out


def test_the_schema_is_printed_as_json(capsys) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(file_schema()))


@pytest.mark.parametrize(
    "words",
    [["config"], ["config", "shwo"], ["config", "show", "--prt", "1"], ["config", "show", "--port", "x"]],
)
def test_a_mistake_is_one_line_and_code_2(words, capsys) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tokenyard: ")
    assert err.count("\n") == 1
