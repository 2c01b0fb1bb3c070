"""A model on several processes samples the tokens of one process, whatever happens to its sequences."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from engine.options.found_model import DEMO_MODEL
from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.families import MATRIX
from tests.quantized_checkpoints import quantize, write_quantized
from tests.worker.family_formats import build
from tests.worker.family_trial import tiny_config
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import (
    OVERRIDES,
    PROMPT,
    a_busy_hour,
    check_busy_hour,
    config_of,
    load_alone,
    load_divided,
    serve,
)
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Speculated, half_right, oracle
from worker.worker import Worker
from worker.worker_config import DraftMethod, SpeculationConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night

RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP
FAMILIES = {
    "llama": RECOMPUTE,
    "dynamic_rope": SWAP,
    "qwen2": RECOMPUTE,
    "mistral": SWAP,
    "gemma2": RECOMPUTE,
    "gemma3_text": SWAP,
    "phi3": RECOMPUTE,
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


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_groups_of_heads_of_a_state_are_divided_among_ranks(
    two_ranks: DividedWorker, folder: Path, family: str
) -> None:
    checkpoint = make_checkpoint(family, folder / family, **OVERRIDES.get(family, {}))
    alone, facts = load_alone(checkpoint)
    requests = [(PROMPT * 2 + prompt, params) for prompt, params in TINY_REQUESTS * 2]
    expected = Speculated(alone, facts).answers(requests)
    of_ranks = load_divided(two_ranks, checkpoint)
    assert of_ranks.kv_cache_bytes * 2 == facts.kv_cache_bytes
    for mode in (RECOMPUTE, SWAP):
        changes = {"num_blocks": 3 * of_ranks.num_state_blocks + 19, "preemption_mode": mode}
        world = Speculated(two_ranks, of_ranks, changes)
        found = world.answers(requests, half_right(expected, Random(3), facts.vocab_size))
        assert [each[0] for each in found] == [each[0] for each in expected]
        assert world.num_accepted > 0
        assert world.num_preemptions > 0


LATENTS = {
    "deepseek_v2": {"moe_intermediate_size": 64, "q_lora_rank": None},
    "deepseek_v3": {"moe_intermediate_size": 64},
    "glm4_moe_lite": {"moe_intermediate_size": 64, "attention_bias": True},
    "minicpm3": {},
    "longcat_flash": {"moe_intermediate_size": 64, "num_layers": 3},
}
"""Families with latents, and sizes that two ranks can divide. The first has queries that are not compressed,
as V2 Lite; Kimi K2 is the second. The last attends twice in a layer, and some of its experts return what they
are given."""
INDEXED = {
    "deepseek_v32": {"moe_intermediate_size": 64},
    "glm_moe_dsa": {"moe_intermediate_size": 64},
    "hy_v4": {"moe_intermediate_size": 64},
    "minimax_m3_vl_text": {"intermediate_size": 64, "shared_intermediate_size": 64},
}
"""Families with indexers, of fewer tokens than prompts have, and such sizes."""
OTHER_MLPS = {"arcee": {}, "nemotron": {}}
"""Families of which the MLPs of fused layers stay."""


def latents(family: str, folder: Path) -> Path:
    """Write a checkpoint of a family of these tables: each has heads of 16 numbers."""
    row = next(each for each in MATRIX if each.model_type == family and not each.variant)
    settings = {**row.settings, **(LATENTS | INDEXED | OTHER_MLPS)[family]}
    build(tiny_config(replace(row, settings=settings))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", LATENTS)
def test_heads_are_divided_and_latents_are_kept_by_each_rank(
    two_ranks: DividedWorker, two_stages: DividedWorker, folder: Path, family: str
) -> None:
    checkpoint = latents(family, folder / f"latents {family}")
    alone, facts = load_alone(checkpoint)
    expected, served = a_busy_hour(alone), serve(alone, facts, SWAP)
    of_ranks = load_divided(two_ranks, checkpoint)
    check_busy_hour(two_ranks, expected)
    assert of_ranks.kv_cache_bytes == facts.kv_cache_bytes
    of_stages = load_divided(two_stages, checkpoint)
    assert serve(two_stages, of_stages, SWAP) == served


@pytest.mark.parametrize("family", INDEXED)
def test_each_rank_makes_the_whole_choice_of_keys_for_its_own_heads(
    two_ranks: DividedWorker, two_stages: DividedWorker, folder: Path, family: str
) -> None:
    checkpoint = latents(family, folder / f"indexed {family}")
    compare(two_ranks, checkpoint)
    with pytest.raises(StartupError, match="layers that choose their keys, which stages do not divide yet"):
        load_divided(two_stages, checkpoint)


@pytest.mark.parametrize("family", OTHER_MLPS)
def test_gates_of_an_mlp_that_stays_are_divided(two_ranks: DividedWorker, folder: Path, family: str) -> None:
    compare(two_ranks, latents(family, folder / f"MLPs of {family}"))


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_what_expands_latents_becomes_numbers_before_it_is_divided(
    two_ranks: DividedWorker, folder: Path, tmp_path: Path, name: str
) -> None:
    quantize(latents("deepseek_v3", folder / f"plain {name}"), tmp_path / name, name)
    compare(two_ranks, tmp_path / name)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_stages_have_the_states_of_their_layers(two_stages: DividedWorker, folder: Path, family: str) -> None:
    """Stages of different sizes, of which one has more layers that attend beside its states."""
    layers = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
    sizes = {"num_hidden_layers": len(layers), "layer_types": layers, **OVERRIDES.get(family, {})}
    checkpoint = make_checkpoint(family, folder / f"stages of {family}", **sizes)
    alone, facts = load_alone(checkpoint)
    expected = a_busy_hour(alone), {mode: serve(alone, facts, mode) for mode in (RECOMPUTE, SWAP)}
    of_stages = load_divided(two_stages, checkpoint)
    check_busy_hour(two_stages, expected[0])
    assert {mode: serve(two_stages, of_stages, mode) for mode in (RECOMPUTE, SWAP)} == expected[1]


def test_the_built_in_model_is_divided_too(two_ranks: DividedWorker) -> None:
    compare(two_ranks, DEMO_MODEL)


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


@pytest.mark.parametrize("kind", FORMATS, ids=" ".join)
def test_a_quantized_checkpoint_is_divided_between_its_groups(
    two_ranks: DividedWorker, tmp_path: Path, kind: tuple[str, str]
) -> None:
    compare(two_ranks, write_quantized(*kind, tmp_path)[0])


@pytest.mark.parametrize(
    "rounding", [{"quantization": "int4", "quantize_head": "int8"}, {"quantization": "fp8"}]
)
def test_ranks_cut_the_rounded_numbers_of_one_process(
    two_ranks: DividedWorker, folder: Path, rounding: dict[str, str]
) -> None:
    checkpoint = make_checkpoint("llama", folder / "rounded", intermediate_size=128)
    config = replace(config_of(checkpoint), **rounding)
    alone = Worker(config)
    alone.load(lambda _progress: None)
    two_ranks.load(replace(config, num_ranks=2))
    check_busy_hour(two_ranks, a_busy_hour(alone))


@pytest.mark.parametrize("overrides", HEADS.values(), ids=HEADS)
def test_ranks_share_kv_heads_or_divide_them(
    two_ranks: DividedWorker, folder: Path, overrides: dict[str, int | bool]
) -> None:
    name = f"heads-{overrides['num_key_value_heads']}"
    compare(two_ranks, make_checkpoint("llama", folder / name, **overrides))


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt2", {}, "0 of 3 layers fused; as they were: it consists of ln_1, attn"),
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
        ("gpt2", {}, "--pipeline-parallel-size 2 does not fit this model: .* 0 of 3 layers fused"),
        ("qwen3_5_text", {}, "a stage would have recurrent layers alone"),
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


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_ranks_verify_drafts_and_sample_the_tokens_of_one(
    two_ranks: DividedWorker, folder: Path, family: str
) -> None:
    checkpoint = make_checkpoint(family, folder / f"drafted {family}", **OVERRIDES.get(family, {}))
    expected = Speculated(*load_alone(checkpoint)).answers(TINY_REQUESTS)
    speculation = SpeculationConfig(method=DraftMethod.SUFFIX)
    facts = two_ranks.load(replace(config_of(checkpoint), num_ranks=2, speculation=speculation))
    assert facts.max_drafts == speculation.num_speculative_tokens
    world = Speculated(two_ranks, facts, {"num_blocks": 7})  # type: ignore[arg-type]
    for guess in (oracle(expected, 4), half_right(expected, Random(1), facts.vocab_size)):
        found = world.answers(TINY_REQUESTS, guess)
        assert [each[::2] for each in found] == [each[::2] for each in expected]
    assert 0 < world.num_accepted < world.num_drafted
    assert world.num_preemptions


def test_drafts_are_refused_by_stages(two_stages: DividedWorker, folder: Path) -> None:
    config = replace(config_of(make_checkpoint("llama", folder / "no drafts")), num_stages=2)
    with pytest.raises(StartupError, match="--speculative-config: stages verify no drafts yet"):
        two_stages.load(replace(config, speculation=SpeculationConfig(method=DraftMethod.SUFFIX)))
