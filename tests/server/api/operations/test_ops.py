"""Probes, metrics, models: what machines ask."""

import asyncio
import dataclasses
import gc
import sys

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import DeadlineExceeded, RequestFailed
from engine.types import EngineState
from server.api.operations import ops
from server.api.operations.models import Model, ModelList
from server.api.operations.ops import HealthPage
from server.app import build_app
from server.edge.observe.http_metrics import OWN_LIMIT
from server.endpoints import ADMIN, PUBLIC, ROUTES
from tests.server.conftest import Settings, connect
from tests.server.edge.access.test_edge_options import routes_of
from tests.server.fake_engine import READY, FakeEngine

LOADING = dataclasses.replace(
    READY, state=EngineState.LOADING, detail="reading weights", progress=0.25, num_steps=0
)


@pytest.mark.parametrize(
    ("health", "ready", "live"),
    [
        (READY, 200, 200),
        (LOADING, 503, 200),
        (dataclasses.replace(READY, state=EngineState.DRAINING), 503, 200),
        (dataclasses.replace(READY, state=EngineState.DEAD), 503, 200),
        (dataclasses.replace(READY, is_live=False), 503, 503),
    ],
)
async def test_ready_and_live_are_two_questions(client, engine, health, ready, live):
    engine.state = health
    paths = ("/health", ready), ("/health/ready", ready), ("/ping", ready), ("/health/live", live)
    for path, status in paths:
        response = await client.get(path)
        assert response.status_code == status
        HealthPage.model_validate(response.json(), strict=True)
        assert (await client.head(path)).status_code == status


