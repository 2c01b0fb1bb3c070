"""Keys: needed everywhere except where probes and scrapers look."""

import pytest

from server.app import build_app
from server.endpoints import KEYLESS_PATHS, OPEN_PATHS
from tests.server.conftest import Settings, connect

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture
async def guarded(engine):
    async with connect(build_app(engine, Settings(api_keys=KEYS))) as client:
        yield client


async def test_every_route_but_the_open_ones_needs_a_key(guarded):
    routes = guarded._transport.app.openapi()["paths"]
    paths = [
        *routes,
        "/openapi.json",
        "/nope",
        "/health/",
        "/health/../v1/models",
        "http://test//health",
        "/HEALTH",
        "/metrics/x",
    ]
    for path in paths:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            response = await guarded.request(method, path)
            assert (response.status_code == 401) == (path not in OPEN_PATHS | KEYLESS_PATHS), path


async def test_a_refusal_says_how_to_ask(guarded):
    response = await guarded.get("/v1/models")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_each_key_opens(guarded, key, scheme):
    response = await guarded.get("/v1/models", headers={"authorization": f"{scheme} {key}".encode()})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer first-ke",
        "Bearer first-key2",
        "Basic first-key",
        "first-key",
        "Bearer\tfirst-key",
    ],
)
async def test_anything_else_does_not(guarded, value):
    response = await guarded.get("/v1/models", headers={"authorization": value})
    assert response.status_code == 401


async def test_two_keys_at_once_are_one_too_many(guarded):
    headers = [("authorization", "Bearer first-key"), ("authorization", "Bearer other")]
    assert (await guarded.get("/v1/models", headers=headers)).status_code == 401


async def test_the_body_of_a_stranger_is_not_read(guarded, engine):
    response = await guarded.post("/v1/completions", content=b"x" * 1_000_000)
    assert response.status_code == 401


async def test_without_keys_everything_is_open(client):
    assert (await client.get("/v1/models")).status_code == 200
