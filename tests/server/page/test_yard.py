"""Data of the yard: a stream of views for keys that may administer, and facts without a secret."""

from dataclasses import replace

import pytest

from engine.errors import EngineUnavailable, Overloaded
from engine.options.api_keys import ApiKey, digest_of
from engine.types import EngineState
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import FakeEngine

VIEWS = (b'{"view":1}', b"", b'{"view":2}')


async def test_views_are_events_and_silence_is_a_comment():
    app = build_app(FakeEngine(views=VIEWS), Settings())
    async with connect(app) as client:
        reply = await client.get("/admin/events")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.text == 'data: {"view":1}\n\n: alive\n\ndata: {"view":2}\n\n'


async def test_too_many_viewers_are_refused_with_a_status():
    engine = FakeEngine(viewers_error=Overloaded("8 viewers watch already", retry_after_s=5.0))
    async with connect(build_app(engine, Settings())) as client:
        reply = await client.get("/admin/events")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "5"


@pytest.mark.parametrize("path", ["/admin/events", "/admin/server"])
async def test_a_key_that_may_not_administer_does_not_see_the_yard(path):
    chat = ApiKey(name="chat", digest=digest_of(b"c"), may_administer=False)
    admin = ApiKey(name="admin", digest=digest_of(b"a"))
    app = build_app(FakeEngine(views=VIEWS), Settings(), keys=KeyRing((chat, admin)))
    async with connect(app) as client:
        statuses = [
            (await client.get(path, headers=headers)).status_code
            for headers in ({}, {"authorization": "Bearer c"}, {"authorization": "Bearer a"})
        ]
    assert statuses == [401, 403, 200]


async def test_the_facts_name_the_options_and_the_last_errors():
    shown = {"port": {"value": 8000, "shown": "8000", "origin": "default"}}
    app = build_app(FakeEngine(), replace(Settings(), shown_options=shown))
    async with connect(app) as client:
        await client.get("/nothing", headers={"x-request-id": "r-1"})
        facts = (await client.get("/admin/server")).json()
    assert facts["options"] == shown
    assert facts["state"] == "ready"
    assert facts["model"]["name"] == "fake"
    (error,) = facts["errors"]
    assert {
        "status": 404,
        "code": "not_found",
        "route": "unmatched",
        "request_id": "r-1",
    }.items() <= error.items()


async def test_the_last_errors_are_bounded():
    app = build_app(FakeEngine(), Settings())
    async with connect(app) as client:
        for _ in range(60):
            await client.get("/nothing")
        facts = (await client.get("/admin/server")).json()
    assert len(facts["errors"]) == 50


async def test_the_facts_are_there_before_the_model_is():
    engine = FakeEngine()
    engine.state = replace(engine.state, state=EngineState.LOADING, detail="loading the model")
    with pytest.raises(EngineUnavailable):
        _ = engine.info
    async with connect(build_app(engine, Settings())) as client:
        facts = (await client.get("/admin/server")).json()
    assert (facts["state"], facts["model"]) == ("loading", None)
