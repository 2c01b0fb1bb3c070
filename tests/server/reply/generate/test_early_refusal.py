"""A full queue is asked before a body is read, and again before its text is tokenized."""

import asyncio
import hashlib

import httpx
import pytest

from engine.errors import Overloaded
from engine.options.api_keys import ApiKey
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from server.edge.http.edge import ClientTimeouts
from server.edge.sockets.early_refusal import FirstLook
from tests.server.conftest import Settings, connect, serving
from tests.server.edge.http.test_connections import parsed, said

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
}
QUEUED_PATHS = (*BODIES, "/v1/embeddings", "/v1/score", "/v1/rerank")


def full_for_all(engine, monkeypatch):
    def refuse(priority):
        engine.asked_room.append(priority)
        raise Overloaded("the queue is full", retry_after_s=3.0)

    monkeypatch.setattr(engine, "require_any_room", refuse)


@pytest.mark.parametrize("path", QUEUED_PATHS)
async def test_when_nobody_would_give_way_the_body_is_not_looked_at(client, engine, monkeypatch, path):
    full_for_all(engine, monkeypatch)
    reply = await client.post(path, content=b"no JSON at all")
    assert reply.status_code == 429
    assert reply.json()["error"]["code"] == "server_overloaded"
    assert reply.headers["retry-after"] == "3"
    assert engine.asked_room == [None]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_what_does_not_wait_in_the_queue_is_served(client, engine, monkeypatch, path):
    full_for_all(engine, monkeypatch)
    reply = await client.post(path, json={"prompt": "x"} if path == "/tokenize" else {"tokens": [65]})
    assert reply.status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_priority_in_the_body_decides_before_anything_is_tokenized(client, engine, path):
    engine.full_up_to = 5
    refused = await client.post(path, json={**BODIES[path], "priority": 5})
    assert refused.status_code == 429
    assert engine.requests == engine.chats == []
    served = await client.post(path, json={**BODIES[path], "priority": 4})
    assert served.status_code == 200
    assert engine.asked_room == [None, 5, None, 4]


async def test_a_priority_in_a_header_decides_before_the_body_is_read(client, engine):
    engine.full_up_to = 5
    refused = await client.post(
        "/v1/completions", content=b"no JSON at all", headers={"x-tokenyard-priority": "5"}
    )
    assert refused.status_code == 429
    urgent = {"x-tokenyard-priority": "-1"}
    served = await client.post("/v1/completions", json={"prompt": "abc", "priority": 9}, headers=urgent)
    assert served.status_code == 200
    assert engine.asked_room == [5, -1, -1]


async def test_a_key_that_may_not_be_urgent_is_refused_without_its_body(engine):
    engine.full_up_to = 0
    key = ApiKey(name="team", digest=hashlib.sha256(b"word").digest(), most_urgent_priority=0)
    app = build_app(engine, Settings(), keys=KeyRing([key]))
    async with connect(app) as client:
        headers = {"authorization": "Bearer word"}
        reply = await client.post("/v1/completions", content=b"no JSON at all", headers=headers)
    assert reply.status_code == 429
    assert engine.asked_room == [0]


async def test_a_client_that_asks_gets_its_place_in_the_queue_with_the_reply(client) -> None:
    body = {"prompt": "x", "priority": 1}
    reply = await client.post("/v1/completions", json=body, headers={"x-tokenyard-forecast": "1"})
    assert reply.status_code == 200
    assert reply.headers["x-tokenyard-sequences-ahead"] == "7"
    assert reply.headers["x-tokenyard-wait-reason"] == "places"
    assert reply.headers["x-tokenyard-expected-start"] == "2.500"
    silent = await client.post("/v1/completions", json=body)
    assert "x-tokenyard-sequences-ahead" not in silent.headers
    odd = await client.post("/v1/completions", json=body, headers={"x-tokenyard-forecast": "soon"})
    assert odd.status_code == 400


FULL = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000\r\n%b\r\n"


async def test_on_a_new_connection_a_refusal_is_no_request_and_reads_no_body(engine, monkeypatch):
    full_for_all(engine, monkeypatch)
    app = build_app(engine, Settings())
    async with serving(app) as url:
        status, headers, code = parsed(await said(url, FULL % b"x-request-id: mine\r\n"))
        assert (status, code, headers["retry-after"], headers["connection"]) == (
            429,
            "server_overloaded",
            "3",
            "close",
        )
        assert headers["x-request-id"] == "mine"
    value = engine.metrics.registry.get_sample_value
    route = {"method": "POST", "route": "/v1/completions", "status": "429", "limit": ""}
    assert value("tokenyard:http_requests_total", route) == 1
    assert value("tokenyard:request_errors_total", {"code": "server_overloaded"}) == 1
    assert engine.asked_room == [None]
    assert app.middleware_stack is None, "no layer was asked"


@pytest.fixture
def looks(monkeypatch):
    """Places of newcomers that were looked at, however slow the machine is."""
    seen = []

    class NotedLook(FirstLook):
        def __init__(self, client, place, *others, **more):
            seen.append(place)
            super().__init__(client, place, *others, **more)

    monkeypatch.setattr("server.edge.sockets.accepting.FirstLook", NotedLook)
    monkeypatch.setattr("server.edge.sockets.early_refusal._WAIT_S", 60.0)
    monkeypatch.setattr("server.reply.generate.full_queue._LIKELY_S", 60.0)
    return seen


