"""Families with recurrent layers give in batches what transformers gives for each sequence alone."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.checkpoints import RECURRENT_FAMILIES
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.load import recurrent_functions
from worker.worker import Worker
from worker.worker_config import ModelFacts
from worker.worker_errors import StartupError

LONG = [(7 * index + 3) % 300 for index in range(29)]
SHORT = [40, 41, 42, 43, 44]
OTHER = [(11 * index + 5) % 300 for index in range(17)]

DELTA_RULE, KDA, SCAN = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"
FUNCTIONS = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"), DELTA_RULE),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), KDA),
    **dict.fromkeys(("granitemoehybrid", "nemotron_h", "falcon_h1", "bamba", "mamba2"), SCAN),
    **dict.fromkeys(("jamba", "falcon_mamba", "mamba"), "mamba_selective_scan"),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "causal_conv1d_fn"),
}
"""Names of the recurrence of each family in transformers."""


@pytest.fixture(scope="module", params=RECURRENT_FAMILIES)
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Worker, ModelFacts]:
    return load_worker(folder, swap_space_bytes=1 << 24)


@pytest.fixture
def driver(loaded: tuple[Worker, ModelFacts]) -> Iterator[PlanDriver]:
    driver = PlanDriver(loaded[0], BLOCK_SIZE)
    yield driver
    driver.release_all()


def test_neighbours_chunks_and_a_preemption_change_nothing(folder: Path, driver: PlanDriver) -> None:
    first, chunked, victim = (driver.add(prompt) for prompt in (SHORT, LONG, OTHER))
    driver.step({first: None, victim: None})
    for num_tokens in (6, 1, 13):
        driver.step({first: None, chunked: num_tokens, victim: None})
    driver.preempt(victim)
    driver.step({first: None})
    driver.generate([first, chunked, victim], NUM_TOKENS)
    for sequence, prompt in ((first, SHORT), (chunked, LONG), (victim, OTHER)):
        assert driver.generated(sequence)[:NUM_TOKENS] == expected(folder, tuple(prompt))


def test_a_state_begins_from_zero_where_another_sequence_had_its_own(
    folder: Path, driver: PlanDriver
) -> None:
    for prompt in (LONG, OTHER, SHORT):
        driver.restart_blocks()
        sequence = driver.add(prompt)
        driver.generate([sequence], NUM_TOKENS)
        assert driver.generated(sequence) == expected(folder, tuple(prompt))
        driver.release_all()


def test_a_state_travels_to_the_host_and_back(folder: Path, driver: PlanDriver) -> None:
    victim, other = driver.add(LONG), driver.add(OTHER)
    for _ in range(4):
        driver.step({victim: None, other: None})
    driver.swap_out(victim)
    third = driver.add(SHORT)  # takes the blocks that were left
    driver.step({other: None, third: None})
    driver.generate([victim, other, third], NUM_TOKENS)
    assert driver.generated(victim) == expected(folder, tuple(LONG))


def test_others_go_on_from_a_state_in_the_middle_of_a_prompt(folder: Path, driver: PlanDriver) -> None:
    owner = driver.add(LONG)
    for num_tokens in (14, 9):
        driver.step({owner: num_tokens})
    prompts = [[*LONG[:13], *SHORT], [*LONG[:22], *OTHER], [*LONG[:27], 7]]
    sharers = [driver.add(prompt, shares_with=owner) for prompt in prompts]
    driver.step({owner: None, sharers[0]: 2, sharers[1]: None})
    driver.generate([owner, *sharers], NUM_TOKENS)
    for sequence, prompt in zip((owner, *sharers), (LONG, *prompts), strict=True):
        assert driver.generated(sequence)[:NUM_TOKENS] == expected(folder, tuple(prompt))


def test_facts_count_the_blocks_of_a_state(loaded: tuple[Worker, ModelFacts]) -> None:
    facts = loaded[1]
    assert facts.num_state_blocks > 0
    assert facts.is_paged
    assert facts.max_drafts > 0


def test_a_cache_that_is_too_small_for_a_state_is_refused(checkpoints: MakeCheckpoint) -> None:
    with pytest.raises(StartupError, match=r"for a place of each group of layers"):
        load_worker(checkpoints("lfm2"), num_blocks=1)


def test_a_function_of_another_name_leaves_the_family_alone_and_the_log_says_so(
    checkpoints: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(recurrent_functions._FUNCTIONS, "causal_conv1d_fn")
    _, facts = load_worker(checkpoints("lfm2"))
    assert not facts.is_paged
    assert "has layers of type conv" in caplog.text


def test_transformers_has_the_functions_that_are_replaced() -> None:
    """A version that renames one computes its families one sequence after the other again."""
    lacking = []
    for family, name in FUNCTIONS.items():
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
        module = sys.modules[model_class.__module__]
        lacking += [(family, each) for each in {name, "causal_conv1d_fn"} if not hasattr(module, each)]
    assert not lacking


def test_bf16_gives_the_same_bits_however_a_prompt_is_cut(checkpoints: MakeCheckpoint) -> None:
    """Tokens drawn by seed are as sensitive as logits: one bit and a later draw falls elsewhere."""
    driver = PlanDriver(load_worker(checkpoints("qwen3_next"), dtype="bfloat16")[0], BLOCK_SIZE)
    outputs = []
    for cuts in ((), (1,), (6, 1, 13), (28,)):
        sequence = driver.add(LONG)
        for num_tokens in cuts:
            driver.step({sequence: num_tokens})
        driver.generate([sequence], NUM_TOKENS)
        outputs.append(driver.generated(sequence))
    assert all(torch.equal(torch.tensor(each), torch.tensor(outputs[0])) for each in outputs)
