"""Every reply carries an id, and no client's id breaks a log or a header."""

import pytest


async def test_a_harmless_id_comes_back(client):
    response = await client.get("/health", headers={"x-request-id": "trace:1.2_3-4/5"})
    assert response.headers["x-request-id"] == "trace:1.2_3-4/5"


@pytest.mark.parametrize("value", ["", "a b", "a\tb", "x" * 129, "é", "<script>", 'a"b'])
async def test_any_other_is_replaced(client, value):
    response = await client.get("/health", headers={"x-request-id": value.encode()})
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/nope"), ("POST", "/v1/completions"), ("DELETE", "/v1/models")],
)
async def test_each_reply_has_its_own(client, method, path):
    ids = {(await client.request(method, path)).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_the_clients_id_is_not_the_engines(client, engine):
    for _ in range(2):
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"})
    assert len({request.request_id for request in engine.requests}) == 2
