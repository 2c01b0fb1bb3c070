"""Refusals before an engine process is started, where loading would refuse after many seconds."""

import json
from pathlib import Path

import pytest

from engine.options import engine_split
from engine.options.declaration import OptionError
from engine.options.engine_config import resolve
from engine.options.sources import read_options


def refusal(model: Path, **given: str) -> str:
    with pytest.raises(OptionError) as caught:
        resolve(read_options({"model": str(model), **given}, {}), environment={})
    return str(caught.value)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(engine_split, "visible_gpus", list)


def test_a_cache_that_no_memory_is_there_for_is_refused_with_numbers(tiny_model: Path) -> None:
    assert "1024.00 GiB does not fit" in refusal(tiny_model, kv_cache_memory="1TiB")
    both = refusal(tiny_model, kv_cache_memory="1TiB", swap_space="1TiB", device="cpu")
    assert "do not fit together" in both


def test_a_cache_on_gpus_is_judged_where_they_are_known(tiny_model: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine_split, "visible_gpus", lambda: ["a GPU"])
    resolve(read_options({"model": str(tiny_model), "swap_space": "1TiB"}, {}), environment={})


def test_ranks_that_cannot_share_the_heads_are_refused(tiny_model: Path) -> None:
    assert "4 query heads of this model cannot be divided by 3" in refusal(
        tiny_model, tensor_parallel_size="3"
    )
    resolve(read_options({"model": str(tiny_model), "tensor_parallel_size": "2"}, {}), environment={})


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"num_attention_heads": true}', "\xff"])
def test_a_configuration_that_cannot_be_read_is_left_to_loading(
    tiny_model: Path, tmp_path: Path, content: str
) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    given = {"model": str(tmp_path), "tensor_parallel_size": "3"}
    resolve(read_options(given, {}), environment={})


def test_heads_of_the_text_model_count(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    assert "cannot be divided by 3" in refusal(tmp_path, tensor_parallel_size="3")
