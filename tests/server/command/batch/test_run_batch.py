"""`tokenyard run-batch`: files in and out, sending again, going on after an interruption."""

import asyncio
import json
import math
import signal
import sys
from pathlib import Path

import pytest

from engine.errors import Overloaded, RequestFailed
from engine.options.options import OptionError
from engine.processes.engine_processes import GaveUp
from engine.types import FinishReason
from server.api.batches.lines import (
    BatchFileError,
    BatchRequest,
    LineFault,
    check_input,
    fault_line,
    open_output,
)
from server.api.batches.run import BatchRun, ServerLost
from server.app import build_app
from server.command.batch import command as cli
from server.command.batch.command import CannotRun
from server.command.batch.local_engine import while_it_lives
from server.command.command_line import OptionParser
from server.edge.http.http_client import ExchangeFailed, Reply
from server.endpoints import BATCH_PATHS
from tests.server.conftest import Settings, eventually, serving

ROOT = Path(__file__).resolve().parents[4]
CHAT = "/v1/chat/completions"


def line(custom_id: str, **changes) -> str:
    body = {"messages": [{"role": "user", "content": custom_id}], "max_tokens": 2}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes})


def answers(path: Path) -> dict[str, dict]:
    found = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in found}
    assert len(by_id) == len(found), "a request was answered twice"
    return by_id


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line(f"r{number}") for number in range(6)) + "\n")
    return source, tmp_path / "out.jsonl"


async def run(url: str, files: tuple[Path, Path], *words: str) -> int:
    """The command in a thread of its own, since it brings its own event loop."""
    source, target = files
    words = ("-i", str(source), "-o", str(target), "--base-url", url, *words)
    return await asyncio.to_thread(cli.main, words)


async def test_every_request_gets_its_line(url, files, capsys):
    assert await run(url, files) == 0
    found = answers(files[1])
    assert found.keys() == {f"r{number}" for number in range(6)}
    answer = found["r3"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["request_id"].startswith("req_")
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "R3"
    assert "6 answered, 0 of them with an error" in capsys.readouterr().err


async def test_all_endpoints_of_a_batch_are_asked(url, files, tmp_path):
    bodies = {
        "/v1/completions": {"prompt": "ab", "max_tokens": 1},
        "/v1/responses": {"input": "ab", "max_output_tokens": 1},
    }
    files[0].write_text("\n".join(line(path, url=path, body=body) for path, body in bodies.items()))
    assert await run(url, files) == 0
    found = answers(files[1])
    assert found["/v1/completions"]["response"]["body"]["choices"][0]["text"] == "A"
    assert found["/v1/responses"]["response"]["body"]["output"][0]["content"][0]["text"] == "A"


async def test_what_is_wrong_with_a_request_is_told_in_its_own_line(url, files):
    faulty = [
        line("method", method="GET"),
        line("url", url="/v1/files"),
        line("body", body=[]),
        line("stream", body={"stream": True}),
        line("refused", body={"messages": []}),
        line("good"),
    ]
    files[0].write_text("\n".join(faulty))
    assert await run(url, files) == 1
    found = answers(files[1])
    for name in ("method", "url", "body", "stream"):
        assert found[name]["response"] is None
        assert name in found[name]["error"]["message"]
    assert found["refused"]["response"]["status_code"] == 400
    assert found["refused"]["response"]["body"]["error"]["param"] == "messages"
    assert found["good"]["response"]["status_code"] == 200


async def test_what_was_answered_before_is_not_asked_again_and_half_a_line_is_removed(
    url, files, engine, capsys
):
    _, target = files
    assert await run(url, files) == 0
    whole = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(whole[:4]) + whole[4][:20])
    num_before = len(engine.requests)
    assert await run(url, files) == 0
    assert len(engine.requests) - num_before == 2
    assert len(answers(target)) == 6
    assert "4 had been answered before" in capsys.readouterr().err
    assert await run(url, files) == 0
    assert len(engine.requests) - num_before == 2


async def test_a_refusal_for_now_is_sent_again_when_the_server_says(url, files, engine):
    engine.admission_error = Overloaded("full", retry_after_s=0.05)
    running = asyncio.create_task(run(url, files))
    await eventually(lambda: len(engine.requests) >= 6)
    engine.admission_error = None
    assert await running == 0
    assert all(answer["response"]["status_code"] == 200 for answer in answers(files[1]).values())


async def test_a_refusal_that_lasts_too_long_is_recorded(url, files, engine):
    engine.admission_error = Overloaded("full", retry_after_s=0.05)
    assert await run(url, files, "--retry-for", "0.2") == 1
    assert {answer["response"]["status_code"] for answer in answers(files[1]).values()} == {429}


async def test_a_failure_of_the_model_is_not_sent_again(url, files, engine):
    engine.admission_error = RequestFailed("no")
    assert await run(url, files) == 1
    assert len(engine.requests) == 6


async def test_no_more_than_so_many_are_under_way(url, files, engine):
    engine.pause_s = 0.02
    most = 0
    running = asyncio.create_task(run(url, files, "--concurrency", "2"))
    while not running.done():
        most = max(most, engine.num_running)
        await asyncio.sleep(0.002)
    assert await running == 0
    assert most == 2


async def test_keys_are_sent(engine, files, monkeypatch):
    monkeypatch.setenv("TOKENYARD_API_KEY", "right,other")
    async with serving(build_app(engine, Settings(api_keys=("right",)))) as url:
        assert await run(url, files) == 0
        files[1].unlink()
        assert await run(url, files, "--api-key", "wrong") == 1


