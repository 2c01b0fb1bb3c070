"""`tokenyard keys`: what it prints can be pasted, and opens the server."""

import io

import pytest

from engine.options.api_keys import KeysFile, digest_of
from server.command.cli import main


def entries(path, text: str):
    path.write_text(text)
    path.chmod(0o600)
    return KeysFile(str(path)).read()


def test_a_new_key_is_shown_once_and_its_entry_says_only_its_hash(capsys, tmp_path) -> None:
    assert main(["keys", "new", "team-a"]) == 0
    shown = capsys.readouterr()
    key = shown.err.split()[-1]
    assert len(key) > 40
    assert key not in shown.out
    (entry,) = entries(tmp_path / "keys.yaml", shown.out)
    assert (entry.name, entry.digest) == ("team-a", digest_of(key.encode()))


def test_two_keys_differ_and_their_entries_make_one_file(capsys, tmp_path) -> None:
    main(["keys", "new", "a"])
    main(["keys", "new", "b"])
    first, second = entries(tmp_path / "keys.yaml", capsys.readouterr().out)
    assert first.digest != second.digest


def test_a_key_of_ones_own_is_read_from_stdin(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a-key-that-somebody-drew\n"))
    assert main(["keys", "hash", "a"]) == 0
    shown = capsys.readouterr()
    assert entries(tmp_path / "keys.yaml", shown.out)[0].digest == digest_of(b"a-key-that-somebody-drew")
    assert "a-key-that" not in shown.out + shown.err


def test_a_key_that_could_be_guessed_is_refused_and_not_repeated(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hunter2\n"))
    assert main(["keys", "hash", "a"]) == 2
    told = capsys.readouterr().err
    assert "7 characters" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    "words", [[], ["new"], ["old", "a"], ["new", "a", "b"], ["new", "key-1"], ["new", "a b"]]
)
def test_a_mistake_is_told_with_code_2(capsys, words) -> None:
    assert main(["keys", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