async def test_a_crowd_is_refused_before_it_has_connections_however_its_requests_are_cut(
    engine, monkeypatch, looks
):
    full_for_all(engine, monkeypatch)
    app = build_app(engine, Settings())
    whole = FULL.replace(b"9000", b"4") % b"" + b"body"
    async with serving(app) as url:
        assert parsed(await said(url, whole))[0] == 429  # from now on the next are looked at
        monkeypatch.setattr("server.edge.http.connections.ClientConnection.__init__", no_connection)
        for words in ([whole], [b"", whole], [FULL % b"", b"x" * 100], [whole + b"GET / HTTP/1.1\r\n\r\n"]):
            status, headers, code = parsed(await said(url, *words, pause_s=0.05))
            assert (status, code, headers["connection"]) == (429, "server_overloaded", "close")
    value = engine.metrics.registry.get_sample_value
    assert value("tokenyard:request_errors_total", {"code": "server_overloaded"}) == 5
    assert len(looks) == 4


def no_connection(*_: object, **__: object) -> None:
    raise AssertionError("it has cost a connection")


ODD_HEADS = {
    "not for the queue": (b"GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n", 200),
    "cut in its head": (FULL % b"", 429),
    "no host": (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 400),
    "two lengths": (FULL % b"Content-Length: 1\r\n", 400),
    "a line without CR": (FULL % b"x: y\n", 400),
    "a folded field": (FULL % b"x: y\r\n z\r\n", 400),
    "another protocol": ((FULL % b"").replace(b"HTTP/1.1", b"HTTP/2.0"), 400),
    "silence": (b"", 0),
}


@pytest.mark.parametrize("name", ODD_HEADS)
async def test_of_a_crowd_all_that_needs_a_parser_gets_one(engine, monkeypatch, looks, name):
    full_for_all(engine, monkeypatch)
    if name == "silence":
        monkeypatch.setattr("server.edge.sockets.early_refusal._WAIT_S", 0.05)
    app = build_app(engine, Settings(), patience=ClientTimeouts(head_timeout_s=0.3))
    request, status = ODD_HEADS[name]
    async with serving(app) as url:
        assert parsed(await said(url, FULL % b""))[0] == 429
        assert not looks
        reply = await said(url, request[:30], request[30:], pause_s=0.02)
    assert len(looks) == 1
    assert reply.startswith(b"HTTP/1.1 %d " % status if status else b"")
    assert bool(reply) == bool(status)


async def test_where_a_layer_has_another_opinion_it_decides(engine, monkeypatch):
    full_for_all(engine, monkeypatch)
    key = ApiKey(name="team", digest=hashlib.sha256(b"word").digest(), most_urgent_priority=0)
    async with serving(build_app(engine, Settings(), keys=KeyRing([key]))) as url:
        assert (
            parsed(await said(url, FULL % b"Authorization: Bearer wrong\r\nConnection: close\r\n"))[0] == 401
        )
        assert parsed(await said(url, FULL % b"Connection: close\r\n"))[0] == 401
        assert engine.asked_room == []
        assert parsed(await said(url, FULL % b"Authorization: Bearer word\r\n"))[0] == 429
        assert engine.asked_room == [0]


async def test_a_kept_connection_stays_and_every_protocol_keeps_its_shape(engine, monkeypatch):
    async with serving(build_app(engine, Settings())) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).status_code == 200
        full_for_all(engine, monkeypatch)
        refused = await client.post("/v1/completions", content=b"no JSON at all")
        assert (refused.status_code, refused.headers.get("connection")) == (429, None)
        told = await client.post("/v1/messages", content=b"{}")
        async with httpx.AsyncClient(base_url=url) as newcomer:
            assert (await newcomer.post("/v1/messages", content=b"{}")).json().keys() == told.json().keys()


async def test_refusals_of_a_full_queue_are_a_count_in_the_log(client, engine, monkeypatch, caplog):
    full_for_all(engine, monkeypatch)
    caplog.set_level("INFO", "server")
    for _ in range(30):
        assert (await client.post("/v1/completions", json={})).status_code == 429
    assert len([record for record in caplog.records if record.name.startswith("server")]) <= 1


async def test_a_call_that_is_refused_after_it_had_a_place_gives_it_back_with_its_reply(
    client, engine, monkeypatch
):
    kept = []
    monkeypatch.setattr(engine, "require_room", lambda _, journal: kept.append((journal, journal.is_over)))
    reply = await client.post("/v1/completions", json={"prompt": [10**9]})
    assert reply.status_code == 400
    ((journal, was_over),) = kept
    assert (journal.reply_id[:5], was_over, journal.is_over) == ("cmpl-", False, True)


async def test_a_response_in_the_background_has_the_place_that_its_call_kept(client, engine):
    reply = await client.post("/v1/responses", json={"input": "hi", "background": True})
    assert reply.status_code == 200, reply.text
    while not engine.requests:
        await asyncio.sleep(0)
    assert engine.requests[0].journal.reply_id == reply.json()["id"]
