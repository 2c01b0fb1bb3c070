"""Models that come and go, as their clients see it: comments, routes, metrics and lists."""

import asyncio
import dataclasses
import json
import logging
from collections import deque

import httpx
import openai
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from engine.models.load_metrics import LoadMetrics
from engine.models.placement import Reservation
from engine.models.yard import KeepRule, ModelYard, Waiting
from server.api.batches.app_client import AppClient
from server.app import build_app
from server.edge import waiting_stream
from server.edge.access.key_ring import KeyRing
from server.edge.http.edge import Parsers, Served
from tests.clients.conftest import INSTALLED, run
from tests.server.conftest import Settings, connect, eventually, serving
from tests.server.fake_engine import INFO, READY, FakeEngine
from tests.server.test_several_models import (
    CHAT,
    GENERATING,
    LAW,
    LOADING,
    Address,
    ComingAndGoing,
    Processes,
    bearer,
    key,
)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (path, GENERATING[path])
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
    ],
)
async def test_a_stream_that_waits_for_its_model_says_how_far_it_is_and_ends_with_the_error(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict
):
    monkeypatch.setattr(waiting_stream, "_EVERY_S", 0.01)
    for fault in ("", "its weights are cut off"):
        here = ComingAndGoing(max_waiting=2)
        here.engine.state = LOADING
        here.processes.fault = fault
        async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            whole = asyncio.create_task(client.post(path, json=body))
            async with client.stream("POST", path, json={**body, "stream": True}) as stream:
                lines = stream.aiter_lines()
                assert (stream.status_code, await anext(lines)) == (200, ": loading, 50%")
                assert stream.headers["x-request-id"]
                here.engine.state = READY
                here.processes.may_load.set()
                rest = [line async for line in lines if line]
            assert (await whole).status_code == (503 if fault else 200), "only streams begin early"
        assert any(fault in line for line in rest)
        if fault and path == "/v1/responses":
            told = json.loads(rest[-1].removeprefix("data: "))
            assert told.keys() == {"type", "sequence_number", "code", "message", "param"}
            assert (told["type"], told["sequence_number"], told["code"]) == ("error", 0, "not_ready")
        assert [line for line in rest if line == "event: error"] == ["event: error"] * bool(fault)
        assert len(here.engine.requests) == 2 * (not fault)


async def test_those_that_wait_for_one_model_in_vain_are_answered_each_in_its_own_words():
    here = ComingAndGoing(key("lawyer", "law"), key("boss"), max_waiting=4)
    here.engine.model_info = dataclasses.replace(INFO, served_adapters=(LAW,))
    here.processes.fault = "its weights are cut off"
    asking = [
        asyncio.create_task(
            here.client.post("/v1/completions", json={"prompt": "hi", "model": name}, headers=bearer(who))
        )
        for who, name in (("lawyer", "law"), ("boss", "fake"))
    ]
    await eventually(lambda: len(here.place.waiting) == 2)
    here.processes.may_load.set()
    lawyers, bosses = [(await each).json()["error"]["message"] for each in asking]
    assert lawyers == "law cannot be served now; try again later"
    assert "its weights are cut off" in bosses


async def test_a_line_of_a_batch_that_is_given_up_in_any_turn_of_a_load_leaves_no_lease_behind():
    ends = set()
    for num_turns in range(32):
        here = ComingAndGoing()
        post = AppClient(here.app, owner="").post("/v1/completions", b'{"prompt": "hi"}')
        line = asyncio.create_task(post)
        await eventually(lambda here=here: here.place.waiting and here.processes.has_begun)
        here.processes.may_load.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        line.cancel()
        (end,) = await asyncio.gather(line, return_exceptions=True)
        assert here.place.num_leases == 0, num_turns
        ends.add((type(end), len(here.engine.requests)))
    assert len(ends) > 1


async def test_a_client_that_leaves_a_commented_wait_is_counted_and_is_no_error_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(waiting_stream, "_EVERY_S", 0.01)
    here = ComingAndGoing()
    with caplog.at_level(logging.ERROR):
        async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
            async with client.stream(
                "POST", "/v1/completions", json={"prompt": "hi", "stream": True}
            ) as stream:
                await anext(stream.aiter_lines())
            await eventually(lambda: not here.place.waiting)
            await asyncio.sleep(0.05)
            page = (await client.get("/metrics")).text
    assert [record.getMessage() for record in caplog.records] == []
    assert 'code="client_closed"' in page


