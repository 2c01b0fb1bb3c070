"""Pictures where one server has several models: each reads them in its own way, or says that it does not."""

import dataclasses

import pytest

pytest.importorskip("PIL")

from engine.options.media_options import MediaConfig
from engine.types import ServedAdapter
from server.app import build_app
from server.edge.http.edge import Parsers, Served
from tests.engine.media.made_pictures import pictures_of
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.reply.pictures.test_requests_with_pictures import LARGE, SeeingEngine, chat, part


async def test_of_several_models_each_reads_pictures_in_its_own_way_or_says_that_it_does_not(
    tmp_path,
) -> None:
    tuned = ServedAdapter(name="tuned", identity="tuned@0", folder="/x/tuned", rank=8, created_s=5)
    of_tower = dataclasses.replace(tuned, name="of tower", is_of_tower=True)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = (SeeingEngine(pictures_of(each)) for each in folders)
    second.model_info = dataclasses.replace(
        second.model_info, served_names=("second", "alias"), served_adapters=(tuned, of_tower)
    )
    second.pictures.config = MediaConfig(max_pictures=1)
    blind = FakeEngine(dataclasses.replace(INFO, served_names=("blind",)))
    models = [Served(each, Parsers()) for each in (first, second, blind)]
    async with connect(build_app(first, Settings(), models=models)) as client:
        for name, engine, adapter in (
            ("fake", first, None),
            ("second", second, None),
            ("alias", second, None),
            ("tuned", second, tuned),
        ):
            reply = await client.post("/v1/chat/completions", json=chat(part(), model=name, n=2))
            assert reply.status_code == 200, reply.text
            request = engine.requests.pop()
            assert (len(request.encoder_inputs), request.adapter) == (1, adapter), name
        reply = await client.post(
            "/v1/chat/completions", json=chat({"type": "text", "text": "a"}, model="of tower")
        )
        assert reply.status_code == 200, reply.text
        for name, reason in (
            ("blind", "the model 'blind' reads no pictures"),
            ("second", "at most 1"),
            ("of tower", "the adapter 'of tower' updates the part that reads pictures"),
        ):
            reply = await client.post("/v1/chat/completions", json=chat(part(), part(LARGE), model=name))
            assert (reply.status_code, reason in reply.text) == (400, True), reply.text
    for engine in (first, second):
        await engine.pictures.close()
