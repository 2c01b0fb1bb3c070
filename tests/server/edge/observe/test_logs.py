"""Each request is one line of the log when it is over; of what clients sent, only ids are in the log."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from engine.errors import RequestFailed
from engine.logs.lines import LogFormat, ProcessName
from engine.logs.setup import Logs
from server.app import build_app
from server.edge.observe.request_ids import journal_of
from tests.server.conftest import Settings, eventually, serving

MARKER = "violet-elephant-4711"
TRACE = "0af7651916cd43dd8448eb211c80319c"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path) -> Iterator[Lines]:
    """Everything that is logged at any level, as it would be written."""
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    logs = Logs(LogFormat.JSON, level=logging.DEBUG, process=ProcessName.API, descriptor=descriptor)

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    with logs:
        yield read
    os.close(descriptor)


@pytest.fixture
async def http(app, lines) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def requests_of(lines: Lines, num: int) -> list[dict[str, Any]]:
    """The lines about requests, when there are so many."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines() if line["message"] == "request"]

    await eventually(lambda: len(found()) >= num)
    assert len(found()) == num
    return found()


async def test_a_request_is_one_line_with_its_ids_route_and_status(http, lines) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    asked = {"prompt": f"hi {MARKER}", "max_tokens": 2, "echo": True}
    reply = await http.post("/v1/completions", json=asked, headers=headers)
    assert MARKER in reply.text
    (line,) = await requests_of(lines, 1)
    assert MARKER not in json.dumps(lines())
    assert (line["level"], line["logger"]) == ("info", "server.edge.http.request_log")
    assert (line["request_id"], line["trace_id"]) == ("mine-1", TRACE)
    assert line["reply_id"] == reply.json()["id"]
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert 0 < line["total_s"] < 5
    assert "error" not in line


async def test_a_response_is_logged_under_the_id_that_its_client_has(http, lines) -> None:
    reply = await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2})
    (line,) = await requests_of(lines, 1)
    assert line["reply_id"] == reply.json()["id"]


async def test_a_refusal_is_one_line_with_its_code_field_and_reason(http, lines, engine) -> None:
    reply = await http.post("/v1/completions", json={"prompt": 7})
    (line,) = await requests_of(lines, 1)
    assert (line["status"], line["error"], line["error_param"]) == (400, "invalid_value", "prompt")
    assert line["error_message"].startswith("must be a string, a list of strings")
    assert line["request_id"] == reply.headers["x-request-id"]


async def test_an_error_within_a_stream_has_its_code_beside_the_status_that_was_sent(
    http, lines, engine
) -> None:
    engine.error_after, engine.error = 1, RuntimeError(MARKER)
    await http.post("/v1/completions", json={"prompt": "hi", "stream": True})
    (line,) = await requests_of(lines, 1)
    assert (line["status"], line["error"]) == (200, "internal_error")
    (failure,) = [line for line in lines() if line["level"] == "error"]
    assert failure["message"] == f"request {line['request_id']} failed: RuntimeError"
    assert MARKER not in json.dumps(lines())


async def test_what_a_failed_grammar_says_of_itself_is_for_the_client_alone(http, lines, engine) -> None:
    engine.admission_error = RequestFailed(f"the grammar failed: unexpected {MARKER}")
    reply = await http.post("/v1/completions", json={"prompt": "hi"})
    assert reply.status_code == 500
    (line,) = await requests_of(lines, 1)
    (failure,) = [line for line in lines() if line["level"] == "error"]
    assert failure["message"] == f"request {line['request_id']} failed: RequestFailed: the grammar failed"
    assert MARKER not in json.dumps(lines())


async def test_a_client_that_leaves_first_is_told_so(http, lines, engine) -> None:
    engine.stall_after = 0
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json={"prompt": "hi"}, timeout=0.2)
    (line,) = await requests_of(lines, 1)
    assert (line["status"], line["error"]) == (499, "client_closed")


async def test_probes_and_scrapes_are_lines_for_debugging_only(http, lines) -> None:
    for path in ("/health", "/health/live", "/metrics"):
        await http.get(path)
    assert {line["level"] for line in await requests_of(lines, 3)} == {"debug"}


async def test_the_key_is_told_by_its_name_and_never_itself(engine, lines) -> None:
    secret = f"sk-{MARKER}"
    app = build_app(engine, Settings(api_keys=(secret,)))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as http:
        await http.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        await http.get("/v1/models", headers={"authorization": f"Bearer wrong-{MARKER}"})
        known, unknown = await requests_of(lines, 2)
    assert known["key"] == "key-1"
    assert (unknown["status"], unknown["error"]) == (401, "invalid_api_key")
    assert "key" not in unknown
    assert MARKER not in json.dumps(lines())


