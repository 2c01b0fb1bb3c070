"""A server under a prefix: reached with it and without it, as proxies either keep it or take it off."""

from dataclasses import replace

import pytest

from server.app import build_app
from tests.server.conftest import EDGE, Settings, connect

UNDER = Settings(api_keys=("k",), edge=replace(EDGE, root_path="/llm"))


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_paths_are_served_with_the_prefix_and_without_it(engine, prefix) -> None:
    async with connect(build_app(engine, UNDER)) as client:
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        listed = await client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer k"})
        assert listed.status_code == 200
        assert (await client.get(f"{prefix}/health/live")).status_code == 200
        assert (await client.get(f"{prefix}/page/main.js")).status_code == 200


async def test_another_prefix_or_the_same_one_twice_is_not_there(engine) -> None:
    async with connect(build_app(engine, UNDER)) as client:
        for path in ("/llmx/v1/models", "/llm/llm/v1/models"):
            assert (await client.get(path, headers={"authorization": "Bearer k"})).status_code == 404


async def test_the_prefix_alone_leads_to_the_page_and_the_description_names_it(engine) -> None:
    async with connect(build_app(engine, UNDER)) as client:
        moved = await client.get("/llm")
        assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")
        described = await client.get("/openapi.json", headers={"authorization": "Bearer k"})
        assert described.json()["servers"] == [{"url": "/llm"}]
