"""A model on several processes samples the tokens of one process, whatever happens to its sequences."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.plan_driver import PlanDriver
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import (
    NUM_TOKENS,
    OVERRIDES,
    PROMPT,
    a_busy_hour,
    check_busy_hour,
    config_of,
    load_alone,
    load_divided,
    serve,
)
from worker.worker_config import DraftMethod, SpeculationConfig
from worker.worker_errors import StartupError

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP
FAMILIES = {
    "llama": RECOMPUTE,
    "llama3_rope": SWAP,
    "dynamic_rope": RECOMPUTE,
    "qwen2": SWAP,
    "qwen3": RECOMPUTE,
    "mistral": SWAP,
    "gemma2": RECOMPUTE,
    "gemma3_text": SWAP,
    "phi3": RECOMPUTE,
    "phi3_longrope": SWAP,
    "mixtral": RECOMPUTE,
    "qwen3_moe": SWAP,
}
"""Ways in which sequences are preempted where stages compute; two ranks do both with each family."""
FORMATS = (
    *(("llama", name) for name in ("int4", "int4 by channel", "int8", "float8", "awq", "fp8")),
    ("mixtral", "int4"),
)
HEADS = {
    "one KV head, with biases": {"num_key_value_heads": 1, "attention_bias": True},
    "a KV head for each query head, with a tied embedding": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


def compare(two_ranks: DividedWorker, checkpoint: Path) -> None:
    expected = a_busy_hour(load_alone(checkpoint)[0])
    load_divided(two_ranks, checkpoint)
    check_busy_hour(two_ranks, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_and_two_stages_sample_the_tokens_of_one_process(
    two_ranks: DividedWorker, two_stages: DividedWorker, folder: Path, family: str
) -> None:
    checkpoint = make_checkpoint(family, folder / family, **OVERRIDES.get(family, {}))
    alone, facts = load_alone(checkpoint)
    expected, served = a_busy_hour(alone), serve(alone, facts, FAMILIES[family])
    of_ranks = load_divided(two_ranks, checkpoint)
    check_busy_hour(two_ranks, expected)
    assert of_ranks.kv_cache_bytes * 2 == facts.kv_cache_bytes
    of_stages = load_divided(two_stages, checkpoint)
    assert serve(two_stages, of_stages, FAMILIES[family]) == served
    for each in (of_ranks, of_stages):
        assert (each.num_blocks, each.num_host_blocks) == (facts.num_blocks, facts.num_host_blocks)


def test_a_grid_of_stages_and_ranks_samples_the_tokens_of_one_process(
    grid: DividedWorker, folder: Path
) -> None:
    checkpoint = make_checkpoint("llama", folder / "grid", tie_word_embeddings=True, num_hidden_layers=4)
    alone, facts = load_alone(checkpoint)
    expected, served = a_busy_hour(alone), {mode: serve(alone, facts, mode) for mode in (RECOMPUTE, SWAP)}
    of_grid = load_divided(grid, checkpoint)
    check_busy_hour(grid, expected)
    assert {mode: serve(grid, of_grid, mode) for mode in (RECOMPUTE, SWAP)} == served
    assert of_grid.kv_cache_bytes * 4 == facts.kv_cache_bytes


def test_our_exchange_gives_the_bits_of_gloos(
    two_ranks: DividedWorker, two_by_gloo: DividedWorker, folder: Path
) -> None:
    checkpoint = make_checkpoint("mixtral", folder / "by gloo")
    load_divided(two_ranks, checkpoint)
    ours = a_busy_hour(two_ranks)
    load_divided(two_by_gloo, checkpoint)
    assert a_busy_hour(two_by_gloo) == ours


@pytest.mark.parametrize(("family", "name"), FORMATS, ids=" ".join)
def test_a_quantized_checkpoint_is_divided_between_its_groups(
    two_ranks: DividedWorker, tmp_path: Path, family: str, name: str
) -> None:
    compare(two_ranks, write_quantized(family, name, tmp_path)[0])


@pytest.mark.parametrize(
    "rounding", [{"quantization": "int8", "quantize_head": "int8"}, {"quantization": "int4"}]
)
def test_shards_are_rounded_too(two_ranks: DividedWorker, folder: Path, rounding: dict[str, str]) -> None:
    checkpoint = make_checkpoint("llama", folder / "rounded", intermediate_size=128)
    two_ranks.load(replace(config_of(checkpoint), num_ranks=2, **rounding))
    driver = PlanDriver(two_ranks, BLOCK_SIZE)  # type: ignore[arg-type]
    driver.generate([driver.add(PROMPT)], NUM_TOKENS)


@pytest.mark.parametrize("overrides", HEADS.values(), ids=HEADS)
def test_ranks_share_kv_heads_or_divide_them(
    two_ranks: DividedWorker, folder: Path, overrides: dict[str, int | bool]
) -> None:
    name = f"heads-{overrides['num_key_value_heads']}"
    compare(two_ranks, make_checkpoint("llama", folder / name, **overrides))


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt2", {}, "0 of 0 layers fused"),
        ("mixtral", {"intermediate_size": 80}, "its experts have 80 gates, no multiple of 2 ranks times 16"),
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
            "its 3 KV heads cannot be divided by 2",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused_with_the_reason(
    two_ranks: DividedWorker, folder: Path, family: str, overrides: dict[str, int], reason: str
) -> None:
    checkpoint = make_checkpoint(family, folder / f"whole {family}", **overrides)
    with pytest.raises(StartupError, match=reason):
        load_divided(two_ranks, checkpoint)


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("llama", {"num_hidden_layers": 1}, "it has 1 layers"),
        ("gpt2", {}, "--pipeline-parallel-size 2 does not fit this model: .* 0 of 0 layers fused"),
    ],
)
def test_models_that_have_no_stages_are_refused_with_the_reason(
    two_stages: DividedWorker, folder: Path, family: str, overrides: dict[str, int], reason: str
) -> None:
    checkpoint = make_checkpoint(family, folder / f"one {family}", **overrides)
    with pytest.raises(StartupError, match=reason):
        load_divided(two_stages, checkpoint)


def test_permuted_inputs_are_refused(two_ranks: DividedWorker, tmp_path: Path) -> None:
    checkpoint, _ = write_quantized("llama", "gptq", tmp_path)
    with pytest.raises(StartupError, match="permuted inputs cannot be cut"):
        load_divided(two_ranks, checkpoint)


@pytest.mark.parametrize("division", ["two_ranks", "two_stages"])
def test_drafts_are_refused(request: pytest.FixtureRequest, division: str, folder: Path) -> None:
    divided: DividedWorker = request.getfixturevalue(division)
    config = config_of(make_checkpoint("llama", folder / "no drafts"))
    config = replace(config, num_ranks=divided.num_shards, num_stages=divided.num_stages)
    with pytest.raises(StartupError, match="--speculative-config: ranks verify no drafts yet"):
        divided.load(replace(config, speculation=SpeculationConfig(method=DraftMethod.SUFFIX)))
