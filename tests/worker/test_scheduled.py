"""Scheduler and worker together, over a cache so small that blocks are copied, given up and found again."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind, num_tables
from scheduler.config import SchedulerConfig
from scheduler.messages import BlockId, NewSequence, NewTable, ScheduledSequence, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence
from tests.invariants import check_invariants
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import GREEDY
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.model import layer_shards
from worker.worker import Worker
from worker.worker_config import ModelFacts

SYSTEM = [(7 * index + 3) % 300 for index in range(25)]
STRANGER = [(13 * index + 1) % 300 for index in range(45)]
SHORT = [(11 * index + 5) % 300 for index in range(11)]


@dataclass
class Served:
    """A real worker, and a scheduler that may be told of fewer blocks than there are."""

    worker: Worker
    facts: ModelFacts
    changes: dict[str, int] = field(default_factory=dict)
    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings: dict[str, Any] = {
            "num_blocks": 15 * num_tables(self.facts.groups),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": self.facts.max_model_len,
            "watermark": 0.0,
            "num_host_blocks": self.facts.num_host_blocks,
            "groups": self.facts.groups,
        }
        self.scheduler = Scheduler(SchedulerConfig(**(settings | self.changes)))

    def add(self, number: int, prompt: list[int]) -> None:
        self.scheduler.add_request(make_sequence(number, prompt, max_tokens=NUM_TOKENS), now_s=0.0)
        self.tokens[SequenceId(number)] = []

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(now_s=0.0)
        result = self.worker.execute(plan)
        assert not result.failures
        for output in self.scheduler.update_from_output(plan, result).get(0, []):
            self.tokens[output.sequence_id] += output.token_ids
        check_invariants(self.scheduler)
        return plan

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests:
            self.step()

    def generate(self, number: int, prompt: list[int]) -> list[int]:
        """Tokens of a prompt that is alone."""
        self.add(number, prompt)
        self.run()
        return self.tokens[SequenceId(number)]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def folder(request: pytest.FixtureRequest, checkpoints: MakeCheckpoint) -> Path:
    return checkpoints(request.param)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Worker, ModelFacts]:
    return load_worker(folder, num_blocks=60, swap_space_bytes=1 << 20)


def test_a_prefix_that_went_to_the_host_gives_the_same_tokens_and_is_not_computed_again(
    folder: Path, loaded: tuple[Worker, ModelFacts]
) -> None:
    served = Served(*loaded)
    first, second = [*SYSTEM, 5], [*SYSTEM, 6, 7]
    assert served.generate(1, first) == expected(folder, tuple(first))
    served.generate(2, STRANGER)
    assert served.generate(3, second) == expected(folder, tuple(second))
    stats = served.scheduler.stats()
    assert stats.num_prefix_host_hits >= 8
    assert stats.num_prefix_hits == 24, "all full blocks of the prompt"


def test_a_sibling_that_gets_a_copy_of_the_tail_draws_the_same_tokens(
    folder: Path, loaded: tuple[Worker, ModelFacts]
) -> None:
    served = Served(*loaded)
    served.add(1, SHORT)
    served.step()
    served.add(2, SHORT)
    plan = served.step()
    assert [share.num_tokens for share in plan.scheduled] == [1, 1]
    assert len(plan.copies) == num_tables(served.facts.groups)
    served.run()
    for number in (1, 2):
        assert served.tokens[SequenceId(number)] == expected(folder, tuple(SHORT))


def test_windows_of_layers_are_reported(checkpoints: MakeCheckpoint) -> None:
    lifetimes = {
        name: {group.lifetime for group in load_worker(checkpoints(name))[1].groups}
        for name in ("mistral", "gemma2", "llama")
    }
    window = Lifetime(LifetimeKind.WINDOW, 12)
    assert lifetimes == {"mistral": {window}, "gemma2": {ALL_TOKENS, window}, "llama": {ALL_TOKENS}}


@pytest.mark.parametrize("max_num_batched_tokens", [8, 17])
def test_a_windowed_model_answers_the_same_in_a_cache_that_holds_the_window_only(
    checkpoints: MakeCheckpoint, max_num_batched_tokens: int
) -> None:
    folder = checkpoints("mistral")
    worker, facts = load_worker(folder, num_blocks=9, max_num_batched_tokens=max_num_batched_tokens)
    assert facts.max_model_len == 512, "far more than the 36 tokens that the cache holds"
    served = Served(worker, facts, {"num_blocks": 9, "max_num_batched_tokens": max_num_batched_tokens})
    prompts = [STRANGER, SYSTEM, SHORT]
    for number, prompt in enumerate(prompts):
        served.add(number, prompt)
    served.run()
    for number, prompt in enumerate(prompts):
        assert served.tokens[SequenceId(number)] == expected(folder, tuple(prompt))
    hit = [*STRANGER[:40], 9]
    assert served.generate(9, hit) == expected(folder, tuple(hit))


def test_windows_beside_full_layers_give_the_tokens_of_one_group_of_blocks(
    checkpoints: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompts, cut, decoded, preempted and found again, with the tokens of one group of blocks."""
    folder = checkpoints("gemma2")
    prompts = [[(7 * index + number) % 300 for index in range(90 + number)] for number in range(3)]

    def serve() -> tuple[list[list[int]], int]:
        worker, facts = load_worker(folder, num_blocks=70, max_num_batched_tokens=8)
        served = Served(worker, facts, {"num_blocks": 70, "max_num_batched_tokens": 8})
        for number, prompt in enumerate(prompts):
            served.add(number, prompt)
        served.run()
        again = served.generate(9, [*prompts[0], 5])
        tokens = [served.tokens[SequenceId(number)] for number in range(len(prompts))]
        return [*tokens, again], num_tables(facts.groups)

    grouped_tokens, num_stripes = serve()
    assert num_stripes > 1
    monkeypatch.setattr(layer_shards, "grouped", lambda layout, longest: layout)
    one_group_tokens, num_stripes = serve()
    assert num_stripes == 1
    assert grouped_tokens == one_group_tokens
    assert grouped_tokens[0] == expected(folder, tuple(prompts[0]))


