"""Responses in the background: fetched, followed from any event on, cancelled, taken up after a restart."""

import asyncio
import dataclasses
import time

import httpx
import openai
import orjson
import pytest

from engine.errors import EngineUnavailable, Overloaded, RequestFailed
from engine.types import FinishReason
from server.api.responses import kept_responses
from server.api.responses.kept_responses import go_on
from server.api.responses.models import ResponseEvent, ResponseObject
from server.api.responses.store import RESPONSE_TTL_S
from server.app import build_app
from tests.server.api.responses.test_responses import PATH, create, refused
from tests.server.conftest import EDGE, Settings, connect, eventually, serving
from tests.server.fake_engine import FakeMetrics

LOWEST = 2**31 - 1


def parsed(text: str) -> list[dict]:
    return [orjson.loads(block.split("\ndata: ")[1]) for block in text.split("\n\n") if block]


async def ended(client: httpx.AsyncClient, response_id: str, **options) -> dict:
    """The response at its end."""
    async with asyncio.timeout(30):
        while True:
            reply = await client.get(f"{PATH}/{response_id}", **options)
            assert reply.status_code == 200, reply.text
            response = reply.json()
            ResponseObject.model_validate(response, strict=True)
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.005)


async def test_it_is_answered_at_once_and_made_last_in_line(client, engine):
    engine.end_as = FinishReason.STOP
    made = await create(client, background=True, max_output_tokens=2)
    ResponseObject.model_validate(made, strict=True)
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    response = await ended(client, made["id"])
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "HI"
    assert engine.requests[-1].terms.priority == LOWEST
    following = await create(client, previous_response_id=made["id"], max_output_tokens=1)
    assert following["previous_response_id"] == made["id"]


async def test_one_under_way_shows_its_input_and_is_not_gone_on_from(app, engine):
    engine.stall_after = 1
    async with connect(app) as client:
        made = await create(client, background=True, input="hello")
        page = (await client.get(f"{PATH}/{made['id']}/input_items")).json()
        assert [item["content"][0]["text"] for item in page["data"]] == ["hello"]
        error = await refused(client, previous_response_id=made["id"])
        assert error["param"] == "previous_response_id"
        assert "under way" in error["message"]
        await client.post(f"{PATH}/{made['id']}/cancel")


async def test_a_priority_that_is_asked_for_holds(client, engine):
    made = await create(client, background=True, priority=3, max_output_tokens=1)
    await ended(client, made["id"])
    assert engine.requests[-1].terms.priority == 3


