"""Plans for a pipeline: each stage has one, as long as there is work."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SamplingParams, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence

STEP_S, TOKEN_S = 5e-3, 2e-5
"""A step of a stage takes this, and so much more for each token: its weights are fetched once."""


class Pipeline:
    """Stages that take the same time for a plan, driven as the engine's loop drives them."""

    def __init__(self, num_stages: int, **options: int) -> None:
        settings_ = {"num_blocks": 4000, "max_num_seqs": 64, "max_num_batched_tokens": 512, **options}
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=16,
                max_model_len=2048,
                num_stages=num_stages,
                max_plans_in_flight=num_stages + 1 if num_stages > 1 else 1,
                **settings_,
            )
        )
        self.now_s = 0.0
        self.busy_s = 0.0
        """Busy seconds of the first stage."""
        self.num_empty = 0
        """Empty plans while some sequence could have had a share."""
        self._free_s = [0.0] * num_stages
        self._under_way: deque[tuple[SchedulerOutput, float]] = deque()
        self._num_added = 0

    def add(self, num_prompt_tokens: int, num_tokens: int) -> None:
        number = self._num_added = self._num_added + 1
        prompt = tuple(number * 31 + place for place in range(num_prompt_tokens))
        params = SamplingParams(max_tokens=num_tokens)
        self.scheduler.add_request(Sequence(SequenceId(number), prompt, params), now_s=self.now_s)

    def turn(self) -> None:
        in_flight = {
            share.sequence_id for plan, _ in self._under_way for share in plan.scheduled if share.samples
        }
        can_run = any(
            seq.num_uncomputed_tokens > 0 and seq.sequence_id not in in_flight and self._has_room(seq)
            for seq in self.scheduler.running_sequences()
        )
        plan = self.scheduler.schedule(now_s=self.now_s)
        assert not in_flight.intersection(share.sequence_id for share in plan.scheduled)
        if plan.is_empty:
            self.num_empty += can_run
        else:
            self._under_way.append((plan, self._compute(plan)))
        if self._under_way and (plan.is_empty or not self.scheduler.can_schedule):
            oldest, ready_s = self._under_way.popleft()
            self.now_s = max(self.now_s, ready_s)
            tokens = {share.sequence_id: (5,) for share in oldest.scheduled if share.samples}
            result = ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={})
            self.scheduler.update_from_output(oldest, result)

    def _has_room(self, seq: Sequence) -> bool:
        """Whether its next token has a slot: else the last in rank gives way, perhaps the sequence itself."""
        pool = self.scheduler.kv.pool
        return pool.num_free > 0 or seq.num_computed_tokens < seq.num_slots

    def _compute(self, plan: SchedulerOutput) -> float:
        """Return when the last stage is done. The first one computes in the loop itself."""
        took_s = STEP_S + TOKEN_S * plan.num_scheduled_tokens
        self.busy_s += took_s
        done_s = self.now_s
        for stage, free_s in enumerate(self._free_s):
            done_s = max(done_s, free_s) + took_s
            self._free_s[stage] = done_s
            if stage == 0:
                self.now_s = done_s
        return done_s


def utilisation(pipeline: Pipeline, refill: Callable[[], None], *, seconds: float) -> float:
    """Share of the time that the first stage works, after a start that is not counted."""
    while pipeline.now_s < seconds / 4:
        refill()
        pipeline.turn()
    started_s, before_s = pipeline.now_s, pipeline.busy_s
    while pipeline.now_s < started_s + seconds:
        refill()
        pipeline.turn()
    return (pipeline.busy_s - before_s) / (pipeline.now_s - started_s)


@pytest.mark.night
@pytest.mark.parametrize(
    ("num_running", "num_prompt_tokens"), [(16, 8), (16, 1000), (17, 100), (23, 1000), (32, 8), (64, 100)]
)
def test_four_equal_stages_work_most_of_the_time(num_running: int, num_prompt_tokens: int) -> None:
    pipeline = Pipeline(4)
    lengths = iter(range(10**9))

    def refill() -> None:
        while sum(pipeline.scheduler.get_request_counts()[:2]) < num_running:
            pipeline.add(num_prompt_tokens, 100 + next(lengths) % 57)

    assert utilisation(pipeline, refill, seconds=20.0) >= 0.9
    assert pipeline.num_empty == 0


def test_a_long_prompt_is_in_all_stages_at_once() -> None:
    pipeline = Pipeline(4, max_num_batched_tokens=256)
    pipeline.add(2000, 2)
    plans = []
    for _ in range(4):
        plans.append(pipeline.scheduler.schedule(now_s=0.0))
    assert all(plan.num_scheduled_tokens == 64 for plan in plans)


def test_a_plan_takes_a_stages_part_of_the_decodes_and_the_next_one_the_others() -> None:
    pipeline = Pipeline(2, max_num_batched_tokens=4096)
    for _ in range(6):
        pipeline.add(8, 100)
    first = pipeline.scheduler.schedule(now_s=0.0)
    assert len(first.scheduled) == 6
    tokens = {share.sequence_id: (5,) for share in first.scheduled}
    pipeline.scheduler.update_from_output(
        first, ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={})
    )
    one, other = (pipeline.scheduler.schedule(now_s=0.0) for _ in range(2))
    groups = [{share.sequence_id for share in plan.scheduled} for plan in (one, other)]
    assert [len(group) for group in groups] == [3, 3]
    assert not groups[0] & groups[1]
    assert pipeline.scheduler.schedule(now_s=0.0).is_empty


@given(
    num_stages=st.integers(2, 5),
    num_blocks=st.integers(30, 120),
    arrivals=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40), st.integers(0, 3)), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_no_plan_is_empty_while_a_sequence_could_have_a_share(
    num_stages: int, num_blocks: int, arrivals: list[tuple[int, int, int]]
) -> None:
    pipeline = Pipeline(num_stages, num_blocks=num_blocks, max_num_batched_tokens=64, max_num_seqs=16)
    for num_prompt_tokens, num_tokens, num_turns in arrivals:
        pipeline.add(num_prompt_tokens, num_tokens)
        for _ in range(num_turns):
            pipeline.turn()
    for _ in range(20_000):
        if not pipeline.scheduler.has_unfinished_requests:
            break
        pipeline.turn()
    assert not pipeline.scheduler.has_unfinished_requests
    assert pipeline.num_empty == 0
    assert pipeline.scheduler.stats().num_stalls == 0
