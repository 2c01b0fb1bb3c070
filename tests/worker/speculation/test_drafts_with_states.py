"""Families with states give with drafts the tokens that they give without any."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.config import PreemptionMode
from scheduler.messages import SamplingParams, SchedulerOutput
from tests.checkpoints import RECURRENT_FAMILIES
from tests.properties.lengths import SAME_EACH_TIME
from tests.tiers import by_day
from tests.worker.conftest import MakeCheckpoint, load_worker
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import (
    Answer,
    ModelDrafted,
    Speculated,
    half_right,
    nonsense,
    oracle,
)
from tests.worker.speculation.test_verification import Loaded
from worker.attention.interface import num_layers_begun
from worker.steps.protocol import LaunchedStep
from worker.worker_config import DraftMethod, SpeculationConfig
from worker.worker_errors import StartupError

SHARED = [(7 * index + 3) % 300 for index in range(21)]
NUM_ROWS = 8


def requests_of(random: Random, num: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests with own prompts, and some with one of a few beginnings; every fourth comes four times."""
    requests: list[tuple[list[int], SamplingParams]] = []
    while len(requests) < num:
        prompt, params = random.choice(TINY_REQUESTS)
        if random.random() < 0.6:
            prompt = [*SHARED[: random.choice((8, 12, 21))], *prompt]
        times = 4 if random.random() < 0.25 else 1
        requests += [(prompt, replace(params, seed=random.getrandbits(32))) for _ in range(times)]
    return requests[:num]


def check_same_tokens(expected: list[Answer], found: list[Answer]) -> None:
    """Log-probabilities of mixtures may differ in the last bit: torch's functions depend on the batch."""
    for one, other in zip(expected, found, strict=True):
        assert (one[0], one[2]) == (other[0], other[2])


