"""The table from error type to reply."""

import logging

import pytest
from starlette.exceptions import HTTPException

from engine import errors as engine_errors
from engine.errors import (
    EngineDied,
    EngineDiedTwice,
    EngineError,
    EngineUnavailable,
    Overloaded,
    RequestFailed,
    RequestRejected,
)
from server.edge import error_replies as errors
from server.edge.error_catalogue import CATALOGUE, Retry
from server.edge.error_replies import MAX_MESSAGE_CHARS, ErrorBoundary, describe


@pytest.mark.parametrize(
    ("error", "status", "code", "headers"),
    [
        (RequestRejected("no", code="invalid_json"), 400, "invalid_json", {"x-should-retry": "false"}),
        (engine_errors.ContextLengthExceeded("no", param="p"), 400, "context_length_exceeded", {}),
        (engine_errors.NoChatTemplate(), 400, "no_chat_template", {}),
        (
            errors.InvalidApiKey("no"),
            401,
            "invalid_api_key",
            {"www-authenticate": 'Bearer realm="tokenyard"'},
        ),
        (errors.ModelNotFound("no"), 404, "model_not_found", {"x-should-retry": "false"}),
        (HTTPException(404), 404, "not_found", {"x-should-retry": "false"}),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "method_not_allowed", {"allow": "GET"}),
        (HTTPException(400), 400, "invalid_request", {}),
        (
            errors.BodyTimeout("slow"),
            408,
            "request_timeout",
            {"x-should-retry": "true", "connection": "close"},
        ),
        (errors.BodyTooLarge("big"), 413, "request_too_large", {"connection": "close"}),
        (errors.UnsupportedMediaType("xml"), 415, "unsupported_media_type", {}),
        (Overloaded("busy", retry_after_s=1.2), 429, "server_overloaded", {"retry-after": "2"}),
        (
            Overloaded("busy", retry_after_s=0.01),
            429,
            "server_overloaded",
            {"retry-after": "1", "retry-after-ms": "10"},
        ),
        (Overloaded("busy", retry_after_s=0), 429, "server_overloaded", {"retry-after": "1"}),
        (RequestFailed("nan"), 500, "model_error", {"x-should-retry": "false"}),
        (EngineDied("gone"), 500, "engine_restarted", {"x-should-retry": "true"}),
        (EngineDiedTwice(), 500, "engine_died_twice", {"x-should-retry": "false"}),
        (EngineError("?"), 500, "engine_error", {}),
        (ZeroDivisionError("a/b"), 500, "internal_error", {"x-should-retry": "false"}),
        (EngineUnavailable("loading"), 503, "not_ready", {"retry-after": "1", "retry-after-ms": "1000"}),
        (EngineUnavailable("no", code="model_broken"), 503, "model_broken", {"x-should-retry": "false"}),
        (EngineUnavailable("bye", code="shutting_down"), 503, "shutting_down", {"retry-after": "1"}),
    ],
)
def test_each_error_has_its_row(error, status, code, headers):
    reply = describe(error, "req_1")
    assert (reply.status, reply.code) == (status, code)
    assert headers.items() <= reply.headers.items()
    assert ("retry-after" in reply.headers) != ("x-should-retry" in reply.headers)


def test_every_error_of_the_engine_has_a_row_of_its_own_or_of_its_parent():
    kinds = [
        kind
        for kind in vars(engine_errors).values()
        if isinstance(kind, type) and issubclass(kind, EngineError)
    ]
    rows = set(errors._CODES) - {EngineError, Exception}
    for kind in set(kinds) - {EngineError}:
        assert any(parent in rows for parent in kind.__mro__), kind


def test_a_message_does_not_grow_with_the_input():
    assert len(describe(RequestRejected("x" * 10_000), "req_1").message) == MAX_MESSAGE_CHARS


