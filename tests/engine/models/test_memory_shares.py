"""The memory of several models, as their engines get it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.models.entries import ModelSpec, resolve_models
from engine.models.memory_shares import with_shares
from engine.options.found_model import DEMO_MODEL
from engine.options.sources import read_options
from worker.doctor_findings import Finding
from worker.survey.needs import survey_needs


def read(folder: Path, text: str) -> tuple[ModelSpec, ...]:
    file = folder / "models.yaml"
    file.write_text(text)
    options = read_options({"models": str(file), "device": "cpu"}, {})
    return resolve_models(options, environment={})[0]


@pytest.mark.night
def test_engines_of_one_model_on_cpus_divide_its_memory(tmp_path: Path) -> None:
    one, two, asked = read(
        tmp_path,
        """
        models:
          - {served_model_name: one, max_model_len: 64}
          - {served_model_name: two, max_model_len: 64}
          - {served_model_name: asked, kv_cache_memory: 2MiB}
        """,
    )

    def doubled(spec: ModelSpec) -> ModelSpec:
        return replace(
            spec,
            engine=replace(spec.engine, num_engines=2, worker=replace(spec.engine.worker, num_engines=2)),
        )

    two, asked_twice = doubled(two), doubled(asked)
    asked_twice = replace(asked_twice, engine=replace(asked_twice.engine, served_names=("twice",)))
    one, two, asked, asked_twice = with_shares((one, two, asked, asked_twice))
    assert asked_twice.room.num_bytes == 2 * asked.room.num_bytes
    fixed_bytes = one.room.num_bytes - one.engine.worker.kv_cache_bytes
    assert abs(two.room.num_bytes - 2 * (fixed_bytes + two.engine.worker.kv_cache_bytes)) <= 1


def test_a_checkpoint_with_an_odd_window_is_a_finding_and_the_next_one_is_foreseen(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"sliding_window": -1}))
    specs = read(tmp_path, f"models: [{{model: {tmp_path}/odd, load: demand}}, {{load: demand}}]")
    odd, sound = survey_needs([spec.engine.worker for spec in specs])
    assert isinstance(odd, Finding)
    assert "a sliding window that its layers do not tell of" in odd.what
    assert not isinstance(sound, Finding)