async def test_a_name_of_no_model_loads_and_unloads_none_and_a_listed_one_is_described_unloaded():
    here = ComingAndGoing()
    body = {"prompt": "hi", "model": "nobody"}
    for path in ("/models/load", "/models/unload", "/v1/completions"):
        assert (
            await here.client.post(path, json=body if "v1" in path else {"model": "nobody"})
        ).status_code == 404
    await asyncio.sleep(0)
    assert (here.place.state.value, here.place.waiting) == ("unloaded", deque())
    here.engine.state = LOADING  # it was never loaded
    page = await here.client.get("/v1/models/fake")
    assert (page.status_code, page.json()["max_model_len"]) == (200, None)
    assert page.json()["status"] == {"value": "unloaded"}
    assert (await here.client.get("/v1/models/nobody")).status_code == 404


async def test_a_key_for_an_adapter_learns_nothing_of_the_model_below_and_does_not_control_it():
    adapters = (LAW, dataclasses.replace(LAW, name="tax"))
    engine = FakeEngine(dataclasses.replace(INFO, served_names=("base",), served_adapters=adapters))
    yard, processes = ModelYard(max_waiting=1), Processes()
    rule, room = KeepRule(at_start=False), Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    place = yard.add("base", processes, rule, room, "base is cut off")
    keys = KeyRing([dataclasses.replace(key("lawyer", "law"), may_administer=True)])
    app = build_app(engine, Settings(), keys=keys, models=[Served(engine, Parsers(), place)])
    async with connect(app) as client:
        for act in ("load", "unload"):
            reply = await client.post(f"/models/{act}", json={"model": "law"}, headers=bearer("lawyer"))
            assert (reply.status_code, "base" in reply.text, "tax" in reply.text) == (404, False, False)
        body = {"model": "law", "prompt": "hi"}
        refused = await client.post("/v1/completions", json=body, headers=bearer("lawyer"))
        assert (refused.status_code, "base" in refused.text, "law" in refused.text) == (503, False, True)
        for state in (READY, LOADING):
            engine.state = state
            for path in ("/v1/models", "/v1/models/law"):
                listed = await client.get(path, headers=bearer("lawyer"))
                assert (listed.status_code, "base" in listed.text) == (200, False), listed.text
        engine.state = dataclasses.replace(LOADING, detail="base is cut off", num_steps=9)
        fields = ("detail", "progress", "num_steps")
        found = [(await client.get("/health", params={"model": name})).json() for name in ("law", "base")]
        shown = [[each[field] for field in fields] for each in found]
        assert shown == [["loading", 0.0, 0], ["base is cut off", 0.5, 9]]


async def test_a_key_for_an_adapter_does_not_shorten_the_stay_of_the_model_below():
    engine = FakeEngine(dataclasses.replace(INFO, served_names=("base",), served_adapters=(LAW,)))
    yard, processes = ModelYard(max_waiting=1), Processes()
    processes.may_load.set()
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    place = yard.add("base", processes, KeepRule(at_start=False, keep_alive_s=600), room)
    keys = KeyRing([key("lawyer", "law"), key("owner", "base")])
    app = build_app(engine, Settings(), keys=keys, models=[Served(engine, Parsers(), place)])
    prompts = ({}, {"prompt": "hi", "stream": False})
    async with connect(app) as client:
        await place.lease(Waiting.IN_LINE)
        place.release()
        for prompt in prompts:
            body = {"model": "law", "keep_alive": 0, **prompt}
            reply = await client.post("/api/generate", json=body, headers=bearer("lawyer"))
            assert (reply.status_code, place.is_loaded) == (200, True), reply.text
            assert reply.json()["done_reason"] != "unload"
        assert place.expires_in_s > 60
        body = {"model": "base", "keep_alive": 0}
        assert (await client.post("/api/generate", json=body, headers=bearer("owner"))).status_code == 200
        await eventually(lambda: not place.is_loaded)
    await yard.close()


async def test_models_are_loaded_and_unloaded_by_the_routes_of_llama_cpps_router():
    here = ComingAndGoing()

    async def post(act: str, name: str = "fake") -> tuple[int, dict]:
        reply = await here.client.post(f"/models/{act}", json={"model": name})
        return reply.status_code, reply.json()

    async def status() -> dict:
        return (await here.client.get("/models")).json()["data"][0]["status"]

    assert await post("unload") == (200, {"success": True})
    assert (await status()) == {"value": "unloaded"}
    assert await post("load") == (200, {"success": True})
    await eventually(lambda: here.place.state.value == "loading")
    assert (await status()) == {"value": "loading", "progress": 1.0}
    here.processes.may_load.set()
    await eventually(lambda: here.place.is_loaded)
    async with here.place.held():
        assert (await post("unload"))[0] == 200
        assert here.place.is_loaded, "no running request is cut"
    await eventually(lambda: not here.place.is_loaded)
    here.place.give_up("it has no config.json")
    status_code, body = await post("load")
    assert (status_code, body["error"]["message"]) == (503, "fake cannot be loaded: it has no config.json")
    assert (await status()) == {"value": "failed", "reason": "it has no config.json"}
    assert (await here.ask()).json()["error"]["code"] == "model_broken"
    stays = Address()
    assert (await stays.client.post("/models/load", json={"model": "beside"})).status_code == 400
    assert (await stays.client.post("/models/load", json={"model": "nobody"})).status_code == 404
    alone = connect(build_app(FakeEngine(), Settings()))
    assert (await alone.post("/models/load", json={"model": "nobody"})).status_code == 404


