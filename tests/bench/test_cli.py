"""The command line of the load client, from options to exit status."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.load.command import main
from bench.load.rate_sweep import RunOfSweep, parse_sweep, render_sweep, run_sweep
from bench.load.report import summarize
from bench.simulate.command import main as simulate
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


async def test_a_run_reports_the_goodput_under_its_limits(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.json"
    words = ("--num-prompts", "6", "--request-rate", "500", "--arrivals", "burst", "--burst-size", "3")
    async with fake_openai() as (_, target):
        limits = ("--goodput", "ttft:600000,itl:600000", "e2el:600000", "--json", str(path))
        assert await bench("--base-url", target.url, *words, *limits) == 0
        kept = json.loads(path.read_text())["summary"]["goodput"]
        assert (kept["num_good"], kept["limits"]) == (6, "ttft:600000, itl:600000, e2el:600000")
        assert await bench("--base-url", target.url, *words, "--goodput", "e2el:0.001") == 0
    out = capsys.readouterr().out
    assert "6 of 6 requests within ttft:600000" in out
    assert "0.00 requests/s: 0 of 6 requests within e2el:0.001" in out


async def test_a_sweep_finds_the_saturation_and_runs_every_rate_with_prompts_of_its_own(
    tmp_path: Path, capsys
) -> None:
    path = tmp_path / "sweep.json"
    async with fake_openai() as (fake, target):
        status = await bench(
            *("--base-url", target.url, "--num-prompts", "4", "--output-len", "4", "--json", str(path)),
            *("--sweep", "200%,300", "--concurrency", "2", "--goodput", "ttft:600000"),
        )
    assert status == 0
    assert len({each["prompt"] for each in fake.requests[2:]}) == 12
    captured = capsys.readouterr()
    assert "saturation: 4 requests, 2 clients\n" in captured.err
    assert "run 2 of 2: 4 requests, 300 a second\n" in captured.err
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines] == ["rate", "saturation", "200%", "300"]
    assert all(line.split()[-2:] == ["4/4", "0"] for line in lines[1:])
    document = json.loads(path.read_text())
    assert document["parameters"]["sweep"] == ["200%", "300"]
    assert document["parameters"]["concurrency"] == 2
    closed, share, rate = document["runs"]
    assert closed["asked_per_s"] is None
    assert share["asked_per_s"] == 2 * closed["summary"]["requests_per_s"]
    assert rate["asked_per_s"] == 300
    assert [len(each["requests"]) for each in document["runs"]] == [4, 4, 4]


async def test_a_sweep_of_plain_rates_needs_no_saturation(capsys) -> None:
    async with fake_openai() as (fake, target):
        words = ("--base-url", target.url, "--num-prompts", "2", "--output-len", "2")
        assert await bench(*words, "--sweep", "400", "--arrivals", "constant") == 0
    assert len(fake.requests) == 2 + 2
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["rate", "400"]


async def test_a_server_that_refuses_everything_has_no_saturation(tmp_path: Path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "overloaded"}\n')
    async with fake_openai() as (fake, target):
        words = ("--base-url", target.url, "--prompt-file", str(path), "--model", "m")
        assert await bench(*words, "--sweep", "80%") == 2
        assert len(fake.requests) == 1
        assert await bench(*words, "--sweep", "300,400") == 1  # both run, and their failures are counted
    captured = capsys.readouterr()
    assert "no saturation: no request completed (try later)" in captured.err
    assert [line.split()[-1] for line in captured.out.splitlines()] == ["failed", "1", "1"]


async def test_ctrl_c_ends_a_sweep_with_the_run_that_it_ended() -> None:
    asked: list[float | None] = []

    async def send(requests_per_s: float | None, place: int) -> RunOfSweep:
        asked.append(requests_per_s)
        assert place == len(asked)
        return RunOfSweep(
            records=(), summary=summarize([], num_planned=3), is_interrupted=requests_per_s == 2.0
        )

    rows = await run_sweep(parse_sweep("1,2,3"), send)
    assert asked == [1.0, 2.0]
    assert "3" in render_sweep(rows)


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
        (["--sweep", "1,fast"], "got 'fast'"),
        (["--sweep", "1,0%"], "got '0%'"),
        (["--sweep", ",".join(["1"] * 33)], "at most 32 rates"),
        (["--sweep", "1", "--request-rate", "3"], "leave --request-rate out"),
        (["--sweep", "1,2", "--concurrency", "3"], "no rate is a share"),
        (["--arrivals", "constant"], "needs --request-rate or --sweep"),
        (["--arrivals", "often", "--request-rate", "3"], "invalid"),
        (["--request-rate", "3", "--burst-size", "3"], "needs --arrivals burst"),
        (["--goodput", "p99:3"], "'p99' has no limit; there are ttft, tpot, itl, e2el"),
        (["--goodput", "ttft"], "got 'ttft'"),
        (["--goodput", "ttft:0"], "got 'ttft:0'"),
        (["--goodput", "ttft:5", "ttft:6"], "two limits of one metric"),
    ],
)
def test_options_that_make_no_sense_are_refused(words: list[str], complaint: str, capsys) -> None:
    assert main(["serve", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_help_is_no_error(capsys) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--shared-prefix-len" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        (
            main,
            ("serve", "--num-requests", "5"),
            "bench serve: error: --num-requests is unknown; did you mean",
        ),
        (
            simulate,
            ("--num-request=5",),
            "simulate: error: --num-request is unknown; did you mean --num-requests?",
        ),
        (simulate, ("--xyzzy",), "simulate: error: --xyzzy is unknown\n"),
    ],
)
def test_an_option_that_is_unknown_is_told_which_may_have_been_meant(run, words, said, capsys) -> None:
    assert run(words) == 2
    assert said in capsys.readouterr().err