async def test_a_server_that_is_not_there_is_told_before_anything_is_written(files, capsys):
    assert await run("http://127.0.0.1:9", files) == 69
    assert files[1].read_bytes() == b""
    assert "cannot be reached" in capsys.readouterr().err


async def test_a_server_that_is_lost_ends_the_run_without_lines_for_what_is_open(files):
    class Lost:
        async def post(self, path: str, body: bytes) -> Reply:
            raise ExchangeFailed("no reply", "gone")

    lines: list[bytes] = []
    source = check_input(files[0])
    run = BatchRun(client=Lost(), write=lines.append, concurrency=2, retry_s=0.0)
    with pytest.raises(ServerLost, match="gone"):
        await run.send_all(source.requests(), paths=BATCH_PATHS)
    assert lines == []


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "custom_id"),
        ('{"custom_id": 7}', "custom_id"),
        ('{"custom_id": ""}', "custom_id"),
        (f"{line('a')}\n\n{line('a')}", "line 3"),
    ],
)
def test_an_input_that_would_make_the_output_ambiguous_is_refused(files, content, word):
    files[0].write_text(content)
    with pytest.raises(BatchFileError, match=word):
        check_input(files[0])


@pytest.mark.parametrize("content", ["a note", f"{line('a')}\n{line('b')}", f"a note\n{line('b')}\n"])
def test_a_file_that_has_something_else_is_not_written_over(files, content):
    files[1].write_text(content)
    with pytest.raises(BatchFileError, match="line 1 is no answer"), open_output(files[1]):
        pass
    assert files[1].read_text() == content


def test_zeros_where_a_power_cut_left_an_answer_are_removed(files):
    whole = fault_line("a", "x")
    for rest in (b"", whole[:9], b"\0" * 50, whole[:9] + b"\0" * 50):
        files[1].write_bytes(whole + rest)
        with open_output(files[1]) as output:
            assert output.answered_ids == {"a"}
        assert files[1].read_bytes() == whole


def test_two_runs_cannot_write_one_file(files):
    with open_output(files[1]), pytest.raises(BatchFileError, match="another run"), open_output(files[1]):
        pass


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--port", "9"), "opens no port"),
        (("--base-url", "nonsense"), "expected http"),
        (("--base-url", "http://h", "--max-num-seqs", "3"), "options of its own"),
        (("--concurrency", "0"), "from 1 to"),
        (("--max-num-seq", "3"), "did you mean"),
    ],
)
def test_a_mistake_on_the_command_line_is_told_before_any_file_is_touched(files, words, part):
    with pytest.raises(OptionError, match=part):
        cli.main(("-i", str(files[0]), "-o", str(files[1]), *words))
    assert not files[1].exists()


async def test_ctrl_c_leaves_a_file_that_can_be_gone_on_with(url, files, engine):
    files[0].write_text("\n".join(line(f"r{number}") for number in range(40)))
    engine.pause_s = 0.02
    command = ("-m", "server", "run-batch", "-i", files[0], "-o", files[1], "--base-url", url)
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--concurrency", "2", cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    await eventually(lambda: files[1].exists() and files[1].stat().st_size > 0, timeout_s=20.0)
    child.send_signal(signal.SIGINT)
    _, said = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 130
    assert b"again to go on" in said
    assert b"Traceback" not in said
    num_answered = len(answers(files[1]))
    assert 0 < num_answered < 40
    await eventually(lambda: engine.num_running == 0)
    engine.pause_s = 0.0
    assert await run(url, files) == 0
    assert len(answers(files[1])) == 40


@pytest.mark.parametrize(
    ("words", "seconds"), [([], math.inf), (["--request-timeout", "90"], 90.0), (["--config"], 5.0)]
)
def test_requests_of_a_batch_have_no_time_limit_that_nobody_asked_for(tiny_model, tmp_path, words, seconds):
    options = tmp_path / "options.yaml"
    options.write_text("request-timeout: 5s\n")
    words = [*words, str(options)] if words == ["--config"] else words
    found = OptionParser(prog="x", description="").read([str(tiny_model), *words])
    engine, _ = cli._configs(found)
    assert engine.time_limits.total_s == seconds


async def test_answers_that_a_time_limit_cut_off_are_counted(url, files, engine, capsys):
    body = {"input": "ab", "max_output_tokens": 1}
    files[0].write_text(f"{line('chat')}\n{line('response', url='/v1/responses', body=body)}\n")
    engine.end_as = FinishReason.EXPIRED
    assert await run(url, files) == 0
    assert "2 answered, 0 of them with an error, 2 cut off by a time limit" in capsys.readouterr().err


async def test_a_run_ends_when_its_engine_is_gone_for_good():
    class Engine:
        async def gave_up(self) -> GaveUp:
            return GaveUp(exit_code=70, what="the engine died too often", fix="see the log")

    with pytest.raises(CannotRun, match="too often") as caught:
        async with while_it_lives(Engine()):
            await asyncio.sleep(10)
    assert caught.value.code == 70


@pytest.mark.parametrize("url", [[], {}, None, 5])
def test_a_url_that_is_no_text_is_a_fault_of_its_line(url):
    request = BatchRequest(custom_id="a", method="POST", url=url, body={})
    with pytest.raises(LineFault, match="url must be one of"):
        request.check_url(frozenset({"/v1/completions"}))