async def test_loads_unloads_and_those_that_wait_are_counted():
    here, registry = ComingAndGoing(), CollectorRegistry()
    registry.register(LoadMetrics(here.place))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tokenyard:{name}", labels)

    waiting = asyncio.create_task(here.ask())
    await eventually(lambda: here.place.waiting)
    assert (value("requests_waiting_for_model"), value("model_loaded")) == (1, 0)
    here.processes.may_load.set()
    assert (await waiting).status_code == 200
    assert (value("model_loads_total", result="loaded"), value("model_loaded")) == (1, 1)
    here.place.leave()
    await eventually(lambda: not here.place.is_loaded)
    here.processes.fault = "it is broken"
    assert (await here.ask()).status_code == 503
    assert value("model_loads_total", result="failed") == 1
    unloads = {reason: value("model_unloads_total", reason=reason) for reason in ("idle", "evicted", "died")}
    assert unloads == {"idle": 1, "evicted": 0, "died": 0}
    assert value("model_load_seconds_count") == 1


def two_of_which_one_fits() -> tuple[FastAPI, ModelYard, FakeEngine]:
    """Models on demand; the second one was never loaded."""
    first, second = FakeEngine(), FakeEngine(dataclasses.replace(INFO, served_names=("second",)))
    yard, rule = ModelYard(max_waiting=1), KeepRule(at_start=False, keep_alive_s=600)
    processes = Processes()
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    places = [yard.add(name, processes, rule, room) for name in ("fake", "second")]
    models = [Served(first, Parsers(), places[0]), Served(second, Parsers(), places[1])]
    second.state = LOADING
    processes.may_load.set()
    return build_app(first, Settings(), models=models), yard, second


OLLAMA = """
import json, os
from ollama import Client
client = Client(host=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))
asked = [client.generate(model=name, prompt="hi") for name in ("fake", "second")]
lists = {"listed": client.list(), "loaded": client.ps()}
found = {key: [each.model for each in value.models] for key, value in lists.items()}
print(json.dumps(found | {"done": [each.done for each in asked]}))
"""


async def test_openais_and_ollamas_clients_list_all_models_and_reach_each():
    app, yard, second = two_of_which_one_fits()
    names = ["fake", "org/fake-alias", "second"]
    async with serving(app) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            assert [each.id async for each in sdk.models.list()] == names
            second.state = READY
            for name in ("fake", "second"):
                assert (await sdk.completions.create(model=name, prompt="hi")).model == name
        python = INSTALLED / "python" / "bin" / "python"
        if not python.exists():
            pytest.skip("run tests/clients/install")
        found = await asyncio.to_thread(run, python, "-c", OLLAMA, url=url)
    assert found == {"listed": names, "loaded": ["second"], "done": [True, True]}
    await yard.close()


async def test_open_webuis_connections_see_all_models_and_chat_with_each_that_they_see():
    """An OpenAI connection is asked for /models below its address, one of Ollama for three lists."""
    app, yard, second = two_of_which_one_fits()
    client = connect(app)

    async def names(path: str, entries: str, name: str) -> list[str]:
        return [each[name] for each in (await client.get(path)).json()[entries]]

    known = ["fake", "org/fake-alias", "second"]
    for path, entries, name in (("/v1/models", "data", "id"), ("/models", "data", "id")):
        assert await names(path, entries, name) == known
    assert await names("/api/tags", "models", "name") == known
    assert await names("/api/ps", "models", "name") == []
    assert (await client.get("/api/version")).json()["version"]
    for model in await names("/api/tags", "models", "name"):
        second.state = READY
        for path in ("/v1/chat/completions", "/api/chat"):
            body = {"model": model, "messages": CHAT, "stream": False}
            assert (await client.post(path, json=body)).status_code == 200, (path, model)
    assert await names("/api/ps", "models", "name") == ["second"], "the other one left for it"
    await yard.close()
