"""Adapters of a model on two processes: what they compute, and that both have the same ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.messages import SequenceId
from tests.adapters import LINEARS, write_adapter
from tests.checkpoints import make_checkpoint
from tests.tiers import by_day
from tests.worker.adapters.test_adapted_models import LIMITS, SCORED
from tests.worker.adapters.test_against_peft import make
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.plan_driver import PlanDriver
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import OVERRIDES, PROMPT, config_of
from worker.adapters import targets as adapter_targets
from worker.worker import Worker
from worker.worker_config import AdapterFolder, WorkerConfig
from worker.worker_errors import AdapterRefused

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module", params=["two_ranks", "two_stages"])
def divided(request: pytest.FixtureRequest) -> DividedWorker:
    worker: DividedWorker = request.getfixturevalue(request.param)
    return worker


def config_with(base: Path, adapters: list[Path]) -> WorkerConfig:
    named = tuple(AdapterFolder(each.name, str(each)) for each in adapters)
    return replace(config_of(base), adapter_limits=LIMITS, adapters=named)


def divide(config: WorkerConfig, divided: DividedWorker) -> WorkerConfig:
    return replace(config, num_ranks=divided.num_shards, num_stages=divided.num_stages)


def mixed(worker: Any, identities: list[str]) -> list[list[dict[int, float]]]:
    """Log-probabilities of three steps with a row of each adapter and one of the base."""
    driver = PlanDriver(worker, BLOCK_SIZE)
    rows = [driver.add(PROMPT[: 6 + place], SCORED, adapter=each) for place, each in enumerate(identities)]
    found = []
    for _ in range(3):
        output = driver.step(dict.fromkeys(rows))
        assert not output.failures
        found.append([dict(output.logprobs[SequenceId(row)][0].top) for row in rows])
    driver.release_all()
    return found


def adapters_of(family: str, base: Path, folder: Path) -> list[Path]:
    if "moe" not in family:
        return [
            write_adapter(folder / "all", base, rank=16),
            write_adapter(folder / "some", base, rank=3, seed=2, targets=["v_proj", "up_proj", "o_proj"]),
        ]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    make(base, folder / "all", r=4, target_modules=["q_proj"], target_parameters=experts)
    make(base, folder / "some", r=2, target_modules=[], target_parameters=experts[1:])
    return [folder / "all", folder / "some"]


AROUND_LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "up_proj", "down_proj"]
SIZES = {
    "phi3": {"num_key_value_heads": 1},
    "qwen3_5_text": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
}
RECURRENCE = ["q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


FAMILIES = ("llama", "phi3", "qwen3_moe", "qwen3_5_text", "deepseek_v3")


@pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3_moe", "qwen3_5_text")))
def test_two_processes_compute_the_adapters_that_one_does(
    family: str, divided: DividedWorker, folder: Path
) -> None:
    place = folder / f"{family}-{divided.num_shards}"
    overrides = SIZES.get(family) or OVERRIDES.get(family, {})
    base = make_checkpoint(family, place / "base", **overrides)
    if family == "phi3":
        targets = ["qkv_proj", "gate_up_proj", "down_proj"]
        adapters = [write_adapter(place / "all", base, targets=targets)]
    elif family == "qwen3_5_text":
        adapters = [write_adapter(place / "all", base, targets=RECURRENCE)]
    elif family == "deepseek_v3":
        adapters = [write_adapter(place / "all", base, targets=AROUND_LATENTS)]
    else:
        adapters = adapters_of(family, base, place)
    config = config_with(base, adapters)
    alone = Worker(config)
    identities = [each.identity for each in alone.load(lambda _progress: None).adapters]
    expected = mixed(alone, [*identities, ""])
    divided.load(divide(config, divided))
    for found, wanted in zip(mixed(divided, [*identities, ""]), expected, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[token] - theirs[token]) < 2e-4 for token in theirs)
    assert len({str(each) for each in expected[0]}) == len(identities) + 1


def test_what_not_all_ranks_read_alike_is_refused_on_all_and_steps_go_on(
    divided: DividedWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder / f"alike-{divided.num_shards}"
    base = make_checkpoint("llama", place / "base")
    first = write_adapter(place / "first", base, targets=LINEARS)
    second = write_adapter(place / "second", base, seed=2)
    divided.load(divide(config_with(base, [first]), divided))
    store = divided.adapters
    (identity,) = store.resident
    before = mixed(divided, [identity, ""])
    read = adapter_targets.read_adapter
    with monkeypatch.context() as here:  # and not in the other process
        here.setattr(
            adapter_targets,
            "read_adapter",
            lambda *args, **named: replace(read(*args, **named), digest="0" * 64),
        )
        with pytest.raises(AdapterRefused, match="not all ranks read the same files"):
            store.load("second", str(second))
    assert store.resident == (identity,)
    assert mixed(divided, [identity, ""]) == before
    loaded = store.load("second", str(second)).identity
    assert mixed(divided, [identity, "", loaded])[0][:2] == before[0]
    store.forget(loaded)
    assert store.resident == (identity,)
