"""Pictures of responses in the background: there in each try, and in no memory that others need meanwhile."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("PIL")

from engine.errors import Overloaded
from engine.media.messages import SHARED_MEMORY
from server.api.batches import places
from server.app import build_app
from tests.engine.media.made_pictures import pictures_of
from tests.server.conftest import Settings, connect, eventually
from tests.server.reply.pictures.test_requests_with_pictures import WAYS, SeeingEngine

PATH = "/v1/responses"
BODY = {**WAYS[PATH], "store": True, "background": True}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SeeingEngine]:
    pictures = pictures_of(tmp_path)
    yield SeeingEngine(pictures)
    await pictures.close()


async def test_a_response_in_the_background_that_gave_way_sees_its_picture_at_its_next_try(
    engine, monkeypatch
) -> None:
    monkeypatch.setattr(places, "MIN_REST_S", 0.01)
    engine.error_after = 0
    engine.error = Overloaded("a more urgent request took its place", retry_after_s=0.0)
    app = build_app(engine, Settings())
    async with connect(app) as client:
        made = (await client.post(PATH, json=BODY)).json()
        await eventually(lambda: engine.num_segments)
        engine.error_after = None
        await eventually(lambda: not app.state.background._works)
        response = (await client.get(f"{PATH}/{made['id']}")).json()
    assert response["status"] == "incomplete"
    assert len(engine.num_segments) > 1
    assert set(engine.num_segments) == {1}


async def test_a_response_that_waits_in_the_background_holds_no_shared_memory(engine) -> None:
    app = build_app(engine, Settings())
    in_line = app.state.background.places
    in_line.num_places = 0
    async with connect(app) as client:
        assert (await client.post(PATH, json=BODY)).json()["status"] == "queued"
        assert not [*SHARED_MEMORY.glob(f"{engine.pictures._segments.prefix}-[0-9]*")]
        in_line.num_places = 2
        await client.post(PATH, json=BODY)
        await eventually(lambda: not app.state.background._works)
    assert engine.num_segments == [1, 1]