async def test_the_tenant_of_the_header_is_told_and_the_user_of_the_body_is_not(http, lines) -> None:
    body = {"prompt": "hi", "user": MARKER}
    await http.post("/v1/completions", json=body)
    await http.post("/v1/completions", json=body, headers={"x-tokenyard-tenant": "acme"})
    first, second = await requests_of(lines, 2)
    assert "tenant" not in first
    assert second["tenant"] == "acme"
    assert MARKER not in json.dumps(lines())


TOOL = {"type": "function", "function": {"name": "f", "description": MARKER, "parameters": {MARKER: 1}}}
SCHEMA = {"name": "refuse", "schema": {"title": MARKER, "const": "refuse"}}
CHAT = {"messages": [{"role": "user", "content": "x"}]}
HEADERS = {
    MARKER: MARKER,
    "x-request-id": f"{MARKER} !",
    "cookie": MARKER,
    "traceparent": MARKER,
    "host": MARKER,
}


def prompt(**fields: object) -> dict[str, Any]:
    return {"json": {"prompt": "x", "max_tokens": 4, **fields}}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/completions", prompt(prompt=MARKER)),
        ("/v1/completions", prompt(prompt=MARKER, stream=True)),
        ("/v1/completions", prompt(prompt="x" * 200 + MARKER)),
        ("/v1/completions", prompt(max_tokens=MARKER)),
        ("/v1/completions", prompt(model=MARKER)),
        ("/v1/completions", prompt(suffix=MARKER)),
        ("/v1/completions", prompt(**{MARKER: MARKER})),
        ("/v1/completions", prompt(response_format={"type": "json_schema", "json_schema": SCHEMA})),
        ("/v1/completions", {**prompt(), "headers": HEADERS}),
        ("/v1/completions", {"content": b'{"prompt": "' + MARKER.encode()}),
        ("/v1/completions", {"content": MARKER, "headers": {"content-type": f"text/{MARKER}"}}),
        ("/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": MARKER}]}}),
        ("/v1/chat/completions", {"json": {"messages": [{"role": MARKER, "content": "x"}]}}),
        ("/v1/chat/completions", {"json": {**CHAT, "tools": [TOOL]}}),
        ("/v1/responses", {"json": {"input": MARKER, "tools": [{"type": MARKER}]}}),
        ("/v1/responses", {"json": {"input": "x", "previous_response_id": MARKER}}),
        ("/v1/embeddings", {"json": {"input": MARKER}}),
        ("/tokenize", {"json": {"prompt": MARKER}}),
        (f"/{MARKER}?{MARKER}={MARKER}", {"json": {}}),
        (f"/v1/responses/{MARKER}/cancel", {"json": {}}),
    ],
)
async def test_nothing_of_a_request_is_in_the_log_at_any_level(http, lines, path, options) -> None:
    await http.post(path, **options)
    await requests_of(lines, 1)
    assert MARKER not in json.dumps(lines())


@pytest.mark.parametrize("failing", ["encode", "encode_chat", "compile_grammar"])
async def test_nor_when_we_fail_on_it(http, lines, engine, monkeypatch, failing) -> None:
    async def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError(f"cannot cope with {arguments} {named}")

    monkeypatch.setattr(engine, failing, fail)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": MARKER}}}
    chat = {"messages": [{"role": "user", "content": MARKER}], "response_format": schema}
    path, body = (
        ("/v1/completions", {"prompt": MARKER}) if failing == "encode" else ("/v1/chat/completions", chat)
    )
    reply = await http.post(path, json=body)
    assert reply.status_code == 500
    await requests_of(lines, 1)
    (failure,) = [line for line in lines() if line["level"] == "error"]
    assert "RuntimeError" in failure["stack"]
    assert MARKER not in json.dumps(lines())


async def test_bytes_that_are_no_http_are_not_repeated(app, lines) -> None:
    async with serving(app) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {MARKER} {MARKER}\r\n{MARKER}\r\n\r\n".encode())
        reply = await reader.read()
        writer.close()
        await eventually(lambda: [line for line in lines() if line.get("error") == "invalid_request"])
    (line,) = [line for line in lines() if line.get("error") == "invalid_request"]
    assert f"x-request-id: {line['request_id']}".encode() in reply
    assert MARKER not in json.dumps(lines())


def test_outside_of_the_middleware_there_is_a_journal_that_nobody_reads() -> None:
    assert journal_of({"type": "http"}).request_id == ""
