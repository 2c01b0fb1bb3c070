"""Clients that close their half of the connection after a request: some listen on, some have left."""

import asyncio
import json

import pytest

from server.edge.sockets import peer_probe
from tests.server.conftest import eventually
from tests.server.edge.http.test_connections import HEALTH, MODELS, all_of, connected
from tests.server.edge.http.test_disconnects import CHAT, PROMPTS, count, post

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


def asking(path: str, body: dict, version: str) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/{version}\r\nHost: t\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def answer_to(url: str, words: bytes, *, pause_s: float = 0.0) -> bytes:
    """Reply to `words` and an end after them."""
    reader, writer = await connected(url)
    writer.write(words)
    await asyncio.sleep(pause_s)
    writer.write_eof()
    async with asyncio.timeout(30):
        reply = await all_of(reader)
    writer.close()
    return reply


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_said_all_and_listens_gets_its_reply(url, engine, stream, version):
    engine.pause_s = 0.01
    body = {**CHAT, "max_tokens": 3, "stream": stream}
    reply = await answer_to(url, asking("/v1/chat/completions", body, version))
    reply = reply.removeprefix(INTERIM)
    assert reply.startswith(b"HTTP/1.1 200")
    assert (b"[DONE]" if stream else b'"usage"') in reply
    assert engine.aborted == []


async def test_a_client_of_http_1_0_that_listens_gets_a_reply_that_takes_long(url, engine):
    """Its reply is silent for longer than one that has begun may be."""
    engine.pause_s = 0.5
    body = {**CHAT, "max_tokens": 4}
    assert b'"usage"' in await answer_to(url, asking("/v1/chat/completions", body, "1.0"))
    assert engine.aborted == []


async def test_a_reply_that_has_begun_goes_on_after_the_end_of_the_clients_half(url, engine):
    engine.pause_s = 0.02
    words = asking("/v1/chat/completions", {**CHAT, "max_tokens": 10, "stream": True}, "1.1")
    assert b"[DONE]" in await answer_to(url, words, pause_s=0.1)
    assert engine.aborted == []


async def test_all_of_several_requests_before_the_end_are_answered(url):
    reply = await answer_to(url, MODELS + HEALTH)
    assert reply.replace(INTERIM, b"").count(b"HTTP/1.1 200") == 2


async def test_an_end_in_the_middle_of_a_head_or_a_body_gets_no_reply(url, engine):
    words = asking("/v1/completions", PROMPTS, "1.1")
    assert await answer_to(url, HEALTH[:-2]) == b""
    assert await answer_to(url, words[:-1]) == b""
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closed_its_half_and_left_later_is_noticed(url, engine, stream, monkeypatch):
    monkeypatch.setattr(peer_probe, "_SILENT_S", 0.05)
    engine.stall_after = 0
    _, writer = await post(url, "/v1/completions", {**PROMPTS, "stream": stream})
    writer.write_eof()
    await eventually(lambda: engine.num_running == len(PROMPTS["prompt"]))
    await asyncio.sleep(0.1)
    assert engine.aborted == [], "it may be listening"
    writer.close()
    await eventually(lambda: engine.num_running == 0, timeout_s=60)
    await eventually(lambda: count(engine, "/v1/completions", "499") == 1)