async def test_a_loading_server_says_how_far_it_is(client, engine):
    engine.state = LOADING
    assert (await client.get("/health/ready")).json() == {
        "status": "unavailable",
        "state": "loading",
        "detail": "reading weights",
        "progress": 0.25,
        "num_steps": 0,
        "degraded": [],
    }


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake", "/v1/completions", "/v1/chat/completions"])
async def test_until_the_model_is_loaded_everything_else_is_unavailable(client, engine, path):
    engine.state = LOADING
    if path.endswith("completions"):
        response = await client.post(
            path, json={"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
        )
    else:
        response = await client.get(path)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_ready"
    assert response.headers["retry-after-ms"] == "2500"


async def test_the_model_has_all_its_names(client):
    listed = ModelList.model_validate((await client.get("/v1/models")).json(), strict=True)
    assert [model.id for model in listed.data] == ["fake", "org/fake-alias"]
    assert {(model.root, model.parent, len(model.permission)) for model in listed.data} == {("fake", None, 0)}
    for model in listed.data:
        reply = await client.get(f"/v1/models/{model.id}")
        assert Model.model_validate(reply.json(), strict=True) == model


async def test_the_version_is_told(client):
    assert (await client.get("/version")).json() == {"version": ops.VERSION}


async def test_metrics_are_one_page_of_known_series(client):
    await client.post("/v1/completions", json={"prompt": "x", "surprise": 1})
    for _ in range(3):
        await client.get("/v1/models/fake")
        await client.get("/made/up")
    await client.request("BREW", "/made/up")
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    counts = {
        (sample.labels["method"], sample.labels["route"], sample.labels["status"]): sample.value
        for sample in families["tokenyard:http_requests"].samples
        if sample.name == "tokenyard:http_requests_total"
    }
    assert counts == {
        ("POST", "/v1/completions", "200"): 1,
        ("GET", "/v1/models/{model}", "200"): 3,
        ("GET", "unmatched", "404"): 3,
        ("other", "unmatched", "404"): 1,
    }
    assert families["tokenyard:unknown_request_fields"].samples[0].value == 1


@pytest.mark.parametrize(
    ("is_own", "error", "counted"),
    [
        (True, DeadlineExceeded("late"), ("504", OWN_LIMIT)),
        (False, DeadlineExceeded("late"), ("504", "")),
        (True, RequestFailed("nan"), ("500", "")),
    ],
)
async def test_a_time_limit_of_the_clients_own_is_told_from_the_servers_faults(
    client, engine, is_own, error, counted
):
    engine.admission_error, engine.own_limit_runs_out = error, is_own
    await client.post("/v1/completions", json={"prompt": "x"})
    ((labels, value),) = [
        (each.labels, each.value)
        for each in next(iter(engine.metrics.registry.collect())).samples
        if each.name == "tokenyard:http_requests_total"
    ]
    assert (labels["status"], labels["limit"], value) == (*counted, 1)


async def ask_as(client: httpx.AsyncClient, number: int) -> None:
    """One of each kind of label that a client could try to make: names of its own, in every place."""
    name = f"name-{number}"
    headers = {"x-tokenyard-tenant": name, "x-request-id": name, "user-agent": name, "authorization": name}
    body = {"prompt": "x", "user": name, "priority": number, name: 1, "cache_salt": name}
    await client.post("/v1/completions", json=body, headers=headers)
    await client.post("/v1/completions", json={**body, "model": name}, headers=headers)
    await client.post("/v1/completions", json={"prompt": "x", "n": -number}, headers=headers)
    for path in (f"/{name}", f"/v1/models/{name}", f"/v1/responses/{name}"):
        await client.get(path, headers=headers)
    await client.request(name.upper(), "/v1/models", headers=headers)


def work_of_a_scrape(registry: CollectorRegistry) -> tuple[int, int]:
    """Calls of Python functions, and lines of the page."""
    num_calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    gc.disable()  # it calls what others have left with it
    sys.setprofile(count)
    try:
        page = generate_latest(registry)
    finally:
        sys.setprofile(None)
        gc.enable()
    return num_calls, page.count(b"\n")


async def test_a_scrape_takes_no_more_work_however_many_have_asked_under_whatever_name(client, engine):
    registry = engine.metrics.registry
    await ask_as(client, 1)
    after_one = work_of_a_scrape(registry)
    for number in range(2, 60):
        await ask_as(client, number)
    assert work_of_a_scrape(registry) == after_one
    value = registry.get_sample_value
    labels = {"method": "POST", "route": "/v1/completions", "status": "404", "limit": ""}
    assert value("tokenyard:http_requests_total", labels) == 59


async def test_live_requests_are_listed_only_where_the_operator_wants_it(engine, client):
    assert (await client.get("/admin/requests")).json() == {"requests": [], "total": 0}
    closed = build_app(FakeEngine(), Settings(enable_admin=False))
    async with connect(closed) as other:
        assert (await other.get("/admin/requests")).status_code == 404


async def test_many_scrapes_at_once_render_once(app, monkeypatch):
    renderings = []
    monkeypatch.setattr(ops, "generate_latest", lambda registry: renderings.append(registry) or b"page")
    page = app.state.metrics_page
    assert await asyncio.gather(*(page.render() for _ in range(20))) == [b"page"] * 20
    assert len(renderings) == 1
    await asyncio.sleep(ops.METRICS_TTL_S)
    await page.render()
    assert len(renderings) == 2


async def test_the_request_counter_knows_every_route(app):
    served = {path.replace(":path}", "}") for _, path in routes_of(app)}
    assert served == set(ROUTES)


def test_paths_that_an_endpoint_says_something_about_are_its_own_routes():
    for endpoint in (*PUBLIC, *ADMIN):
        assert {*endpoint.open_paths, *endpoint.batch_paths, *endpoint.operations} <= endpoint.paths


async def test_a_route_below_another_is_counted_as_itself(client):
    for path in ("/v1/responses/x", "/v1/responses/x/input_items", "/v1/responses/x/nothing"):
        await client.get(path)
    await client.post("/v1/responses/x/cancel")
    page = (await client.get("/metrics")).text
    for method, route, count in (
        ("GET", "/v1/responses/{response_id}", 2),
        ("GET", "/v1/responses/{response_id}/input_items", 1),
        ("POST", "/v1/responses/{response_id}/cancel", 1),
    ):
        labels = f'limit="",method="{method}",route="{route}",status="404"'
        line = f"tokenyard:http_requests_total{{{labels}}} {count}.0"
        assert line in page


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("first=10000&limit=250", 200),
        ("limit=0", 200),
        ("first=-1", 400),
        ("limit=251", 400),
        ("first=٣", 400),
    ],
)
async def test_live_requests_come_in_pages(client, query: str, status: int) -> None:
    assert (await client.get(f"/admin/requests?{query}")).status_code == status
