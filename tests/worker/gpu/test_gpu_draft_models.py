"""Draft models and heads on a GPU, interpreted and late: the tokens of a CPU without drafts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import load_worker
from tests.worker.gpu.interpreted_gpu import HAS_GPU, InterpretedGpu
from tests.worker.gpu.lazy_cuda import LazyCuda
from tests.worker.gpu.test_gpu_drafts import (  # noqa: F401 - its graphs
    AHEAD,
    OPTIONS,
    WIDE,
    check_alike,
    small_graphs,
)
from tests.worker.gpu.test_gpu_worker import load_gpu, steps_of
from tests.worker.gpu.test_lazy_cuda import load_lazy
from tests.worker.speculation.eagle_checkpoints import EagleOracle, write_eagle
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Answer, ModelDrafted, Speculated
from tests.worker.speculation.test_draft_heads import MTP, Oracle, check_guesses
from tests.worker.speculation.test_verification import DEMO
from worker.devices.device import CpuDevice
from worker.startup.kernel_choice import verifies_drafts
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import StartupError

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="near-equal logits are no equal logits there"),
    pytest.mark.usefixtures("small_graphs"),
]


def draft_of(folder: Path) -> SpeculationConfig:
    return SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=str(folder), num_speculative_tokens=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=2)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def expected(target: Path) -> list[Answer]:
    return Speculated(*load_worker(target), WIDE).answers(TINY_REQUESTS)


def test_a_draft_model_on_a_gpu_changes_no_answer_and_is_right(target: Path, expected: list[Answer]) -> None:
    """The model drafts for itself: what it guesses without penalties, bans and grammars is right."""
    loaded = load_gpu(target, **{**OPTIONS, "speculation": draft_of(target)})
    world = ModelDrafted(*loaded, AHEAD)
    check_alike(world.answers(TINY_REQUESTS), expected)
    assert 0 < world.num_accepted < world.num_drafted
    pressed = ModelDrafted(
        *loaded, {**AHEAD, "num_blocks": 7, "preemption_mode": PreemptionMode.SWAP}, next_id=100
    )
    check_alike(pressed.answers(TINY_REQUESTS), expected)
    assert pressed.num_preemptions > 0
    plain = [(prompt, replace(params, temperature=0.0)) for prompt, params in TINY_REQUESTS[:1] * 3]
    again = ModelDrafted(*loaded, AHEAD, next_id=200)
    again.answers(plain)
    assert again.num_accepted == again.num_drafted > 0


@pytest.mark.night
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_a_head_on_a_gpu_guesses_what_transformers_guesses(tmp_path: Path, family: str) -> None:
    """Graphs keep hidden states of steps; a prompt is read in parts, and kept by steps without graphs too."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2}
    if family == "qwen3_next":
        sizes["layer_types"] = ["linear_attention", "full_attention"]
    folder = write_head(tmp_path / "head", make_checkpoint(family, tmp_path / "plain", **sizes))
    loaded = load_gpu(folder, **{**OPTIONS, "speculation": MTP})
    check_guesses(loaded, Oracle(folder), max_plans_in_flight=2)
    assert steps_of(loaded[0])._num_replayed > 0


@pytest.mark.night
def test_a_head_of_eagle_on_a_gpu_guesses_what_the_published_computation_guesses(tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=5)
    head = write_eagle(tmp_path / "eagle", target)
    oracle = EagleOracle(head, target)
    with LazyCuda() as cuda:
        cuda.start_order(3)
        loaded = load_lazy(target, **{**OPTIONS, "speculation": draft_of(head)})
        check_guesses(loaded, oracle)
    assert steps_of(loaded[0])._num_replayed > 0


@pytest.mark.night
@pytest.mark.parametrize("seed", [None, 3])
def test_a_late_device_drafts_by_a_head_under_preemption(tmp_path: Path, seed: int | None) -> None:
    folder = write_head(tmp_path / "head", make_checkpoint("qwen3", tmp_path / "plain", num_hidden_layers=1))
    expected, oracle = Speculated(*load_worker(folder), WIDE).answers(TINY_REQUESTS), Oracle(folder)
    with LazyCuda() as cuda:
        cuda.start_order(seed)
        loaded = load_lazy(folder, **{**OPTIONS, "speculation": MTP})
        check_guesses(loaded, oracle, max_plans_in_flight=2)
        changes = {**AHEAD, "num_blocks": 10, "preemption_mode": PreemptionMode.SWAP}
        world = ModelDrafted(*loaded, changes, next_id=1000)
        check_alike(world.answers(TINY_REQUESTS), expected)
    assert world.num_preemptions > 0
    assert world.num_drafted > 0


@pytest.mark.night
@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_drafts_on_a_gpu_without_kernels_change_no_answer(tmp_path: Path, kind: str) -> None:
    folder = write_head(tmp_path / "head", make_checkpoint("qwen3", tmp_path / "plain", num_hidden_layers=1))
    shutil.copy(DEMO / "tokenizer.json", folder)
    speculation = MTP if kind == "head" else draft_of(folder)
    expected = Speculated(*load_worker(folder), WIDE).answers(TINY_REQUESTS)
    loaded = load_gpu(folder, **{**OPTIONS, "speculation": speculation, "gpu_kernels": "off"})
    world = ModelDrafted(*loaded, WIDE)
    check_alike(world.answers(TINY_REQUESTS), expected)
    assert world.num_drafted > 10


def test_ranks_of_gpus_refuse_draft_models_and_heads(tmp_path: Path) -> None:
    config = WorkerConfig(model_path=str(tmp_path), device="cpu", num_ranks=2, speculation=MTP)
    with pytest.raises(StartupError, match="a draft model is not divided over ranks of GPUs"):
        verifies_drafts(config, InterpretedGpu(config))
    assert verifies_drafts(config, CpuDevice(config))
