"""The command line of the load client, from options to exit status."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.load.load_command import main
from tests.bench.fake_openai import fake_openai


async def bench(*words: str) -> int:
    return await asyncio.to_thread(main, ["serve", *words])


async def test_a_run_prints_its_report_and_writes_it_as_json(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.json"
    async with fake_openai() as (fake, target):
        status = await bench(
            *("--base-url", target.url, "--num-prompts", "9", "--concurrency", "3", "--input-len", "65"),
            *("--shared-prefix-len", "30", "--output-len", "5", "--priority-mix", "0:1,-3:1", "--seed", "4"),
            *("--api-key", "secret", "--json", str(path)),
        )
    assert status == 0
    sent = fake.requests[2:]  # two came first, to measure words
    assert {len(each["prompt"].split(" ")) for each in sent} == {20}
    assert {each["priority"] for each in sent} == {0, -3}
    out = capsys.readouterr().out
    assert "Completed        9 of 9 requests" in out
    assert "Priority -3" in out
    document = json.loads(path.read_text())
    assert document["parameters"]["model"] == "fake"
    assert document["parameters"]["num_prompts"] == 9
    assert document["parameters"]["base_url"] == target.url
    assert document["summary"]["num_output_tokens"] == 45
    assert document["summary"]["num_prompt_tokens"] == 9 * 65
    assert document["summary"]["latencies"]["ttft_ms"]["count"] == 9
    assert [each["index"] for each in document["requests"]] == list(range(9))
    assert "secret" not in path.read_text() + out


async def test_an_open_loop_of_a_prompt_file_by_chat(tmp_path: Path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two", "max_tokens": 2}\n{"prompt": "overloaded"}\n')
    async with fake_openai() as (fake, target):
        words = ("--base-url", target.url, "--prompt-file", str(path), "--endpoint", "chat")
        status = await bench(*words, "--request-rate", "200", "--model", "other")
    assert status == 1  # one was refused
    assert "1 x HTTP 429 rate_limit_exceeded: try later" in capsys.readouterr().out
    assert [each["messages"][0]["content"] for each in fake.requests] == ["one two", "overloaded"]
    assert {each["model"] for each in fake.requests} == {"other"}


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENYARD_API_KEY", "first,second")
    async with fake_openai() as (fake, target):
        assert await bench("--base-url", target.url, "--num-prompts", "1") == 0
    assert all("Authorization: Bearer first\r\n" in head for head in fake.headers)


async def test_a_server_that_is_not_there_ends_the_run_before_it_starts(capsys) -> None:
    async with fake_openai() as (_, target):
        pass
    assert await bench("--base-url", target.url) == 2
    assert capsys.readouterr().err.startswith("tokenyard bench: no connection: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--concurrency", "2", "--request-rate", "3"], "not allowed with"),
        (["--num-prompts", "0"], "whole number"),
        (["--request-rate", "nan"], "number of at least"),
        (["--priority-mix", "0:x"], "PRIORITY:WEIGHT"),
        (["--priority-mix", "0:-1"], "positive"),
        (["--base-url", "localhost"], "expected http"),
        (["--input-len", "5", "--shared-prefix-len", "6", "--model", "m"], "cannot be longer"),
        (["--prompt-file", "/nonexistent/x", "--model", "m"], "cannot read"),
        (["--json", "/nonexistent/x"], "cannot write"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], complaint: str, capsys) -> None:
    assert main(["serve", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_help_is_no_error(capsys) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--shared-prefix-len" in capsys.readouterr().out
