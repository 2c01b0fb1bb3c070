"""A checkpoint is compared, file by file, with the list that the operator trusts."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine import diagnosis
from server.command.cli import main
from tests.e2e.serving import ROOT, running_server
from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.checkpoint.checksums import Checksums
from worker.worker_errors import StartupError

READ = (".json", ".jinja", ".safetensors")


@pytest.fixture
def folder(checkpoints: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, with a list of it beside it."""
    folder = Path(shutil.copytree(checkpoints("llama"), tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_list(folder)
    return folder


@pytest.fixture
def no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the doctor's other process: starting torch takes seconds, and it compares no files."""
    monkeypatch.setattr(diagnosis, "_survey", lambda config: iter(()))


def write_list(folder: Path) -> Path:
    """Write the list as `sha256sum` does."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in READ)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}" for path in files]
    list_file = list_of(folder)
    list_file.write_text("\n".join(lines) + "\n")
    return list_file


def list_of(folder: Path) -> Path:
    return folder.parent / "SHA256SUMS"


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def check(folder: Path) -> list[int]:
    """The pieces that were read of the weights."""
    checksums, pieces = Checksums.read(list_of(folder)), []
    checksums.check_texts(folder)
    checksums.check_weights(folder, [folder / "model.safetensors"], pieces.append)
    return pieces


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as caught:
        check(folder)
    assert "\n" not in str(caught.value)
    return caught.value.what


def test_a_folder_as_listed_is_loaded_and_every_byte_of_the_weights_was_read(folder: Path) -> None:
    assert sum(check(folder)) == (folder / "model.safetensors").stat().st_size
    load_worker(folder, checksums_file=str(list_of(folder)))


def test_sha256sum_writes_such_lists(folder: Path) -> None:
    if shutil.which("sha256sum") is None:
        pytest.skip("sha256sum is not installed")
    with list_of(folder).open("w") as stream:
        command = "sha256sum *.safetensors *.json *.jinja"
        subprocess.run(["sh", "-c", command], cwd=folder, stdout=stream, check=True)
    check(folder)
    with list_of(folder).open("w") as stream:
        subprocess.run(
            ["sh", "-c", "find . -type f -exec sha256sum --binary {} +"],
            cwd=folder,
            stdout=stream,
            check=True,
        )
    check(folder)


def test_one_bit_of_the_weights_that_differs_is_refused_and_without_a_list_nobody_notices(
    folder: Path,
) -> None:
    flip_last_bit(folder / "model.safetensors")
    load_worker(folder)
    with pytest.raises(StartupError, match=r"model\.safetensors is not the file that .*SHA256SUMS lists"):
        load_worker(folder, checksums_file=str(list_of(folder)))


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_configuration_tokenizer_and_templates_are_compared_too(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text() + " ")
    assert refusal(folder).startswith(f"{name} is not the file")


def test_a_text_that_somebody_added_or_took_away_is_refused(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"bos_token": "x"}')
    assert "has no checksum of special_tokens_map.json" in refusal(folder)
    write_list(folder)
    (folder / "special_tokens_map.json").unlink()
    assert "lacks special_tokens_map.json" in refusal(folder)


def test_weights_that_are_not_listed_are_refused(folder: Path) -> None:
    lines = list_of(folder).read_text().splitlines()
    list_of(folder).write_text("\n".join(line for line in lines if "safetensors" not in line))
    assert "has no checksum of model.safetensors" in refusal(folder)


def test_dense_layers_in_a_folder_below_are_compared_too(folder: Path) -> None:
    (folder / "2_Dense").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "2_Dense" / "model.safetensors")
    write_list(folder)
    check(folder)
    flip_last_bit(folder / "2_Dense" / "model.safetensors")
    assert refusal(folder).startswith("2_Dense/model.safetensors is not the file")


def test_files_that_are_never_read_need_no_checksum_and_hidden_ones_are_none_of_ours(folder: Path) -> None:
    (folder / "README.md").write_text("read me")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "state.json").write_text("{}")
    with list_of(folder).open("a") as stream:
        stream.write("# a comment\n\n" + "0" * 64 + "  LICENSE\n")
    check(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no file"),
        ("model.safetensors\n", "line 1 is not a SHA-256"),
        (f"{'0' * 63}  config.json\n", "line 1 is not a SHA-256"),
        (f"SHA256 (config.json) = {'0' * 64}\n", "line 1 is not a SHA-256"),
        (f"\n{'0' * 64}  ../config.json\n", "line 2 names a file outside"),
        (f"{'0' * 64}  /etc/config.json\n", "outside"),
        (f"{'0' * 64}  config.json\n{'1' * 64}  config.json\n", "config.json twice"),
        ("0" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_a_list_that_is_wrong_is_refused_before_anything_is_read(
    folder: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    list_of(folder).write_text(text)
    with pytest.raises(StartupError, match=words):
        Checksums.read(list_of(folder))
    assert main(["serve", str(folder), "--checksums", str(list_of(folder)), "--port", "0"]) == 2
    assert words in capsys.readouterr().err


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="SHA256SUMS cannot be read: No such file"):
        Checksums.read(tmp_path / "SHA256SUMS")


@pytest.mark.night
@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_doctor_and_serve_refuse_the_same_file(
    folder: Path, name: str, no_survey: None, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_last_bit(folder / name)
    options = [str(folder), "--port", "0", "--checksums", str(list_of(folder)), "--cpu-kernels", "off"]
    assert main(["doctor", *options]) == 1
    assert f"FAULT    checksums       {name} is not the file" in capsys.readouterr().out
    served = subprocess.run(
        [sys.executable, "-m", "server", "serve", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert served.returncode == 78
    assert f"tokenyard: {name} is not the file that" in served.stderr


@pytest.mark.night
def test_a_server_starts_on_a_folder_as_listed_and_doctor_says_it_would(
    folder: Path, tmp_path: Path, no_survey: None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (str(folder), "--checksums", str(list_of(folder)))
    assert main(["doctor", *options, "--port", "0", "--cpu-kernels", "off"]) == 0
    assert "ok       checksums" in capsys.readouterr().out
    with running_server(tmp_path, *options) as server:
        assert "all files are as" in server.text()
