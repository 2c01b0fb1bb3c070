"""Drafts seen from outside: the same text in fewer steps, and usage that counts a prediction."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.options.found_model import DEMO_MODEL
from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.worker.speculation.draft_checkpoints import write_draft

pytestmark = pytest.mark.night

SUFFIX = '{"method": "suffix", "num_speculative_tokens": 6, "prompt_lookup_min": 1}'
REPEATING = "one two three four one two three four one two three four one two"


def post(server: RunningServer, path: str, **body: object) -> dict:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3, "logprobs": 3},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.3, "n": 3},
        {"temperature": 0, "stop": ["three"], "include_stop_str_in_output": True},
    ],
)
def test_completions_are_those_of_a_server_without_drafts(
    demo_server: RunningServer, equipped_server: RunningServer, fields: dict[str, object]
) -> None:
    asked = {"prompt": REPEATING, "max_tokens": 60, "ignore_eos": True, **fields}
    expected = post(demo_server, "/v1/completions", **asked)
    found = post(equipped_server, "/v1/completions", **asked)
    assert found["choices"] == expected["choices"]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_drafts_are_counted_under_both_names_and_the_trace_says_why(
    equipped_server: RunningServer, step_trace: Path
) -> None:
    post(equipped_server, "/v1/completions", prompt=REPEATING, max_tokens=150, temperature=0, ignore_eos=True)
    wait_for(lambda: equipped_server.metric("tokenyard:draft_tokens_total") > 0)
    twin = 'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tokenyard-demo"}'
    assert equipped_server.metrics()[twin] == equipped_server.metric("tokenyard:draft_tokens_total")
    wait_for(lambda: '"drafts":' in step_trace.read_text())
    lines = [json.loads(line) for line in step_trace.read_text().splitlines()]
    said = [line["drafts"] for line in lines if "drafts" in line]
    assert {each["reason"] for each in said} <= {"all", "cost", "prefill"}
    assert any(each["num_chosen"] for each in said)


def test_a_prediction_changes_no_text_and_usage_says_how_much_of_it_held(demo_server: RunningServer) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": 100,
        "temperature": 0,
        "ignore_eos": True,
    }
    expected = post(demo_server, "/v1/chat/completions", **asked)
    text = expected["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": text}
    found = post(demo_server, "/v1/chat/completions", **asked, prediction=prediction)
    assert found["choices"] == expected["choices"]
    assert "completion_tokens_details" not in expected["usage"]
    details = found["usage"]["completion_tokens_details"]
    assert 0 < details["accepted_prediction_tokens"] <= 100
    assert details["rejected_prediction_tokens"] >= 0
    wrong = {"type": "content", "content": [{"type": "text", "text": "Nothing of the kind. " * 20}]}
    found = post(demo_server, "/v1/chat/completions", **asked, prediction=wrong)
    assert found["choices"] == expected["choices"]


def test_a_draft_model_changes_no_text_and_is_tried(demo_server: RunningServer, tmp_path: Path) -> None:
    asked = {
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "temperature": 0.7,
        "seed": 5,
        "ignore_eos": True,
    }
    expected = post(demo_server, "/v1/completions", **asked)
    draft = write_draft(tmp_path / "one", DEMO_MODEL, num_layers=1)
    with running_server(tmp_path, "--speculative-model", str(draft)) as server:
        assert post(server, "/v1/completions", **asked)["choices"] == expected["choices"]

        def drafted() -> bool:
            assert post(server, "/v1/completions", **asked)["choices"] == expected["choices"]
            return server.metric("tokenyard:draft_tokens_total") > 0

        wait_for(drafted, within_s=30.0)


def test_two_engines_with_drafts_answer_as_one_without(
    demo_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    asked = [
        {"prompt": f"{number} {REPEATING}", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        for number in range(4)
    ]
    expected = [post(demo_server, "/v1/completions", **each)["choices"] for each in asked]
    traces = tmp_path_factory.mktemp("two") / "steps.jsonl"
    options = (
        *("--speculative-config", SUFFIX, "--trace-steps", str(traces)),
        *("--data-parallel-size", "2"),
    )
    with running_server(traces.parent, *options) as server, ThreadPoolExecutor(len(asked)) as clients:

        def drafted() -> bool:
            found = list(clients.map(lambda each: post(server, "/v1/completions", **each), asked))
            assert [each["choices"] for each in found] == expected
            written = [each.read_text() for each in traces.parent.glob("steps-*.jsonl")]
            return any('"drafts":' in each for each in written)

        wait_for(drafted, within_s=30.0)