@pytest.fixture(scope="module", params=by_day(RECURRENT_FAMILIES, ("qwen3_next", "mamba")))
def loaded(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Loaded:
    return load_worker(
        checkpoints(request.param), num_blocks=400, swap_space_bytes=1 << 24, max_num_seqs=NUM_ROWS
    )


def test_tokens_are_the_same_with_any_drafts(loaded: Loaded) -> None:
    random = Random(3)
    requests = requests_of(random, 10)
    world = Speculated(*loaded)
    expected = world.answers(requests)
    vocab_size = loaded[1].vocab_size
    check_same_tokens(expected, world.answers(requests, oracle(expected, 5)))
    assert world.num_accepted > 20
    check_same_tokens(expected, world.answers(requests, half_right(expected, random, vocab_size)))
    check_same_tokens(expected, world.answers(requests, nonsense(random, vocab_size)))


def test_a_step_with_drafts_counts_each_layer_as_any_step_does(checkpoints: MakeCheckpoint) -> None:
    """A slow step would look as if it hung."""

    class Counted(Speculated):
        def _launch(self, plan: SchedulerOutput) -> LaunchedStep:
            before = num_layers_begun()
            launched = super()._launch(plan)
            num_begun[bool(plan.draft_token_ids)].add(num_layers_begun() - before)
            return launched

    num_begun: dict[bool, set[int]] = {False: set(), True: set()}
    world = Counted(*load_worker(checkpoints("qwen3_5_text"), num_blocks=400))
    requests = requests_of(Random(5), 2)
    world.answers(requests, oracle(world.answers(requests), 3))
    assert num_begun[False] == num_begun[True] != {0}


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_sequence_that_is_preempted_among_drafts_goes_on_from_its_state(
    loaded: Loaded, mode: PreemptionMode
) -> None:
    random = Random(4)
    facts = loaded[1]
    requests = [
        (SHARED[random.randint(0, 9) :], replace(params, max_tokens=16)) for _, params in TINY_REQUESTS * 2
    ]
    expected = Speculated(*loaded).answers(requests)
    num_blocks = 3 * facts.num_state_blocks + (16 if len(facts.groups) > 1 else 0)
    narrow = Speculated(*loaded, {"num_blocks": num_blocks, "preemption_mode": mode}, next_id=1000)
    check_same_tokens(expected, narrow.answers(requests, half_right(expected, random, facts.vocab_size)))
    assert narrow.num_accepted > 0
    assert narrow.num_preemptions > 0 or len(facts.groups) == 1  # a state alone never grows


@settings(SAME_EACH_TIME, max_examples=12)
@given(
    seed=st.integers(0, 1 << 32),
    num_requests=st.integers(1, 7),
    spare_blocks=st.integers(8, 60),
    max_num_batched_tokens=st.integers(9, 40),
    mode=st.sampled_from(PreemptionMode),
    num_aborted=st.integers(0, 2),
)
def test_drafts_change_nothing_in_any_history(
    loaded: Loaded,
    seed: int,
    num_requests: int,
    spare_blocks: int,
    max_num_batched_tokens: int,
    mode: PreemptionMode,
    num_aborted: int,
) -> None:
    random, facts = Random(seed), loaded[1]
    requests = requests_of(random, num_requests)
    expected = Speculated(*loaded, next_id=random.getrandbits(40)).answers(requests)
    changes = {
        "num_blocks": 2 * facts.num_state_blocks + spare_blocks,
        "max_num_batched_tokens": max_num_batched_tokens,
        "preemption_mode": mode,
    }
    world = Speculated(*loaded, changes, next_id=random.getrandbits(40))
    aborted = frozenset(range(min(num_aborted, num_requests - 1)))
    found = world.answers(requests, half_right(expected, random, facts.vocab_size), aborted=aborted)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if number in aborted:
            assert other[0] == one[0][: len(other[0])]
        else:
            check_same_tokens([one], [other])


DRAFTED = (("qwen3_next", "llama"), ("qwen3_next", "qwen3_next"), ("mamba", "mamba"), ("lfm2", "qwen3_next"))
"""Pairs of a model and the one that drafts for it, of one tokenizer."""


@pytest.fixture(scope="module", params=by_day(DRAFTED, DRAFTED[1:2]), ids="-".join)
def drafted(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> tuple[Loaded, bool]:
    """A model with its draft model, and whether both are the same."""
    model, draft = request.param
    speculation = SpeculationConfig(
        method=DraftMethod.DRAFT_MODEL, model_path=str(checkpoints(draft)), num_speculative_tokens=4
    )
    options = {"num_blocks": 400, "swap_space_bytes": 1 << 24, "max_num_seqs": NUM_ROWS}
    return load_worker(checkpoints(model), speculation=speculation, **options), model == draft


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_blocks": 30, "preemption_mode": PreemptionMode.SWAP},
        {"num_blocks": 30, "preemption_mode": PreemptionMode.RECOMPUTE},
        {"max_num_batched_tokens": 9},
    ],
)
def test_a_model_with_states_that_drafts_for_itself_is_right_however_its_blocks_have_moved(
    drafted: tuple[Loaded, bool], changes: dict[str, object]
) -> None:
    loaded, is_itself = drafted
    num_states = loaded[1].num_state_blocks
    if "num_blocks" in changes:
        changes = changes | {"num_blocks": 3 * num_states + (18 if len(loaded[1].groups) > 1 else 0)}
    requests = [
        (SHARED[: 12 + place], SamplingParams(temperature=0.8 * (place % 2), seed=place, max_tokens=14))
        for place in (0, 1, 1, 4, 9)
    ]
    expected = ModelDrafted(*loaded, num_asked=0).answers(requests)
    world = ModelDrafted(*loaded, changes, num_asked=3, next_id=100)
    check_same_tokens(expected, world.answers(requests))
    assert world.num_drafted > 10
    assert not is_itself or world.num_accepted == world.num_drafted


def test_drafts_by_a_model_with_states_for_one_without_are_refused(checkpoints: MakeCheckpoint) -> None:
    speculation = SpeculationConfig(
        method=DraftMethod.DRAFT_MODEL, model_path=str(checkpoints("lfm2")), num_speculative_tokens=2
    )
    with pytest.raises(StartupError, match="the draft model has recurrent layers and the model none"):
        load_worker(checkpoints("llama"), speculation=speculation)
