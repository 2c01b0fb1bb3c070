"""The engines of several models as one: their end."""

import asyncio
from dataclasses import replace
from pathlib import Path

from engine.models.engines import ModelEngines
from engine.models.entries import resolve_models
from engine.models.yard import Reservation
from engine.options.sources import read_options
from engine.types import EngineState


async def test_a_drain_of_models_on_demand_is_seen_by_probes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{load: demand}]")
    (spec,), _ = resolve_models(read_options({"models": str(file)}, {}), environment={})
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    engines = ModelEngines([replace(spec, room=room), replace(spec, room=room)])
    engines.start()
    assert engines.health().is_ready
    draining = asyncio.create_task(engines.drain(timeout_s=0, delay_s=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (engines.health().state, engines.health().is_live) == (EngineState.DRAINING, True)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    await engines.close()
