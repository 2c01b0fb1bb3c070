"""Record of a request: one line of the log and one span, in the same words from both processes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")

from tests.e2e.collector import Collector
from tests.e2e.conftest import CROWDED
from tests.e2e.serving import RunningServer, running_server, wait_for

pytestmark = pytest.mark.night

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MARKER = "violet-elephant"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def server(collector, tiny_model, tmp_path_factory) -> Iterator[RunningServer]:
    options = (*CROWDED, "--log-level", "debug", "--otlp-traces-endpoint", collector.url)
    with running_server(tmp_path_factory.mktemp("traced"), str(tiny_model), *options) as server:
        yield server


def line_of(server: RunningServer, request_id: str) -> dict[str, Any]:
    """Line of the log on a request, once it is over."""

    def found() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.text().splitlines() if f'"{request_id}"' in line]
        return [line for line in lines if line["message"] == "request"]

    wait_for(found)
    (line,) = found()
    return line


def ask(server: RunningServer, request_id: str, *, traceparent: str = "", **body: Any) -> httpx.Response:
    headers = {"x-request-id": request_id, **({"traceparent": traceparent} if traceparent else {})}
    body = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True, **body}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_a_span_is_the_child_of_the_callers_and_says_what_the_line_says(server, collector) -> None:
    reply = ask(server, "child-1", traceparent=f"00-{TRACE}-{PARENT}-01", n=2, priority=3).json()
    wait_for(lambda: collector.span_of("child-1"))
    span, attributes = collector.span_of("child-1"), collector.attributes_of("child-1")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("POST /v1/completions", span.SPAN_KIND_SERVER)
    usage = reply["usage"]
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == "/v1/completions"
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.provider.name"] == "tokenyard"
    assert attributes["gen_ai.request.model"] == reply["model"]
    assert attributes["gen_ai.response.id"] == reply["id"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 10
    assert attributes["tokenyard.priority"] == 3
    stages = [event.name for event in span.events]
    assert stages == ["queued", "started", "first_token", "finished", "finished"]
    times = [event.time_unix_nano for event in span.events]
    assert span.start_time_unix_nano <= times[0]
    assert times == sorted(times)
    assert times[-1] <= span.end_time_unix_nano
    assert {"service.name": "tokenyard"}.items() <= collector.resources[0].items()

    line = line_of(server, "child-1")
    assert (line["trace_id"], line["reply_id"]) == (TRACE, reply["id"])
    assert (line["prompt_tokens"], line["output_tokens"]) == (usage["prompt_tokens"], 10)
    assert (line["finish_reason"], line["priority"], line["preemptions"]) == ("length", 3, 0)
    assert line["queue_s"] == pytest.approx(attributes["tokenyard.queue_time_s"], abs=1e-5)
    assert 0 < line["queue_s"] < line["first_token_s"] < line["total_s"]


def test_cached_tokens_are_told(server) -> None:
    prompt = "the same words again and again " * 4
    for request_id in ("cached-1", "cached-2"):
        ask(server, request_id, prompt=prompt)
    assert line_of(server, "cached-1")["cached_tokens"] == 0
    assert line_of(server, "cached-2")["cached_tokens"] >= 8


def test_without_a_parent_a_trace_begins_here(server, collector) -> None:
    ask(server, "root-1")
    wait_for(lambda: collector.span_of("root-1"))
    assert collector.span_of("root-1").parent_span_id == b""
    assert collector.span_of("root-1").trace_id.hex() == line_of(server, "root-1")["trace_id"]


def test_a_trace_that_its_caller_does_not_record_is_only_named_in_the_log(server, collector) -> None:
    ask(server, "unsampled-1", traceparent=f"00-{TRACE}-{PARENT}-00")
    ask(server, "after-it")
    wait_for(lambda: collector.span_of("after-it"))
    assert collector.span_of("unsampled-1") is None
    assert line_of(server, "unsampled-1")["trace_id"] == TRACE


def test_a_refusal_has_its_code_and_probes_have_no_span(server, collector) -> None:
    httpx.get(f"{server.url}/health", headers={"x-request-id": "probe-1"})
    ask(server, "refused-1", max_tokens=-1)
    wait_for(lambda: collector.span_of("refused-1"))
    attributes = collector.attributes_of("refused-1")
    assert attributes["http.response.status_code"] == 400
    assert attributes["error.type"] == line_of(server, "refused-1")["error"]
    assert "gen_ai.usage.input_tokens" not in attributes
    assert collector.span_of("probe-1") is None


async def test_preemptions_are_told(server, collector) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one(number: int) -> None:
            body = {"prompt": f"number {number}", "max_tokens": 60, "ignore_eos": True}
            await client.post("/v1/completions", json=body, headers={"x-request-id": f"crowd-{number}"})

        await asyncio.gather(*(one(number) for number in range(12)))
    lines = {number: line_of(server, f"crowd-{number}") for number in range(12)}
    preempted = [number for number, line in lines.items() if line["preemptions"]]
    assert preempted
    wait_for(lambda: all(collector.span_of(f"crowd-{number}") for number in preempted))
    for number in preempted:
        events = [event.name for event in collector.span_of(f"crowd-{number}").events]
        assert events.count("preempted") >= 1
        attributes = collector.attributes_of(f"crowd-{number}")
        assert attributes["tokenyard.num_preemptions"] == lines[number]["preemptions"]


async def test_live_requests_are_explained_with_the_ids_that_their_clients_know(server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        body = {"prompt": "x", "max_tokens": 150, "n": 64, "ignore_eos": True}  # several turns of the crowd
        headers = {"x-request-id": "live-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        await server.until_in_flight(32, asking)
        explained = (await client.get("/admin/requests")).json()["requests"]
        asking.cancel()
    assert ("live-1", TRACE) in [(each["x_request_id"], each["trace_id"]) for each in explained]


async def test_a_client_that_leaves_is_told_with_what_it_cost(server, collector) -> None:
    body = {"prompt": "x", "max_tokens": 150, "n": 64, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "leaver-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body, headers=headers) as reply,
    ):
        await anext(reply.aiter_bytes())
    line = line_of(server, "leaver-1")
    assert (line["aborted_by"], line["status"]) == ("client_left", 200)
    assert "abort" in line["finish_reason"].split(",")
    assert 0 < line["output_tokens"] < 64 * 150


def test_both_processes_speak_the_same_form_and_never_of_prompts(server) -> None:
    ask(server, "marked-1", prompt=MARKER, user=MARKER)
    line_of(server, "marked-1")
    lines = [json.loads(line) for line in server.text().splitlines()]
    assert {line["process"] for line in lines} == {"api", "engine"}
    assert all({"time", "level", "pid", "logger", "message"} <= line.keys() for line in lines)
    assert {line["pid"] for line in lines if line["process"] == "engine"} == {server.engine_pid}
    assert MARKER not in server.text()


def test_a_collector_that_went_away_costs_its_spans_and_is_told_once(server, collector) -> None:
    def num_told() -> int:
        return server.text().count("the collector of traces does not answer")

    num_told_before = num_told()
    collector.close()
    for number in range(5):
        assert ask(server, f"lost-{number}").status_code == 200
    dropped = 'tokenyard:telemetry_dropped_total{what="spans"}'
    wait_for(lambda: server.metrics()[dropped] >= 5)
    wait_for(lambda: num_told() == num_told_before + 1)
    assert line_of(server, "lost-4")["status"] == 200