async def test_an_unexpected_failure_tells_the_client_nothing_and_the_log_where(client, engine, caplog):
    engine.admission_error = ZeroDivisionError("at /root/secret.py")
    with caplog.at_level(logging.ERROR):
        response = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"}
        )
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the server failed on this request; quote request id mine when you report it",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    (record,) = caplog.records
    assert "mine" in record.getMessage()
    assert "ZeroDivisionError" in record.getMessage()
    assert "secret" not in record.getMessage()  # its words may be the client's; engine/logs/lines.py
    assert record.exc_info is not None


async def test_a_reply_that_fails_half_way_is_cut_off_rather_than_finished(caplog):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    sent = []

    async def send(message):
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        await ErrorBoundary(app)({"type": "http"}, None, send)
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_a_callers_mistake_is_no_failure_in_the_log(client, caplog):
    with caplog.at_level(logging.DEBUG, logger="server"):
        await client.post("/v1/completions", json={"prompt": "secret words", "n": 0})
    assert [record.getMessage() for record in caplog.records] == ["request"]


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/models/", "/v1/completions/", "/redoc", "/v1/../x"])
async def test_an_unknown_path_is_not_found_in_openais_shape(client, path):
    response = await client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] in ("not_found", "model_not_found")


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/api/pull", {"error": str}),
        ("/api", {"error": str}),
        ("/v1/messages/batches", {"type": str, "error": dict}),
        ("/v1/messagesque", {"error": dict}),
        ("/apiary", {"error": dict}),
    ],
)
async def test_an_unknown_path_has_the_shape_of_its_neighbours(client, path, shape):
    reply = await client.post(path, json={})
    assert reply.status_code == 404
    assert {name: type(value) for name, value in reply.json().items()} == shape


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("n: must be 1 (not 2)", "n", "must be 1"),
        ("the role 'it''s me' is not supported; use user", "r", "the role …… is not supported; use user"),
        ('the name "a\\"b', None, "the name …"),
        ("the template refuses: my words", None, "the template refuses"),
        ("x" * 300, None, "x" * 100),
    ],
)
def test_what_operators_read_of_an_error_has_no_word_of_the_clients(message, param, words):
    reply = describe(RequestRejected(message, param=param), "req_1")
    assert errors.noted(reply) == ("invalid_value", param or "", words)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/chat/completions"),
        ("POST", "/health"),
        ("POST", "/openapi.json"),
        ("OPTIONS", "/v1/models"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(client, method, path):
    response = await client.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert response.headers["allow"]


async def test_no_reply_carries_cors_headers(client):
    response = await client.get("/v1/models", headers={"origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_a_405_names_every_method_of_the_path(client):
    response = await client.delete("/health/ready")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD"


def test_every_code_that_a_type_has_is_in_the_catalogue():
    assert {code for code in errors._CODES.values() if code} <= CATALOGUE.keys()


def test_a_code_that_is_in_no_catalogue_still_gets_an_answer():
    reply = describe(RequestRejected("no", param="p", code="made_up"), "req_1")
    assert (reply.status, reply.code, reply.param) == (400, "invalid_value", "p")
    assert describe(EngineUnavailable("?", code="made_up"), "req_1").code == "internal_error"


def test_the_catalogue_is_consistent():
    for code, entry in CATALOGUE.items():
        is_ours = entry.status >= 500
        assert is_ours == (entry.type in ("server_error", "timeout_error")), code
        assert (entry.retry is Retry.LATER) == (entry.status in (429, 503) and code != "model_broken"), code
        assert bool(entry.fixed_text) == (entry.status == 500), code
        assert entry.meaning


async def test_errors_are_counted_by_code_in_replies_and_in_streams(client, engine):
    def count(code):
        return engine.metrics.registry.get_sample_value("tokenyard:request_errors_total", {"code": code})

    await client.post("/v1/completions", json={"prompt": "x", "n": 0})
    await client.get("/nowhere")
    engine.error_after, engine.error = 1, RequestFailed("nan")
    await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert [count(code) for code in ("invalid_value", "not_found", "model_error")] == [1, 1, 1]
    assert count("internal_error") is None