def windowed_plan(start: int, table: NewTable) -> SchedulerOutput:
    """The rest of a prompt of 20 tokens, of which the first blocks may have been passed."""
    new = NewSequence(
        sequence_id=SequenceId(1),
        token_ids=tuple(range(10, 30)),
        num_prompt_tokens=20,
        params=GREEDY,
        tables=(table,),
    )
    share = ScheduledSequence(SequenceId(1), start, 20 - start, samples=True)
    return SchedulerOutput(
        step=0,
        released=(),
        new_sequences=(new,),
        new_blocks={},
        scheduled=(share,),
        num_scheduled_tokens=share.num_tokens,
    )


@pytest.mark.parametrize(
    ("family", "start", "blocks", "reason"),
    [
        ("mistral", 19, (3, 4, 5), None),
        ("mistral", 18, (3, 4, 5), "scheduled from position 18, but its blocks begin at 8"),
        ("mistral", 19, (0, 4, 5), "a block outside of 1 to"),
        ("llama", 19, (3, 4, 5), "scheduled from position 19, but its blocks begin at 8"),
    ],
)
def test_a_plan_that_would_read_what_the_window_has_passed_fails(
    checkpoints: MakeCheckpoint, family: str, start: int, blocks: tuple[int, ...], reason: str | None
) -> None:
    worker, _ = load_worker(checkpoints(family), num_blocks=9)
    failures = worker.execute(windowed_plan(start, NewTable(tuple(map(BlockId, blocks)), 2))).failures
    assert bool(failures) == bool(reason)
    assert (reason or "") in failures.get(SequenceId(1), "")
