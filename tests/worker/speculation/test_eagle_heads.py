"""Heads of EAGLE-3 guess as the published computation does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_outputs import BaseModelOutputWithPast

from tests.checkpoints import make_checkpoint
from tests.worker.adapters.test_adapted_models import LIMITS
from tests.worker.conftest import load_worker
from tests.worker.pictures.seeing import Reference
from tests.worker.speculation.eagle_checkpoints import EagleOracle, write_eagle
from tests.worker.speculation.test_draft_heads import SETTINGS, check_guesses
from worker.devices.device import CpuDevice
from worker.doctor_findings import Verdict
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.steps.tokens import HiddenStates, StepTokens
from worker.survey.draft_forecast import foresee_draft
from worker.survey.forecast import forecast
from worker.survey.survey import survey
from worker.worker import Worker
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import StartupError


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {
        family: make_checkpoint(family, root / family, num_hidden_layers=5, sliding_window=None)
        for family in ("llama", "mistral", "qwen2", "qwen3")
    }


def drafting(head: Path) -> SpeculationConfig:
    return SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=str(head), num_speculative_tokens=4)


@pytest.mark.parametrize(
    ("family", "kernels", "form"),
    [
        ("llama", "auto", {}),
        ("qwen3", "off", {"is_of_speculators": False, "own": False, "norm_first": True}),
        pytest.param("llama", "off", {"own": False}, marks=pytest.mark.night),
        pytest.param("mistral", "off", {}, marks=pytest.mark.night),
        pytest.param("qwen2", "auto", {}, marks=pytest.mark.night),
        pytest.param(
            "qwen3", "auto", {"is_of_speculators": False, "norm_first": True}, marks=pytest.mark.night
        ),
    ],
)
def test_a_head_guesses_what_the_published_computation_guesses(
    targets: dict[str, Path], tmp_path: Path, family: str, kernels: str, form: dict[str, bool]
) -> None:
    head = write_eagle(tmp_path / "head", targets[family], **form)
    loaded = load_worker(targets[family], **SETTINGS, speculation=drafting(head), cpu_kernels=kernels)
    check_guesses(loaded, EagleOracle(head, targets[family]))


def changed(folder: Path, tensors: dict[str, torch.Tensor | None], **content: Any) -> None:
    """Give a head other tensors, or none, and other words in its configuration."""
    kept = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: each for name, each in kept.items() if each is not None}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | content))


def refusal_of(target: Path, head: Path, **options: Any) -> str:
    options = {**SETTINGS, "speculation": drafting(head), **options}
    with pytest.raises(StartupError) as refused:
        load_worker(target, **options)
    return refused.value.what


LAYER = {"model_type": "llama", "hidden_size": 32, "vocab_size": 77}


@pytest.mark.parametrize(
    ("tensors", "content", "named"),
    [
        ({"fc.weight": torch.zeros(32, 100)}, {}, "fc.weight is (32, 100) in its files, and (32, 192)"),
        ({}, {"transformer_layer_config": LAYER}, "its vocabulary has 77 tokens, and the model's"),
        ({"d2t": torch.full((96,), 300)}, {}, "d2t names other tokens than the model's"),
        ({"d2t": torch.zeros(50).long()}, {}, "d2t is (50,) in its files, and (96,)"),
        (
            {"layers.0.hidden_norm.weight": None},
            {},
            ": layers.0.hidden_norm.weight is not there in its files",
        ),
        (
            {"input_norm.weight": torch.ones(192)},
            {},
            "input_norm.weight is (192,) in its files, and not there by",
        ),
        ({"embed_tokens.weight": None}, {}, ": embed_tokens.weight is not there in its files"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "before layers [2, 4, 9] of a model of 5"),
        ({}, {"eagle_aux_hidden_state_layer_ids": None}, "before layers [2, 2, 2] of a model of 5"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [False, 2, 4]}, "before layers [False, 2, 4] of a model"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1.0, 2, 4]}, "before layers [1.0, 2, 4] of a model"),
        ({}, {"eagle_aux_hidden_state_layer_ids": 7}, "TypeError: "),
        ({}, {"transformer_layer_config": {**LAYER, "hidden_size": "wide"}}, "hidden_size"),
        ({}, {"transformer_layer_config": {**LAYER, "num_attention_heads": 0}}, "ZeroDivisionError"),
        ({}, {"transformer_layer_config": {**LAYER, "intermediate_size": 1 << 40}}, "its weights have"),
        ({}, {"norm_output": True}, "its norm_output is not computed"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, "its use_aux_hidden_state is not computed"),
        (
            {},
            {"transformer_layer_config": {**LAYER, "num_hidden_layers": 2}},
            "its layer is not one of llama",
        ),
    ],
)
def test_a_head_of_another_model_is_refused_by_name(
    targets: dict[str, Path], tmp_path: Path, tensors: Any, content: dict[str, Any], named: str
) -> None:
    head = write_eagle(tmp_path / "head", targets["llama"])
    changed(head, tensors, **content)
    what = refusal_of(targets["llama"], head)
    assert what.startswith(f"draft model {head}: ")
    assert named in what
    assert what.count(str(head)) == 1


def test_a_tensor_is_named_as_its_file_names_it(targets: dict[str, Path], tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head", targets["llama"], is_of_speculators=False, own=False)
    changed(head, {"midlayer.mlp.up_proj.weight": torch.zeros(48, 63)})
    assert ": midlayer.mlp.up_proj.weight is (48, 63) in its files" in refusal_of(targets["llama"], head)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_vl"])
def test_a_model_of_pictures_or_of_other_layers_is_refused_by_name(
    targets: dict[str, Path], tmp_path: Path, family: str
) -> None:
    target, head = tmp_path / family, write_eagle(tmp_path / "head", targets["llama"])
    if family == "gpt2":
        make_checkpoint(family, target)
    else:
        Reference(family, target)
    named = f"heads of EAGLE-3 go with llama, mistral, qwen2, qwen3, and the model is {family}"
    assert named in refusal_of(target, head)
    assert named in fault_of(target, head)


def test_states_before_layers_that_were_not_kept_raise() -> None:
    tokens = StepTokens(torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1))
    hidden = HiddenStates(tokens, BaseModelOutputWithPast(torch.zeros(1, 4, 8)))
    with pytest.raises(AttributeError, match="no attribute 'tapped'"):
        _ = hidden.tapped_TH


def test_a_smaller_model_is_refused_where_a_head_is_asked_for(targets: dict[str, Path]) -> None:
    asked = replace(drafting(targets["llama"]), is_eagle=True)
    with pytest.raises(StartupError, match="it is no head of EAGLE-3"):
        load_worker(targets["llama"], **SETTINGS, speculation=asked)


def test_adapters_and_a_cache_with_scales_are_refused_with_a_head(
    targets: dict[str, Path], tmp_path: Path
) -> None:
    head = write_eagle(tmp_path / "head", targets["llama"])
    assert "adapters" in refusal_of(targets["llama"], head, adapter_limits=LIMITS)
    options = {"kv_cache_dtype": "fp8", "cpu_kernels": "off"}
    assert "does not go with a draft model" in refusal_of(targets["llama"], head, **options)


def fault_of(target: Path, head: Path) -> str:
    options = {"kv_cache_bytes": 4 << 20, "speculation": drafting(head)}
    *_, last = survey(WorkerConfig(model_path=str(target), device="cpu", **options))
    assert last.verdict is Verdict.FAULT
    return last.what


@pytest.mark.parametrize(
    ("tensors", "content", "named"),
    [
        ({}, {"transformer_layer_config": LAYER}, "its vocabulary has 77 tokens"),
        ({"norm.weight": None}, {}, ": norm.weight is not there in its files"),
        ({"d2t": torch.zeros(50).long()}, {}, "d2t is (50,) in its files"),
    ],
)
def test_doctor_refuses_a_head_where_the_start_does(
    targets: dict[str, Path], tmp_path: Path, tensors: Any, content: dict[str, Any], named: str
) -> None:
    head = write_eagle(tmp_path / "head", targets["llama"])
    changed(head, tensors, **content)
    assert named in fault_of(targets["llama"], head)


def test_doctor_foresees_the_bytes_and_the_blocks_of_a_head(targets: dict[str, Path], tmp_path: Path) -> None:
    head = write_eagle(tmp_path / "head", targets["llama"])
    options = {"kv_cache_bytes": 4 << 20, "speculation": drafting(head), "num_threads": 1}
    config = WorkerConfig(model_path=str(targets["llama"]), device="cpu", **options)
    kind, device = find_kind(config), CpuDevice(config)
    foreseen = foresee_draft(config, kind, device)
    assert foreseen is not None
    found = forecast(config, kind, device, weight_bytes(config, kind, device), foreseen.kept)
    facts = Worker(config).load(lambda progress: None)
    assert facts.has_draft_model
    assert found.size.num_blocks == facts.num_blocks
    memory = next(each for each in survey(config) if each.topic == "memory")
    assert "of the draft model" in memory.what
