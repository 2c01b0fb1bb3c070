"""The operator's limit for a whole request, seen by clients that stream and by such that do not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import RunningServer, running_server

pytestmark = pytest.mark.night

# Far from done within the limit, and far from the first token's time: without our kernels a step is slow.
_SLOW = ("--cpu-kernels", "off", "--request-timeout", "1s")
_LONG = {"max_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(deep_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("limits"), str(deep_model), *_SLOW) as server:
        yield server


@pytest.fixture
async def client(server: RunningServer) -> Any:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


def events(page: str) -> list[str]:
    return [line.removeprefix("data: ") for line in page.splitlines() if line.startswith("data: ")]


async def test_a_stream_that_meets_the_limit_ends_once_with_its_text_and_its_usage(server, client) -> None:
    before = server.metric("tokenyard:generation_tokens_total")
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}, **_LONG}
    *sent, done = events((await client.post("/v1/completions", json=body)).text)
    chunks = [json.loads(event) for event in sent]
    assert done == "[DONE]"
    assert not any("error" in chunk for chunk in chunks)
    *texts, last = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["text"] for choice in texts)
    assert {choice["finish_reason"] for choice in texts} == {None}
    assert last["finish_reason"] == "timeout"
    num_tokens = chunks[-1]["usage"]["completion_tokens"]
    assert 0 < num_tokens < 480
    server.wait_until_idle()
    assert server.metric("tokenyard:generation_tokens_total") - before == num_tokens


async def test_each_choice_of_a_streamed_chat_ends_once(client) -> None:
    body = {"messages": [{"role": "user", "content": "Once"}], "stream": True, "n": 2, **_LONG}
    *sent, done = events((await client.post("/v1/chat/completions", json=body)).text)
    choices = [json.loads(event)["choices"][0] for event in sent]
    ends = [(choice["index"], choice["finish_reason"]) for choice in choices if choice["finish_reason"]]
    assert (sorted(ends), done) == ([(0, "timeout"), (1, "timeout")], "[DONE]")


async def test_a_client_may_ask_for_less_time_but_not_for_more(server, client) -> None:
    whole = await client.post("/v1/completions", json={"prompt": "Once", "timeout": 1e5, **_LONG})
    assert whole.json()["choices"][0]["finish_reason"] == "timeout"
    assert whole.elapsed.total_seconds() < 5
    none = await client.post("/v1/completions", json={"prompt": "Once", "timeout": 1e-6, **_LONG})
    assert (none.status_code, none.json()["error"]["code"]) == (504, "deadline_exceeded")
    labels = 'limit="own",method="POST",route="/v1/completions",status="504"'
    assert server.metrics()[f"tokenyard:http_requests_total{{{labels}}}"] == 1
