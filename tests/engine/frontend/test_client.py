"""AsyncEngine over a real engine process with a tiny model."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from campaigns.servers.free_ports import free_ports
from engine.errors import EngineUnavailable, Overloaded
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from engine.types import EngineState, FinishReason, GenerationRequest, ReportPage, SamplingParams

LIFE = {"max_queued_requests": "4", "default_chat_template_kwargs": '{"mood": "good"}'}


def make_engine(folder: Path, **options: str) -> AsyncEngine:
    config, _ = resolve(read_options({"model": str(folder), **options}, {}), environment={})
    return AsyncEngine(config)


def request(name: str, *, max_tokens: int = 400, n: int = 1) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id=name, prompt_token_ids=(5, 6, 7), params=params, n=n)


async def finish_reasons(engine: AsyncEngine, name: str, **changes: int) -> list[FinishReason]:
    outputs = [output async for _, output in engine.generate_all([request(name, **changes)])]
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


async def test_the_facts_of_a_model_that_is_never_loaded_are_refused_for_good(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    for fault, code in (("", "not_ready"), ("its weights are cut off", "model_broken")):
        engine.sleep(fault)
        with pytest.raises(EngineUnavailable, match=fault or "not loaded") as refused:
            _ = engine.info
        assert refused.value.code == code
    await engine.close()


async def test_a_life_of_the_engine_from_loading_to_closing(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ mood }}{{ messages[0].content }}")
    engine = make_engine(tiny_model, chat_template=str(tmp_path / "template"), **LIFE)
    with pytest.raises(EngineUnavailable, match="not loaded"):
        _ = engine.info
    engine.start()
    assert engine.health().state is EngineState.LOADING
    with pytest.raises(EngineUnavailable, match="loading"):
        await finish_reasons(engine, "too early")
    info = await engine.ready()
    assert (info.served_names, info.default_template_kwargs) == (("tiny",), {"mood": "good"})
    assert engine.health().is_ready
    await engine.texts_are_tried()
    assert engine.info.template_variables == {"mood"}, "also if the engine is ready before the trial is over"

    assert await finish_reasons(engine, "n", max_tokens=5, n=3) == [FinishReason.LENGTH] * 3

    whole = [request("a", max_tokens=350, n=2), request("b", max_tokens=480)]
    pieces = [piece async for piece in engine.generate_all(whole, is_read_whole=True)]
    assert len(pieces) <= 5  # two at the end of one, three at the end of the other
    lengths = [sum(len(each.token_ids) for place, each in pieces if place == wanted) for wanted in (0, 1)]
    assert lengths == [700, 480]

    left = engine.generate_all([request("left alone")])
    await anext(left)
    await left.aclose()
    assert await engine.explain(ReportPage(0, 9)) == ([], 0)

    crowd = asyncio.ensure_future(finish_reasons(engine, "crowd", max_tokens=5, n=4))
    await asyncio.sleep(0)
    two = engine.generate_all([request("a", n=1), request("b", n=1)])
    with pytest.raises(Overloaded):
        await anext(two)
    assert await crowd == [FinishReason.LENGTH] * 4
    assert await engine.explain(ReportPage(0, 9)) == ([], 0), "together or not at all"

    cut_off = asyncio.create_task(finish_reasons(engine, "cut off"))
    await asyncio.sleep(0.05)
    assert not await engine.drain(timeout_s=0.01)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await cut_off
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await finish_reasons(engine, "too late")
    await engine.close()
    assert engine._engines.pids[0] is None


async def test_kv_events_follow_the_prefix_cache_through_the_death_of_its_engine(
    tiny_model: Path,
) -> None:
    port = str(free_ports(2))
    engine = make_engine(tiny_model, kv_events_port=port, kv_events_topic="kv@here@tiny", block_size="4")
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.SUBSCRIBE, b"kv@here@")
        events.connect(f"tcp://127.0.0.1:{port}")
        engine.start()
        await engine.ready()
        assert await finish_reasons(engine, "a", max_tokens=9) == [FinishReason.LENGTH]
        _, first, batch = await events.recv_multipart()
        (stored, *_) = msgspec.msgpack.decode(batch)[1]
        assert stored["type"] == "BlockStored"
        assert stored["token_ids"][:3] == [5, 6, 7]
        assert engine._engines.pids[0] is not None
        os.kill(engine._engines.pids[0], signal.SIGKILL)
        while (await events.recv_multipart())[2][-len("AllBlocksCleared") :] != b"AllBlocksCleared":
            pass
        assert first > bytes(8), "the first number tells readers of an earlier server to begin anew"
        await engine.close()


@pytest.mark.night
async def test_an_engine_that_is_unloaded_comes_back_and_one_that_is_being_unloaded_can_be_closed(
    tiny_model: Path,
) -> None:
    engine = make_engine(tiny_model)
    engine.start()
    await engine.ready()
    await engine.unload()
    health = engine.health()
    assert (engine._engines.pids, health.is_ready, health.detail) == ([None], False, "not loaded")
    assert engine.info.served_names == ("tiny",)
    with pytest.raises(EngineUnavailable, match="not loaded"):
        await finish_reasons(engine, "b")
    engine.start()
    await engine.ready()
    assert await finish_reasons(engine, "a", max_tokens=5) == [FinishReason.LENGTH]
    unloading = asyncio.create_task(engine.unload())
    while engine._engines.pids != [None]:
        await asyncio.sleep(0)
    unloading.cancel()
    await engine.close()
