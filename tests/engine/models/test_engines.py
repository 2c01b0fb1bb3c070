"""The engines of several models as one: their end, and models that cannot be loaded."""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import EngineUnavailable
from engine.models.engines import ModelEngines
from engine.models.entries import resolve_models
from engine.models.joined_health import joined_health
from engine.models.placement import Reservation
from engine.models.yard import Waiting
from engine.options.found_model import DEMO_MODEL
from engine.options.sources import read_options
from engine.types import EngineState, Health
from tests.engine.text.test_tokenizer_trial import save
from worker.checkpoint.checkpoint_files import file_stamps


def health(engines: ModelEngines) -> Health:
    return joined_health({str(place): engine.health() for place, engine in enumerate(engines.all)})


async def test_a_drain_of_models_on_demand_is_seen_by_probes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models: [{load: demand}]")
    (spec,), _ = resolve_models(read_options({"models": str(file)}, {}), environment={})
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    engines = ModelEngines([replace(spec, room=room), replace(spec, room=room)])
    engines.start()
    assert health(engines).is_ready
    draining = asyncio.create_task(engines.drain(timeout_s=0, delay_s=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (health(engines).state, health(engines).is_live) == (EngineState.DRAINING, True)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    await engines.close()


async def test_a_model_whose_files_have_changed_since_the_start_is_refused_and_not_loaded(
    tmp_path: Path,
) -> None:
    file, folder = tmp_path / "models.yaml", tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    file.write_text(f"models: [{{model: {folder}, load: demand}}]")
    (spec,), _ = resolve_models(read_options({"models": str(file)}, {}), environment={})
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    engines = ModelEngines([replace(spec, room=room)])
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    engines.start()
    with pytest.raises(EngineUnavailable, match="model: the last load failed: its files have changed"):
        await engines.places[0].lease(Waiting.IN_LINE)
    assert engines.all[0]._engines.pids == [None]
    await engines.close()


def test_a_copy_of_the_same_files_is_no_change_and_one_byte_of_a_text_is(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    before = file_stamps(str(folder))
    for each in folder.iterdir():
        os.utime(each, (1, 1))
    for never_read in ("README.md", "._config.json"):
        (folder / never_read).write_text("{}")
    assert file_stamps(str(folder)) == before
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    assert file_stamps(str(folder)) != before
    blob = tmp_path / "sha256-1234"  # GGUF, as Ollama names it
    blob.write_bytes(b"GGUF")
    before = file_stamps(str(blob))
    blob.write_bytes(b"GGUf")
    assert file_stamps(str(blob)) != before


def break_texts(folder: Path, harm: str) -> None:
    if harm == "no folder":
        return
    shutil.copytree(DEMO_MODEL, folder)
    if harm == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    elif harm == "template":
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        path.write_text(json.dumps(config | {"chat_template": "{% for %}"}))
    else:
        save(folder, r"(x+x+)+[yz]")


@pytest.mark.night
async def test_texts_that_are_broken_are_the_fault_of_their_model_alone(tmp_path: Path) -> None:
    harms = ("no folder", "tokenizer", "template", "pattern")
    for harm in harms:
        break_texts(tmp_path / harm, harm)
    broken = "".join(f"{{model: {tmp_path / harm}, dtype: float16, load: demand}}, " for harm in harms)
    file = tmp_path / "models.yaml"
    file.write_text(f"models: [{broken}{{load: demand}}]")
    specs, _ = resolve_models(read_options({"models": str(file)}, {}), environment={})
    room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
    engines = ModelEngines([replace(each, room=room) for each in specs])
    engines.start()
    await engines.texts_are_tried()
    assert [each.health().is_given_up for each in engines.all] == [True] * len(harms) + [False]
    assert health(engines).is_ready
    for harm, engine, place in zip(harms, engines.all, engines.places, strict=False):
        assert place.fault in engine.health().detail
        assert engine.names.served == (harm,)
        with pytest.raises(EngineUnavailable, match=f"{harm} cannot be loaded: "):
            await place.lease(Waiting.IN_LINE)
    await engines.close()