async def test_a_stream_goes_on_without_its_reader_and_is_followed_from_any_event(app, engine):
    engine.pause_s, engine.end_as = 0.05, FinishReason.STOP
    async with (
        serving(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        stream = await sdk.responses.create(
            model="fake", input="hello", background=True, stream=True, max_output_tokens=5
        )
        seen = []
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert [event.type for event in seen[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        response_id, last = seen[0].response.id, seen[-1].sequence_number
        rest = [
            event
            async for event in await sdk.responses.retrieve(response_id, stream=True, starting_after=last)
        ]
        assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
        said = [event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta"]
        assert "".join(said) == "HELLO"
        assert rest[-1].type == "response.completed"
        again = [event async for event in await sdk.responses.retrieve(response_id, stream=True)]
        assert [event.sequence_number for event in again] == list(range(len(again)))
        assert again[last:] == [*seen[last:], *rest]
        assert (await sdk.responses.retrieve(response_id)).output_text == "HELLO"
    assert engine.aborted == []


async def test_events_are_those_of_the_document(client, engine):
    reply = await client.post(
        PATH, json={"input": "hi", "background": True, "stream": True, "max_output_tokens": 2}
    )
    events = parsed(reply.text)
    for event in events:
        ResponseEvent.model_validate(event, strict=True)
    assert events[-1]["type"] == "response.incomplete"


async def test_one_that_is_cancelled_ends_and_stays_so(app, engine):
    engine.stall_after = 2
    async with connect(app) as client:
        made = await create(client, background=True)
        await eventually(lambda: engine.num_running == 1)
        reply = await client.post(f"{PATH}/{made['id']}/cancel")
        assert reply.json()["status"] == "cancelled"
        ResponseObject.model_validate(reply.json(), strict=True)
        assert engine.num_running == 0
        for again in (
            await client.post(f"{PATH}/{made['id']}/cancel"),
            await client.get(f"{PATH}/{made['id']}"),
        ):
            assert again.json() == reply.json()


async def test_the_stream_of_one_that_is_cancelled_ends(app, engine):
    engine.stall_after = 2
    async with serving(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as sdk:
        stream = await sdk.responses.create(model="fake", input="hello", background=True, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.created":
                await eventually(lambda: engine.num_running == 1)
                assert (await sdk.responses.cancel(event.response.id)).status == "cancelled"
        assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")


async def test_the_stream_of_one_that_is_cancelled_before_its_turn_ends_alike(app, engine):
    app.state.background.places.num_places = 0
    async with connect(app) as client:
        body = {"input": "hello", "background": True, "stream": True}
        streaming = asyncio.create_task(client.post(PATH, json=body))
        await eventually(lambda: app.state.background._works)
        (response_id,) = app.state.background._works
        cancelled = (await client.post(f"{PATH}/{response_id}/cancel")).json()
        ResponseObject.model_validate(cancelled, strict=True)
        *_, queued, last = parsed((await streaming).text)
    assert queued["type"] == "response.queued"
    assert (last["type"], last["response"]) == ("response.incomplete", cancelled)
    assert cancelled["status"] == "cancelled"
    assert not engine.requests


async def test_one_in_line_waits_for_room_and_for_the_engine(client, engine, monkeypatch):
    engine.admission_error = Overloaded("full", retry_after_s=0.01)
    made = await create(client, background=True, max_output_tokens=1)
    await eventually(lambda: len(engine.requests) > 1)
    assert (await client.get(f"{PATH}/{made['id']}")).json()["status"] == "queued"
    engine.admission_error = EngineUnavailable("the engine is replaced", retry_after_s=0.01)
    await asyncio.sleep(0.03)
    engine.admission_error = None
    assert (await ended(client, made["id"]))["output"]


async def test_a_failure_can_be_fetched(client, engine):
    engine.error_after, engine.error = 1, RequestFailed("logits are not finite")
    made = await create(client, background=True)
    response = await ended(client, made["id"])
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "logits" not in response["error"]["message"]


async def test_deleting_one_under_way_ends_it(client, engine):
    engine.stall_after = 1
    made = await create(client, background=True)
    await eventually(lambda: engine.num_running == 1)
    assert (await client.delete(f"{PATH}/{made['id']}")).json()["deleted"]
    assert engine.num_running == 0
    assert (await client.get(f"{PATH}/{made['id']}")).status_code == 404


async def test_it_is_there_only_for_the_key_that_made_it_and_each_key_has_a_bound(engine, monkeypatch):
    monkeypatch.setattr("server.api.responses.background.MAX_UNDER_WAY_OF_OWNER", 1)
    engine.stall_after = 1
    mine, yours = ({"authorization": f"Bearer {name}"} for name in ("mine", "yours"))
    async with connect(build_app(engine, Settings(api_keys=("mine", "yours")))) as client:
        body = {"input": "hi", "background": True}
        made = (await client.post(PATH, json=body, headers=mine)).json()
        place = f"{PATH}/{made['id']}"
        assert (await client.post(PATH, json=body, headers=mine)).status_code == 429
        assert (await client.post(PATH, json=body, headers=yours)).status_code == 200
        for method, path in (("GET", place), ("DELETE", place), ("POST", f"{place}/cancel")):
            assert (await client.request(method, path, headers=yours)).status_code == 404
        assert (await client.get(place, headers=mine)).json()["status"] in ("queued", "in_progress")


async def test_the_bound_of_a_key_holds_for_responses_that_are_prepared_at_the_same_time(
    app, engine, monkeypatch
):
    monkeypatch.setattr("server.api.responses.background.MAX_UNDER_WAY_OF_OWNER", 3)
    engine.stall_after, encode = 1, engine.encode_chat

    async def encode_later(chat):
        await asyncio.sleep(0)
        return await encode(chat)

    monkeypatch.setattr(engine, "encode_chat", encode_later)
    async with connect(app) as client:
        body = {"input": "hi", "background": True}
        replies = await asyncio.gather(*(client.post(PATH, json=body) for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 5
        await app.state.background.close()


async def test_a_response_of_another_key_has_the_next_place(engine):
    engine.stall_after = 1
    many, one = ({"authorization": f"Bearer {name}"} for name in ("many", "one"))
    app = build_app(engine, Settings(api_keys=("many", "one")))
    app.state.background.places.num_places = 2
    async with connect(app) as client:
        body = {"input": "many", "background": True}
        ids = [(await client.post(PATH, json=body, headers=many)).json()["id"] for _ in range(6)]
        await client.post(PATH, json=body | {"input": "one"}, headers=one)
        await eventually(lambda: engine.num_running == 2)
        await client.post(f"{PATH}/{ids[0]}/cancel", headers=many)
        await eventually(lambda: len(engine.requests) == 3)
        assert [message["content"] for message in engine.chats[-1][0]] == ["one"]
        await app.state.background.close()


async def test_all_places_under_way_are_divided_among_the_keys_that_ask(engine, monkeypatch):
    monkeypatch.setattr("server.api.responses.background.MAX_UNDER_WAY", 4)
    engine.stall_after = 1
    many, one = ({"authorization": f"Bearer {name}"} for name in ("many", "one"))
    app = build_app(engine, Settings(api_keys=("many", "one")))
    async with connect(app) as client:
        body = {"input": "hi", "background": True}
        replies = [await client.post(PATH, json=body, headers=many) for _ in range(5)]
        assert [reply.status_code for reply in replies] == [200] * 4 + [429]
        replies = [await client.post(PATH, json=body, headers=one) for _ in range(3)]
        assert [reply.status_code for reply in replies] == [200, 200, 429]
        assert "may have 2 requests" in replies[-1].text
        await app.state.background.close()


async def test_what_cannot_be_followed_says_why(client, engine):
    error = await refused(client, background=True, store=False)
    assert error["param"] == "background"
    assert (await refused(client, background=True, input="x" * 200))["code"] == "context_length_exceeded"
    made = await create(client, max_output_tokens=1)
    for query, param in (
        ({"stream": "true"}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"starting_after": "1"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
    ):
        reply = await client.get(f"{PATH}/{made['id']}", params=query)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
    reply = await client.post(f"{PATH}/{made['id']}/cancel")
    assert reply.json()["error"]["param"] == "response_id"


async def test_events_are_bounded_by_bytes_and_what_is_gone_is_said(engine):
    engine.end_as = FinishReason.STOP
    async with connect(build_app(engine, Settings(responses_store_bytes=6000))) as client:
        body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 60}
        events = parsed((await client.post(PATH, json=body)).text)
        place = f"{PATH}/{events[0]['response']['id']}"
        gone = await client.get(place, params={"stream": "true"})
        assert (gone.status_code, gone.json()["error"]["param"]) in ((400, "starting_after"), (400, "stream"))
        assert (await client.get(place)).json()["status"] == "completed"


# Restarts.


@pytest.fixture
def with_folder(engine, tmp_path):
    """Make applications of one state folder, one after the other."""
    apps = []

    def make():
        edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"), state_max_bytes=2**20)
        engine.metrics = FakeMetrics()
        apps.append(build_app(engine, Settings(edge=edge)))
        return apps[-1]

    yield make
    for app in apps:
        app.state.desk.close()


async def test_after_a_restart_what_was_in_line_is_made_and_what_had_its_end_is_there(engine, with_folder):
    engine.end_as = FinishReason.STOP
    first = with_folder()
    async with connect(first) as client:
        earlier = await create(client, input="ab", background=True, max_output_tokens=2)
        done = await ended(client, earlier["id"])
        engine.stall_after = 1
        await engine.load_adapter("tuned", "good", replaces=False)
        made = await create(
            client,
            model="tuned",
            input="cd",
            background=True,
            previous_response_id=earlier["id"],
            user="u",
            text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        )
        reply = client.post(PATH, json={"input": "ef", "background": True, "stream": True})
        streaming = asyncio.create_task(reply)
        await eventually(lambda: engine.num_running == 2)
        streamed = next(id_ for id_ in first.state.background._works if id_ != made["id"])
        await first.state.background.close()
        await asyncio.gather(streaming, return_exceptions=True)
    first.state.desk.close()
    engine.stall_after = None
    second = with_folder()
    async with connect(second) as client:
        await go_on(second)
        assert await ended(client, done["id"]) == done
        response = await ended(client, made["id"])
        assert response["status"] == "completed"
        assert (made["model"], response["model"]) == ("tuned", "tuned")
        assert response["created_at"] == made["created_at"]
        assert (engine.requests[-1].terms.priority, engine.requests[-1].terms.tenant) == (LOWEST, "u")
        assert [message["content"] for message in engine.chats[-1][0]] == ["ab", "AB", "cd"]
        assert (await ended(client, streamed))["error"]["message"].startswith("the server was restarted")
        assert (await client.delete(f"{PATH}/{made['id']}")).status_code == 200
    second.state.desk.close()
    third = with_folder()
    async with connect(third) as client:
        await go_on(third)
        assert (await client.get(f"{PATH}/{made['id']}")).status_code == 404
        following = await create(client, input="gh", previous_response_id=done["id"], max_output_tokens=1)
        assert following["status"] == "completed"


async def test_a_restart_does_not_prolong_the_day_of_a_response(engine, with_folder, monkeypatch):
    first = with_folder()
    async with connect(first) as client:
        made = await create(client, background=True, max_output_tokens=1)
        await ended(client, made["id"])
    await eventually(lambda: not first.state.background._works)
    first.state.desk.close()
    later_s = kept_responses.settled_time_s() + 1000
    monkeypatch.setattr(kept_responses, "settled_time_s", lambda: later_s)
    second = with_folder()
    await go_on(second)
    store = second.state.response_store
    assert store.num_bytes > 0
    assert not store.find(made["id"], owner="", now_s=time.monotonic() + RESPONSE_TTL_S - 500)


async def test_one_at_its_end_is_gone_on_from_while_it_is_written_to_disk(engine, tmp_path, monkeypatch):
    app = build_app(engine, Settings(edge=dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"))))
    keep, may_write = app.state.desk.keep, asyncio.Event()

    async def keep_later(work):
        await may_write.wait()
        return await keep(work)

    monkeypatch.setattr(app.state.desk, "keep", keep_later)
    async with connect(app) as client:
        made = await create(client, background=True, max_output_tokens=1)
        await ended(client, made["id"])
        await create(client, previous_response_id=made["id"], max_output_tokens=1)
    may_write.set()
    await eventually(lambda: not app.state.background._works)
    app.state.desk.close()


async def test_responses_on_disk_are_bounded_by_number(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("server.api.responses.kept_responses.MAX_RESPONSES", 2)
    edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"), state_max_bytes=2**20)
    app = build_app(engine, Settings(edge=edge))
    async with connect(app) as client:
        ids = []
        for _ in range(4):
            made = await create(client, background=True, max_output_tokens=1)
            await ended(client, made["id"])
            ids.append(made["id"])
    await eventually(lambda: not app.state.background._works)
    assert app.state.desk.store.response_ids() == ids[2:]
    app.state.desk.close()
