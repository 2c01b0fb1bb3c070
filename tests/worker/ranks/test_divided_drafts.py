"""Draft models and heads on several ranks guess what they guess on one, and change no answer."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from scheduler.config import PreemptionMode
from tests.checkpoints import make_checkpoint
from tests.tiers import by_day
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import OVERRIDES, config_of, load_alone
from tests.worker.speculation.draft_checkpoints import write_draft
from tests.worker.speculation.eagle_checkpoints import EagleOracle, write_eagle
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.speculated import ModelDrafted, Speculated
from tests.worker.speculation.test_draft_heads import MTP, Oracle, check_guesses
from tests.worker.speculation.test_draft_model import plain_requests
from tests.worker.speculation.test_drafts_with_states import check_same_tokens, requests_of
from tests.worker.speculation.test_verification import DEMO
from worker.worker_config import DraftMethod, ModelFacts, SpeculationConfig
from worker.worker_errors import StartupError

SIZES = {"moe_intermediate_size": 64}


def draft_of(folder: Path) -> SpeculationConfig:
    return SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=str(folder), num_speculative_tokens=4)


def load_drafted(two_ranks: DividedWorker, folder: Path, speculation: SpeculationConfig) -> ModelFacts:
    facts = two_ranks.load(replace(config_of(folder), num_ranks=2, speculation=speculation))
    assert facts.has_draft_model
    return facts


def check_answers(worker: DividedWorker, facts: ModelFacts, folder: Path, *, is_itself: bool) -> None:
    """Compare the tokens of one process without drafts under preemption, swap and cached prefixes."""
    requests = plain_requests(6) if folder == DEMO else requests_of(Random(5), 12)
    expected = Speculated(*load_alone(folder)).answers(requests)
    num_found = num_accepted = num_drafted = 0
    for place, mode in enumerate((PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)):
        changes = {"num_blocks": 20 + 3 * facts.num_state_blocks, "preemption_mode": mode}
        world = ModelDrafted(worker, facts, changes, num_asked=3, next_id=1000 * (1 + place))  # type: ignore[arg-type]
        check_same_tokens(expected, world.answers(requests))
        assert world.num_preemptions > 0
        num_found += world.num_found
        num_accepted, num_drafted = num_accepted + world.num_accepted, num_drafted + world.num_drafted
    assert num_found > 0
    assert 0 < num_accepted <= num_drafted
    assert (num_accepted == num_drafted) == is_itself


def of_draft_model(folder: Path) -> tuple[Path, SpeculationConfig, None]:
    return DEMO, draft_of(write_draft(folder / "four", DEMO, num_layers=4)), None


def of_recurrent_model(folder: Path) -> tuple[Path, SpeculationConfig, None]:
    target = make_checkpoint("qwen3_next", folder / "target", **SIZES | OVERRIDES["qwen3_next"])
    shutil.copy(DEMO / "tokenizer.json", target)
    return target, draft_of(target), None


def of_head(family: str) -> Callable[[Path], tuple[Path, SpeculationConfig, Oracle]]:
    def write(folder: Path) -> tuple[Path, SpeculationConfig, Oracle]:
        sizes = SIZES | OVERRIDES.get(family, {})
        if family == "qwen3_next":
            sizes = {**sizes, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
        target = write_head(folder / "head", make_checkpoint(family, folder / "plain", **sizes))
        return target, MTP, Oracle(target)

    return write


def of_eagle(folder: Path) -> tuple[Path, SpeculationConfig, EagleOracle]:
    target = make_checkpoint("llama", folder / "target", num_hidden_layers=5)
    head = write_eagle(folder / "eagle", target)
    return target, draft_of(head), EagleOracle(head, target)


DRAFTS = {
    "a draft model": of_draft_model,
    "a recurrent draft model": of_recurrent_model,
    **{family: of_head(family) for family in ("glm4_moe", "deepseek_v3", "qwen3_next")},
    "a head of EAGLE-3": of_eagle,
}


@pytest.mark.parametrize("name", by_day(DRAFTS, ("a draft model", "glm4_moe")))
def test_ranks_draft_as_one_process_and_sample_its_tokens(
    two_ranks: DividedWorker, tmp_path: Path, name: str
) -> None:
    folder, speculation, oracle = DRAFTS[name](tmp_path)
    facts = load_drafted(two_ranks, folder, speculation)
    if oracle is not None:
        check_guesses((two_ranks, facts), oracle)  # type: ignore[arg-type]
    check_answers(two_ranks, facts, folder, is_itself=speculation.model_path == str(folder))


def test_a_model_that_drafts_for_itself_is_right_on_ranks_however_its_blocks_have_moved(
    two_ranks: DividedWorker,
) -> None:
    facts = load_drafted(two_ranks, DEMO, draft_of(DEMO))
    requests = plain_requests(6)
    expected = Speculated(*load_alone(DEMO)).answers(requests)
    for place, mode in enumerate((PreemptionMode.SWAP, PreemptionMode.RECOMPUTE)):
        changes = {"num_blocks": 30, "preemption_mode": mode}
        world = ModelDrafted(two_ranks, facts, changes, num_asked=3, next_id=100 * (1 + place))  # type: ignore[arg-type]
        check_same_tokens(expected, world.answers(requests))
        assert world.num_preemptions > 0
        assert world.num_drafted > 40
        assert world.num_accepted == world.num_drafted


def test_what_ranks_cannot_divide_is_refused_by_name(two_ranks: DividedWorker, tmp_path: Path) -> None:
    target = make_checkpoint("llama", tmp_path / "target", num_hidden_layers=5)
    head = write_eagle(tmp_path / "eagle", target, num_gates=48)
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    draft = make_checkpoint("llama", tmp_path / "three heads", **sizes)
    for folder in (target, draft):
        shutil.copy(DEMO / "tokenizer.json", folder)
    refusals = {head: "eagle: .* does not fit .* 24", draft: "three heads: .* its 3 KV heads cannot"}
    for drafts, reason in refusals.items():
        with pytest.raises(StartupError, match=f"draft model .*{reason}"):
            load_drafted(two_ranks, target, draft_of(drafts))
