"""Whatever the drafts are, tokens and log-probabilities are those of a run without any, bit for bit."""

from pathlib import Path
from random import Random

import pytest
import tokenizers

from scheduler.config import PreemptionMode
from scheduler.messages import SamplingParams
from tests.adapters import write_adapter
from tests.tiers import by_day
from tests.worker.adapters.test_adapted_models import LIMITS
from tests.worker.conftest import load_worker
from tests.worker.speculation.random_requests import random_request
from tests.worker.speculation.speculated import Answer, Speculated, half_right, nonsense, oracle
from worker.worker import Worker
from worker.worker_config import AdapterFolder, ModelFacts

DEMO = Path(__file__).parents[3] / "engine" / "demo_model"
EOS = 1
TOKENIZER = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))

Loaded = tuple[Worker, ModelFacts]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The demo model in bf16 on the CPU's kernels."""
    return load_worker(
        DEMO,
        dtype="bfloat16",
        num_blocks=200,
        block_size=8,
        max_num_seqs=8,
        swap_space_bytes=1 << 22,
        num_threads=2,
    )


def check_equal(expected: list[Answer], found: list[Answer]) -> None:
    for one, other in zip(expected, found, strict=True):
        assert other == one


@pytest.mark.parametrize("seed", by_day(range(6), range(3)))
def test_random_requests_get_the_same_tokens_and_logprobs_with_any_drafts(loaded: Loaded, seed: int) -> None:
    random = Random(seed)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(12)]
    world = Speculated(*loaded)
    expected = world.answers(requests)
    vocab_size = loaded[1].vocab_size
    check_equal(expected, world.answers(requests, oracle(expected, 5)))
    assert world.num_accepted > 20
    check_equal(expected, world.answers(requests, half_right(expected, random, vocab_size)))
    check_equal(expected, world.answers(requests, nonsense(random, vocab_size)))


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_drafts_change_nothing_where_sequences_are_preempted(loaded: Loaded, mode: PreemptionMode) -> None:
    random = Random(11)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(12)]
    expected = Speculated(*loaded).answers(requests)
    narrow = Speculated(*loaded, {"num_blocks": 14, "preemption_mode": mode}, next_id=1000)
    vocab_size = loaded[1].vocab_size
    check_equal(expected, narrow.answers(requests, half_right(expected, random, vocab_size)))
    assert narrow.num_preemptions > 0
    assert narrow.num_accepted > 0


def test_a_bad_word_whose_beginning_is_a_draft_is_not_sampled(loaded: Loaded) -> None:
    prompt = TOKENIZER.encode("one two three one two three one", add_special_tokens=False).ids
    world = Speculated(*loaded)
    ((plain, _, _),) = world.answers([(prompt, SamplingParams(temperature=0.0, max_tokens=12))])
    words = tuple((plain[place], plain[place + 1]) for place in range(3, 10, 2))
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=12, bad_words=words))]
    expected = world.answers(requests)
    assert expected[0][0] != plain
    check_equal(expected, world.answers(requests, oracle([(plain, [], None)], 6)))
    check_equal(expected, world.answers(requests, oracle(expected, 6)))


def test_an_abort_among_drafts_leaves_the_others_as_they_are(loaded: Loaded) -> None:
    random = Random(5)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(8)]
    world = Speculated(*loaded)
    expected = world.answers(requests)
    found = world.answers(requests, oracle(expected, 4), aborted=frozenset({1, 4}))
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if number in (1, 4):
            assert other[0] == one[0][: len(other[0])]
        else:
            assert other == one


def test_with_adapters_beside_the_base_drafts_change_nothing_either(tmp_path: Path) -> None:
    adapters = tuple(
        AdapterFolder(name, str(write_adapter(tmp_path / name, DEMO, seed=seed, rank=4, alpha=40)))
        for seed, name in enumerate("ab")
    )
    worker, facts = load_worker(
        DEMO,
        dtype="bfloat16",
        num_blocks=200,
        block_size=8,
        num_threads=2,
        adapter_limits=LIMITS,
        adapters=adapters,
    )
    random = Random(21)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(12)]
    settings = {"max_adapters": LIMITS.max_in_step}
    plain = Speculated(worker, facts, settings).answers(requests)
    identities = ["", *(each.identity for each in facts.adapters)]
    world = Speculated(worker, facts, settings, identities, next_id=100)
    expected = world.answers(requests)
    assert sum(one != other for one, other in zip(plain, expected, strict=True)) >= 6
    check_equal(expected, world.answers(requests, oracle(expected, 5)))
    assert world.num_accepted > 20
    check_equal(expected, world.answers(requests, half_right(expected, random, facts.vocab_size)))
