"""A model on two processes samples the tokens that it samples on one, whatever happens to its sequences."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from scheduler.messages import SamplingParams, TokenLogprobs
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.plan_driver import GREEDY, PlanDriver
from tests.worker.ranks.divided import DividedWorker
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Speculated, half_right, oracle
from worker.worker import Worker
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import StartupError

PROMPT = [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, presence_penalty=0.5)
SCORED = replace(GREEDY, num_prompt_logprobs=2, num_logprobs=2)
KV_HEADS = {"one KV head": 1, "a KV head for each query head": 4}
FAMILIES = (
    *("llama", "llama3_rope", "dynamic_rope", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"),
    *("phi3", "phi3_longrope", "mixtral", "qwen3_moe"),
)
FORMATS = (
    *(("llama", name) for name in ("int4", "int4 by channel", "int8", "float8", "awq", "fp8")),
    ("mixtral", "int4"),
)
OVERRIDES = {"qwen3_moe": {"moe_intermediate_size": 64}}
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[DividedWorker]:
    worker = DividedWorker(2)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def two_by_gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DividedWorker]:
    worker = DividedWorker(2, store=tmp_path_factory.mktemp("gloo") / "store")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


def config_of(checkpoint: Path, num_ranks: int) -> WorkerConfig:
    return WorkerConfig(
        model_path=str(checkpoint),
        dtype="float32",
        device="cpu",
        num_threads=1,
        block_size=BLOCK_SIZE,
        num_blocks=200,
        max_num_seqs=8,
        swap_space_bytes=1 << 20,
        num_ranks=num_ranks,
    )


def a_busy_hour(driver: PlanDriver) -> tuple[list[list[int]], list[TokenLogprobs]]:
    """Chunks of a prompt, three seeds over one prefix, both kinds of preemption, and a scored prompt."""
    greedy = driver.add([*PROMPT, 5, 6, 7])
    driver.step({greedy: 6})
    driver.step({greedy: 5})
    driver.generate([greedy], 3)
    others = [driver.add([*PROMPT, 9], replace(SEEDED, seed=seed), shares_with=greedy) for seed in range(3)]
    everyone = [greedy, *others]
    driver.generate(everyone, 6)
    driver.preempt(others[0])
    driver.swap_out(others[1])
    driver.generate([greedy, others[2]], 9)
    driver.generate(everyone, NUM_TOKENS)
    scored = driver.add(PROMPT[::-1], SCORED)
    first, second = driver.step({scored: 4}), driver.step({scored: None})
    logprobs = [entry for part in (first, second) for each in part.prompt_logprobs.values() for entry in each]
    return [driver.generated(each) for each in (*everyone, scored)], logprobs


def compare(two_ranks: DividedWorker, checkpoint: Path) -> None:
    alone = Worker(config_of(checkpoint, 1))
    alone.load(lambda _progress: None)
    expected, expected_logprobs = a_busy_hour(PlanDriver(alone, BLOCK_SIZE))
    two_ranks.load(config_of(checkpoint, 2))
    found, found_logprobs = a_busy_hour(PlanDriver(two_ranks, BLOCK_SIZE))  # type: ignore[arg-type]
    assert found == expected
    assert all(len(token_ids) >= 1 for token_ids in expected)
    assert len(expected_logprobs) == len(PROMPT) - 1
    for ours, theirs in zip(found_logprobs, expected_logprobs, strict=True):
        assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_sample_the_tokens_of_one(two_ranks: DividedWorker, folder: Path, family: str) -> None:
    checkpoint = make_checkpoint(family, folder / family, **OVERRIDES.get(family, {}))
    compare(two_ranks, checkpoint)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_our_exchange_gives_the_bits_of_gloos(
    two_ranks: DividedWorker, two_by_gloo: DividedWorker, folder: Path, family: str
) -> None:
    config = config_of(make_checkpoint(family, folder / f"{family} by gloo"), 2)
    for worker in (two_ranks, two_by_gloo):
        worker.load(config)
    ours, gloos = (a_busy_hour(PlanDriver(each, BLOCK_SIZE)) for each in (two_ranks, two_by_gloo))  # type: ignore[arg-type]
    assert ours == gloos


@pytest.mark.parametrize(("family", "name"), FORMATS, ids=" ".join)
def test_a_quantized_checkpoint_is_divided_between_its_groups(
    two_ranks: DividedWorker, tmp_path: Path, family: str, name: str
) -> None:
    compare(two_ranks, write_quantized(family, name, tmp_path)[0])


@pytest.mark.parametrize(
    "rounding", [{"quantization": "int8"}, {"quantization": "int4"}, {"quantize_head": "int8"}]
)
def test_shards_are_rounded_too(two_ranks: DividedWorker, folder: Path, rounding: dict[str, str]) -> None:
    checkpoint = make_checkpoint("llama", folder / "rounded", intermediate_size=128)
    two_ranks.load(replace(config_of(checkpoint, 2), **rounding))
    driver = PlanDriver(two_ranks, BLOCK_SIZE)  # type: ignore[arg-type]
    driver.generate([driver.add(PROMPT)], NUM_TOKENS)


@pytest.mark.parametrize("num_heads", KV_HEADS.values(), ids=KV_HEADS)
def test_ranks_share_kv_heads_or_divide_them(two_ranks: DividedWorker, folder: Path, num_heads: int) -> None:
    checkpoint = make_checkpoint("llama", folder / f"heads-{num_heads}", num_key_value_heads=num_heads)
    compare(two_ranks, checkpoint)


def test_a_bias_is_added_once(two_ranks: DividedWorker, folder: Path) -> None:
    compare(two_ranks, make_checkpoint("llama", folder / "bias", attention_bias=True))


def test_a_tied_embedding_is_divided_too(two_ranks: DividedWorker, folder: Path) -> None:
    compare(two_ranks, make_checkpoint("llama", folder / "tied", tie_word_embeddings=True))


def test_each_rank_keeps_its_part_of_the_cache(two_ranks: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("llama", folder / "llama")
    alone = Worker(config_of(checkpoint, 1)).load(lambda _progress: None)
    facts = two_ranks.load(config_of(checkpoint, 2))
    assert facts.num_blocks == alone.num_blocks
    assert facts.kv_cache_bytes * 2 == alone.kv_cache_bytes
    assert facts.num_host_blocks == alone.num_host_blocks


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "0 of 0 layers fused"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused_with_the_reason(
    two_ranks: DividedWorker, folder: Path, family: str, reason: str
) -> None:
    checkpoint = make_checkpoint(family, folder / family)
    with pytest.raises(StartupError, match=reason):
        two_ranks.load(config_of(checkpoint, 2))


def test_permuted_inputs_are_refused(two_ranks: DividedWorker, tmp_path: Path) -> None:
    checkpoint, _ = write_quantized("llama", "gptq", tmp_path)
    with pytest.raises(StartupError, match="permuted inputs cannot be cut"):
        two_ranks.load(config_of(checkpoint, 2))


def test_experts_that_do_not_divide_are_refused(two_ranks: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("mixtral", folder / "uneven", intermediate_size=80)
    with pytest.raises(StartupError, match="its experts have 80 gates, no multiple of 2 ranks times 16"):
        two_ranks.load(config_of(checkpoint, 2))


def test_ranks_verify_drafts_and_sample_the_tokens_of_one(two_ranks: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("llama", folder / "drafted")
    alone = Worker(config_of(checkpoint, 1))
    expected = Speculated(alone, alone.load(lambda _progress: None)).answers(TINY_REQUESTS)
    speculation = SpeculationConfig(method=DraftMethod.SUFFIX)
    facts = two_ranks.load(replace(config_of(checkpoint, 2), speculation=speculation))
    assert facts.max_drafts == speculation.num_speculative_tokens
    world = Speculated(two_ranks, facts, {"num_blocks": 7})  # type: ignore[arg-type]
    for guess in (oracle(expected, 4), half_right(expected, Random(1), 335)):
        found = world.answers(TINY_REQUESTS, guess)
        assert [each[::2] for each in found] == [each[::2] for each in expected]
    assert 0 < world.num_accepted < world.num_drafted
    assert world.num_preemptions


def test_a_draft_model_is_not_divided(two_ranks: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint("llama", folder / "with a draft model")
    drafting = SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=str(checkpoint))
    with pytest.raises(StartupError, match="--speculative-config: a draft model is not divided over ranks"):
        two_ranks.load(replace(config_of(checkpoint, 2), speculation=drafting))


def test_heads_that_do_not_divide_are_refused(two_ranks: DividedWorker, folder: Path) -> None:
    checkpoint = make_checkpoint(
        "llama", folder / "three", num_attention_heads=3, num_key_value_heads=3, hidden_size=48
    )
    with pytest.raises(StartupError, match="its 3 KV heads cannot be divided by 2"):
        two_ranks.load(config_of(checkpoint, 2))
