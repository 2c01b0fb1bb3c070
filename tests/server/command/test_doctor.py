"""`tokenyard doctor`: what it finds is what `serve` would stumble over."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns.servers.free_ports import free_port
from engine import diagnosis
from engine.diagnosis import Verdict
from server.command import doctor
from server.command.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TOKENYARD_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The exit code, and the findings by topic."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = main(["doctor", "--json", "--port", "0", *words])
        report = json.loads(capsys.readouterr().out)
        assert report["ok"] is (code == 0)
        return code, {finding["topic"]: finding for finding in report["findings"]}

    return run


@pytest.fixture
def no_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the other process where it does not matter: starting torch takes seconds."""
    monkeypatch.setattr(diagnosis, "_survey", lambda config: iter(()))


@pytest.mark.night
def test_a_server_that_would_start_is_reported_so_line_by_line(tiny_model: Path, capsys) -> None:
    # Kernels off: a machine without a compiler gets a warning.
    assert main(["doctor", str(tiny_model), "--port", "0", "--cpu-kernels", "off"]) == 0
    *lines, empty, verdict = capsys.readouterr().out.splitlines()
    assert (empty, verdict) == ("", "All is well; next: tokenyard serve")
    assert [line.split()[0] for line in lines] == ["ok"] * len(lines)
    said = "\n".join(lines)
    for topic in ("port", "connections", "packages", "runtime folder", "tokenizer", "chat template"):
        assert topic in said
    for part in (
        "torch ",
        "of memory available",
        "llama, made to generate",
        "none, as asked for",
        "F32",
        "context window 512 tokens",
    ):
        assert part in said


@pytest.mark.night
def test_a_fault_that_only_torch_can_find_ends_with_code_1(tiny_model: Path, examine) -> None:
    code, found = examine(str(tiny_model), "--max-model-len", "9999")
    assert code == 1
    assert found["memory"]["verdict"] == "fault"
    assert found["memory"]["fix"] == "ask for --max-model-len 512 or less"


def test_a_port_in_use_is_found(tiny_model: Path, no_survey, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        assert main(["doctor", str(tiny_model), "--port", str(port)]) == 1
    report = capsys.readouterr().out
    assert f"FAULT    port            --port {port}: process {os.getpid()}" in report
    assert "-> stop it, or choose another port" in report
    assert report.endswith("\nIt would not start: see port.\n")


def test_the_ports_of_probes_and_of_admin_routes_are_tried_too(tiny_model: Path, examine, no_survey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        for flag, topic in (("--health-port", "health port"), ("--admin-port", "admin port")):
            code, found = examine(str(tiny_model), flag, str(port))
            assert (code, found[topic]["verdict"]) == (1, "fault")
            assert found[topic]["what"].startswith(f"{flag} {port}: ")


def test_the_port_is_free_again_afterwards(tiny_model: Path, no_survey) -> None:
    port = free_port()
    assert main(["doctor", str(tiny_model), "--port", str(port)]) == 0
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("/no/such/model",), "no such folder"),
        (("--host", "0.0.0.0"), "without an API key"),
        (("--max-num-batched-tokens", "8", "--max-num-seqs", "16"), "every running sequence needs one token"),
    ],
)
def test_options_that_serve_would_refuse_are_a_fault_and_the_rest_is_still_looked_at(
    words, part, examine
) -> None:
    code, found = examine(*words)
    assert code == 1
    assert part in found["options"]["what"]
    assert found["options"]["fix"]
    assert found["model"]["verdict"] == "unknown"
    assert found["runtime folder"]["verdict"] == "ok"


def test_a_checkpoint_without_a_tokenizer_or_template_is_found(
    tiny_model: Path, tmp_path, examine, no_survey
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    code, found = examine(str(folder))
    assert (code, found["chat template"]["verdict"]) == (0, "warning")
    (folder / "tokenizer.json").write_text("{")
    code, found = examine(str(folder))
    assert (code, found["tokenizer"]["verdict"]) == (1, "fault")


def test_a_fault_of_a_model_on_demand_is_a_warning_since_the_others_are_served(
    tiny_model: Path, tmp_path: Path, capsys, no_survey, monkeypatch
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    (folder / "tokenizer.json").write_text("{")
    entries = f"{{model: {folder}, load: demand}}, {{model: {tmp_path}/gone, load: demand}}"
    (tmp_path / "models.yaml").write_text(f"models: [{{model: {tiny_model}}}, {entries}]")
    monkeypatch.setattr(diagnosis, "planned", lambda models: (models, {}))
    assert main(["doctor", "--models", str(tmp_path / "models.yaml"), "--port", "0"]) == 0
    report = capsys.readouterr().out
    assert "warning  tokenizer" in report
    assert "warning  model           gone cannot be loaded: " in report
    assert "there is no such folder" in report


def test_a_missing_folder_for_the_sockets_is_found(tiny_model, examine, monkeypatch, no_survey) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/tokenyard-is-not-here")
    code, found = examine(str(tiny_model))
    assert code == 1
    assert "TMPDIR" in found["runtime folder"]["fix"]


def test_few_open_files_mean_few_connections(tiny_model: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    code = (
        "from engine import diagnosis; diagnosis._survey = lambda config: iter(()); "
        "from server.command.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--port", "0", str(tiny_model)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, preexec_fn=few, check=False,
    )  # fmt: skip
    assert "warning  connections     64 at once" in done.stdout, done.stderr


def test_packages_are_held_against_their_bounds() -> None:
    assert diagnosis._out_of_bounds("pytest>=9,<10") == ""
    assert diagnosis._out_of_bounds("pytest<9,>=8").startswith("pytest is 9.")
    assert diagnosis._out_of_bounds("no-such-package>=1") == "no-such-package is missing"
    assert diagnosis._numbers("2.13.0+cpu") == diagnosis._numbers("2.13")


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("raise SystemExit('no driver')", "ended with code 1: no driver"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "was killed by signal SIGILL"),
    ],
)
def test_a_device_that_takes_the_process_down_is_a_fault_of_its_own(
    tiny_model, examine, monkeypatch, program, end
) -> None:
    monkeypatch.setattr(diagnosis.child_process, "INTERPRETER", (sys.executable, "-c", program))
    code, found = examine(str(tiny_model))
    assert code == 1
    assert end in found["device"]["what"]


def test_a_mistake_on_the_command_line_is_one_line_and_code_2(capsys) -> None:
    assert main(["doctor", "--prot", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_every_verdict_has_its_mark() -> None:
    assert doctor._MARKS.keys() == set(Verdict)


def test_it_imports_neither_torch_nor_transformers_itself() -> None:
    code = (
        "import sys, server.command.doctor, server.command.config_command\n"
        "found = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
