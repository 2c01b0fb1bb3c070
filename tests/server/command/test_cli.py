"""The command: answers at once, says mistakes in one line, takes the port before the model loads."""

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import server.command.startup
from engine.options.engine_config import ServerConfig, resolve
from engine.options.options import Options
from engine.types import ModelInfo, PoolingFacts, PoolingTask, PromptComputation
from server.command.cli import main
from server.command.startup.banner import LoadingDisplay, render_banner
from server.edge.http.listening import listen, url_of

INFO = ModelInfo(
    served_names=("it's \x1b[31mred", "other"),
    model_type="llama",
    weight_bytes=1,
    num_parameters=134_515_008,
    dtype="bfloat16",
    device="cpu (2 threads)",
    kernels="avx512-bf16",
    vocab_size=49152,
    max_model_len=2048,
    block_size=32,
    num_blocks=200,
    kv_cache_bytes=3 * 2**28,
    eos_token_ids=(2,),
    has_chat_template=True,
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TOKENYARD_")]:
        monkeypatch.delenv(name)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stands in for the launcher; what it was called with, and whether it could be connected to."""
    calls: list[tuple] = []

    def run(models, server_config, listeners) -> int:
        asked = [each for each in (listeners.main, listeners.probes, listeners.admin) if each is not None]
        for listener in asked:
            socket.create_connection(listener.getsockname()).close()
        calls.append((models[0].engine, server_config, *map(url_of, asked)))
        return 7

    launch = ModuleType("server.command.startup.launch")
    launch.run = run
    monkeypatch.setitem(sys.modules, "server.command.startup.launch", launch)
    monkeypatch.setattr(server.command.startup, "launch", launch, raising=False)
    return calls


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    def read() -> str:
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("tokenyard: ")
        assert err.count("\n") == 1
        return err

    return read


def test_help_loads_neither_a_tensor_library_nor_a_web_framework() -> None:
    code = (
        "import sys; from server.command.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'tokenizers', 'zmq', 'yaml'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


def test_serve_hands_the_configuration_and_a_listening_socket_to_the_launcher(checkpoint, launched) -> None:
    assert main(["serve", str(checkpoint), "--port", "0", "--max-num-seqs", "3"]) == 7
    ((engine_config, server_config, url),) = launched
    assert engine_config.scheduler.max_num_seqs == 3
    assert server_config.port == 0
    assert url.startswith("http://127.0.0.1:")


def test_the_admin_port_is_taken_as_early_as_the_other_and_named_when_it_cannot_be(
    checkpoint, launched, error_line
) -> None:
    words = ["serve", str(checkpoint), "--port", "0", "--admin-port"]
    assert main([*words, "0"]) == 7
    ((_, _, url, admin_url),) = launched
    assert url != admin_url
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        assert main([*words, str(port)]) == 98
    assert f"--admin-port {port}" in error_line()


def test_serve_is_what_the_command_does_without_a_word(checkpoint, launched) -> None:
    assert main(["--model", str(checkpoint), "--port", "0"]) == 7


def test_bench_gets_the_rest_of_the_line(monkeypatch) -> None:
    bench = ModuleType("bench.load.command")
    bench.main = len
    monkeypatch.setitem(sys.modules, "bench.load.command", bench)
    assert main(["bench", "--url", "x"]) == 2
    assert main(["bench"]) == 0


def test_the_version_is_printed(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tokenyard ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["serve", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["serve", "--max-num-seq=3"], "did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs", "none"], "whole number"),
        (["serve", "--port", "99999"], "from 0 to 65535"),
        (["serve", "--port"], "expected one argument"),
        (["config", "show", "a", "b"], "more than one MODEL"),
        (["serve", "a", "b"], "no such folder"),
        (["serve", "/no/such/folder\nat all"], "no such folder"),
        (["bnech"], "did you mean bench?"),
        (["serve", "--host", "0.0.0.0"], "TOKENYARD_API_KEY"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(checkpoint, launched, error_line, words, part) -> None:
    assert main(words) == 2
    assert part in error_line()
    assert launched == []


def test_a_gguf_file_that_cannot_be_served_is_one_line_and_code_78(tmp_path, launched, error_line) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    assert main(["serve", str(tmp_path / "broken.gguf")]) == 78
    assert "broken.gguf cannot be read" in error_line()


def test_a_mistyped_flag_does_not_repeat_its_value(checkpoint, error_line) -> None:
    assert main(["serve", str(checkpoint), "--api-keys=sk-secret"]) == 2
    assert "sk-secret" not in error_line()


def test_a_port_in_use_is_told_with_its_owner_and_code_98(checkpoint, launched, error_line) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = owner.getsockname()[1]
        assert main(["serve", str(checkpoint), "--port", str(port)]) == 98
    line = error_line()
    assert f"--port {port}" in line
    if Path("/proc/net/tcp").exists():
        assert f"process {os.getpid()} (" in line
    assert launched == []


def test_an_address_that_is_not_ours_is_told_in_one_line(checkpoint, error_line) -> None:
    assert main(["serve", str(checkpoint), "--host", "192.0.2.1", "--allow-unauthenticated"]) == 2
    assert "192.0.2.1" in error_line()


def test_the_url_of_a_wildcard_address_can_be_opened_from_this_machine() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def _configs(folder: Path, **options) -> tuple:
    return resolve(Options(model=str(folder), **options), environment={})


def test_the_banner_tells_what_was_loaded_and_how_to_call_it(checkpoint) -> None:
    engine_config, server_config = _configs(checkpoint, scheduling_policy="priority")
    banner = render_banner(INFO, engine_config, server_config, url="http://127.0.0.1:8000")
    for part in (
        "135 million parameters",
        "cpu (2 threads), bfloat16, avx512-bf16 kernels",
        "2,048 tokens",
        "6,400 tokens in 200 blocks, 768.00 MiB",
        "3 requests of full length",
        "priority",
        "http://127.0.0.1:8000",
    ):
        assert part in banner
    assert "\x1b" not in banner
    assert "Authorization" not in banner


@pytest.mark.parametrize(
    ("task", "size", "expected"),
    [
        (PoolingTask.EMBED, 384, ("embeddings of 384 dimensions", "/v1/embeddings", '"input"')),
        (PoolingTask.SCORE, 1, ("scores of pairs", "/v1/rerank", '"documents"')),
    ],
)
def test_the_banner_of_an_encoder_shows_its_endpoint_and_no_kv_cache(
    checkpoint, task: PoolingTask, size: int, expected: tuple[str, ...]
) -> None:
    facts = PoolingFacts(task=task, num_dimensions=size, prompt=PromptComputation.AT_ONCE)
    info = replace(INFO, pooling=facts, kv_cache_bytes=0)
    banner = render_banner(info, *_configs(checkpoint), url="http://h")
    assert "KV cache" not in banner
    assert all(part in banner for part in expected)


def test_the_banner_of_a_family_without_a_paged_cache_says_that_it_is_slow(checkpoint) -> None:
    banner = render_banner(replace(INFO, groups=()), *_configs(checkpoint), url="http://h")
    assert "one after the other, slowly" in banner
    assert "prefix caching off" in banner


def test_the_pasted_command_sends_the_served_name_whatever_it_holds(checkpoint) -> None:
    banner = render_banner(INFO, *_configs(checkpoint), url="http://127.0.0.1:8000")
    command = banner[banner.index("curl") :].strip()
    shell = f'curl() {{ for word; do last=$word; done; printf %s "$last"; }}; {command}'
    body = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    assert '"model": "it\'s \\u001b[31mred"' in body


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("http://127.0.0.1:8000", "Try: tokenyard chat\n"),
        ("http://127.0.0.1:9", "Try: tokenyard chat --base-url http://127.0.0.1:9\n"),
    ],
)
def test_the_banner_begins_with_the_shortest_way_to_talk_to_the_model(checkpoint, url, command) -> None:
    assert command in render_banner(INFO, *_configs(checkpoint), url=url)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--ctx-size", "4096"], "here it is --max-model-len"),
        (["--trust-remote-code=yes"], "it is not needed here: code of a checkpoint is never run"),
        (["--load-format", "auto"], "it is not needed here: `tokenyard pull` fetches models"),
        (["--mamba-ssm-cache-dtype", "bfloat16"], "states of recurrent layers are float32: they are rounded"),
        (["--mem-fraction-static=0.9"], "here it is --gpu-memory-utilization"),
        (["--swap-space", "4"], "with a unit, such as 4GiB: this is 4 bytes"),
        (["--max-num-seqz", "4"], "did you mean --max-num-seqs?"),
        (["--cpu-offload-gb", "4"], "weights lie on the device as a whole"),
        (["--runner", "pooling"], "use --task"),
        (["--quantization", "awq"], "a checkpoint that is quantized already is read as it is"),
        (["--frobnicate"], "`tokenyard serve --help=all` lists all options"),
    ],
)
def test_an_option_of_another_server_is_answered_with_ours(launched, error_line, words, advice) -> None:
    assert main(["serve", *words]) == 2
    assert advice in error_line()


def test_a_command_line_of_vllm_starts_and_what_changes_nothing_is_told_in_a_line_each(
    checkpoint, launched, tmp_path, capsys
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    c = json.dumps({"name": "c", "path": str(tmp_path / "c"), "base_model_name": "base"})
    adapters = [f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", c]
    switches = ["--enable-lora", "--trust_remote_code", "--disable-log-requests"]
    for words in (
        [str(checkpoint), *switches, "--lora-modules", *adapters, "--port", "0"],
        [*switches, "--port", "0", "--lora-modules", *adapters, str(checkpoint)],
        [str(checkpoint), "--port=0", *switches, "--lora-modules", *adapters[:2], "--lora-modules", c],
        [
            switches[0],
            "False",
            *switches[1:],
            "true",
            str(checkpoint),
            "--port=0",
            "--lora-modules",
            *adapters,
        ],
    ):
        assert main(["serve", *words]) == 7
        told = capsys.readouterr().err.splitlines()
        assert [line.split(": ")[1].split()[0] for line in told] == [
            "--enable-lora",
            "--trust-remote-code",
            "--disable-log-requests",
        ]
        engine_config, *_ = launched.pop()
        assert [each.name for each in engine_config.worker.adapters] == ["a", "b", "c"]
        assert engine_config.model_path == str(checkpoint)


def test_flags_of_vllm_with_values_that_change_nothing_are_passed_over(checkpoint, launched, capsys) -> None:
    words = ["-O3", "--compilation-config", '{"level": 3}', "--num-scheduler-steps=8", str(checkpoint)]
    assert main(["serve", *words, "--enable-log-requests", "--reasoning-parser", "qwen3", "--port", "0"]) == 7
    said = [line.split(": ")[1].split()[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["-O3", "--compilation-config", "--num-scheduler-steps", "--enable-log-requests"]
    engine_config, *_ = launched.pop()
    assert engine_config.model_path == str(checkpoint)


def test_the_words_of_an_option_may_be_joined_by_underscores_as_with_vllm(checkpoint, launched) -> None:
    words = [str(checkpoint), "--max_num_seqs", "6", "--served_model_name=a_b", "--port", "0"]
    assert main(["serve", *words]) == 7
    engine_config, *_ = launched.pop()
    assert (engine_config.scheduler.max_num_seqs, engine_config.served_names) == (6, ("a_b",))


def test_several_names_may_stand_behind_one_flag_as_with_vllm_where_the_model_comes_first(
    checkpoint, launched
) -> None:
    for words in (
        [str(checkpoint), "--served-model-name", "a", "b", "--port", "0"],
        [str(checkpoint), "--port=0", "--served_model_name", "a", "--served-model-name", "b"],
        ["--port", "0", "--served-model-name", "a", "--served-model-name", "b", str(checkpoint)],
    ):
        assert main(["serve", *words]) == 7
        engine_config, *_ = launched.pop()
        assert (engine_config.model_path, engine_config.served_names) == (str(checkpoint), ("a", "b"))


def test_a_folder_that_is_a_link_is_served_under_the_name_of_the_link(checkpoint, launched, tmp_path) -> None:
    link = tmp_path / "short-name"
    link.symlink_to(checkpoint)
    assert main(["serve", str(link), "--port", "0"]) == 7
    engine_config, *_ = launched.pop()
    assert engine_config.served_names[0] == "short-name"


def test_the_banner_never_shows_an_api_key(checkpoint) -> None:
    engine_config, server_config = _configs(checkpoint, api_key=("sk-secret",))
    banner = render_banner(INFO, engine_config, server_config, url="http://h")
    assert "sk-secret" not in banner
    assert "$TOKENYARD_API_KEY" in banner
    assert "sk-secret" not in repr(server_config)
    assert isinstance(server_config, ServerConfig)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_one_changing_line_on_a_terminal() -> None:
    now, stream = [0.0], _Terminal()
    display = LoadingDisplay(stream, clock_s=lambda: now[0])
    for step in range(1, 4):
        now[0] = step
        display.update(step / 4, "reading weights", f"{step} of 4 GiB")
    display.close()
    display.close()
    assert "\n" not in stream.getvalue()
    assert "75%  reading weights  3 of 4 GiB  about 1 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_the_time_before_any_progress_is_no_part_of_the_estimate() -> None:
    now, stream = [0.0], _Terminal()
    display = LoadingDisplay(stream, clock_s=lambda: now[0])
    for second, fraction in ((8, 0.0), (9, 0.25)):
        now[0] = second
        display.update(fraction, "reading weights")
    assert "about 3 s left" in stream.getvalue()


def test_loading_is_a_line_every_two_seconds_in_a_log_file() -> None:
    now, stream = [0.0], io.StringIO()
    display = LoadingDisplay(stream, clock_s=lambda: now[0])
    for _ in range(41):
        display.update(now[0] / 4, "reading weights")
        now[0] += 0.1
    display.close()
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 3
    assert "\x1b" not in stream.getvalue()
    assert lines[1].startswith("loading: 5")


def test_a_reader_of_a_pipe_that_has_seen_enough_ends_a_command_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "server", "completion", "bash"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
