"""Models that come and go, as their clients see it: comments, routes, metrics and lists."""

import asyncio
import dataclasses

import httpx
import pytest
from prometheus_client import CollectorRegistry

from engine.models.load_metrics import LoadMetrics
from engine.models.placement import Reservation
from engine.models.yard import KeepRule, ModelYard
from server.app import build_app
from server.edge import waiting_stream
from server.edge.http.edge import Parsers, Served
from tests.server.conftest import Settings, connect, eventually, serving
from tests.server.fake_engine import INFO, READY, FakeEngine
from tests.server.test_several_models import CHAT, GENERATING, LOADING, Address, ComingAndGoing, Processes


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "hi"}), ("/v1/messages", GENERATING["/v1/messages"])]
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
        assert [line for line in rest if line == "event: error"] == ["event: error"] * bool(fault)
        assert len(here.engine.requests) == 2 * (not fault)


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
    stays = Address()
    assert (await stays.client.post("/models/load", json={"model": "beside"})).status_code == 400
    assert (await stays.client.post("/models/load", json={"model": "nobody"})).status_code == 404


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
    assert value("model_unloads_total", reason="idle") == 1
    assert value("model_load_seconds_count") == 1


async def test_open_webuis_connections_see_all_models_and_chat_with_each_that_they_see():
    """An OpenAI connection is asked for /models below its address, one of Ollama for three lists."""
    first, second = FakeEngine(), FakeEngine(dataclasses.replace(INFO, served_names=("second",)))
    yard, rule = ModelYard(max_waiting=1), KeepRule(at_start=False, keep_alive_s=600)
    processes = Processes()
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    places = [yard.add(name, processes, rule, room) for name in ("fake", "second")]
    models = [Served(first, Parsers(), places[0]), Served(second, Parsers(), places[1])]
    client = connect(build_app(first, Settings(), models=models))
    second.state = LOADING  # it was never loaded
    processes.may_load.set()

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
