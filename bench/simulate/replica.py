"""One scheduler with a model whose only property is how long its steps take.

Owns: a step under way or a leap over several, and when each live request got its tokens.
Never: decides anything about scheduling: every plan is the scheduler's own.

The driver must cost little next to the scheduler, so nothing is done for each token of each step that the
interpreter cannot do in one call. The times between tokens are counted by step: a sequence with a token in
this step and in the one before has waited from the end of that one to the end of this one, and those
are nearly all.

A leap is planned ahead, up to the next step in which something is decided. A request that comes meanwhile
lands in the step that is then under way: so leaping and stepping give the same history.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from bench.simulate.fitting.fitted_step_time import Durations, LinearStepTime, variation_of
from bench.simulate.leaps.leaping_scheduler import LeapingScheduler
from bench.simulate.requests.arrivals import RequestUnderWay, SimRequest
from bench.simulate.simulated_drafts import NO_DRAFTS, DraftSource, SimulatedDrafts
from bench.simulate.tally import ClassTally, Slo
from scheduler.config import SchedulerConfig
from scheduler.draft_messages import DraftPasses
from scheduler.messages import (
    NO_INPUTS,
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceInputs,
    SequenceOutput,
    ServiceTerms,
)
from scheduler.scheduler import NeverFits
from scheduler.sequence import BlockTable, Sequence

_TOKEN_ID = 1
_TOKEN: tuple[int, ...] = (_TOKEN_ID,)
_BEGUN = SequenceInputs(generated=_TOKEN)
# The first leap is short, since a request may land; each that none ends makes the next twice as long.
_FIRST_LEAP, _LONGEST_LEAP = 8, 512
# A scheduler with work that plans nothing may wait for the clock (to delay prefills, say), but not for
# ever. So it is asked again every millisecond of a second, then every second of an hour.
_NUM_SHORT_PAUSES, _SHORT_PAUSE_S = 1000, 0.001
_NUM_LONG_PAUSES, _LONG_PAUSE_S = 3600, 1.0


class Stuck(Exception):
    """The scheduler has work and plans none of it: a fault of the scheduler."""


class Stepping(StrEnum):
    """Pace of a replica. Both give the same history."""

    LEAP = "leap"  # over steps in which nothing is decided
    EACH = "each"  # every step is planned


class Pace(NamedTuple):
    """Pace of one replica, and the seed by which its steps vary."""

    stepping: Stepping = Stepping.EACH
    seed: int = 0


class _Leap(NamedTuple):
    """Steps that nothing but a new request can change."""

    durations: Durations
    ends_s: list[float]


class _Live:
    """A request that is waiting or running."""

    __slots__ = ("arrival_s", "first_s", "goes_on", "last_s", "seq", "tally")

    def __init__(self, seq: Sequence, arrival_s: float, tally: ClassTally) -> None:
        self.seq = seq
        self.arrival_s = arrival_s
        self.tally = tally
        self.first_s = -1.0  # of its first token; before that below 0
        self.last_s = -1.0  # of its last token, where it got none in the step before
        self.goes_on = False  # on another replica, after its first token


class Tallies:
    """Counts by priority and tenant, in the order of appearance: that place is the client_index."""

    def __init__(self) -> None:
        self.all: list[ClassTally] = []
        self._index_of: dict[tuple[int, str], int] = {}
        self.begun_s: dict[SequenceId, float] = {}
        """First token of each request whose replica failed, until it begins anew; below 0: it had none."""

    @property
    def num_missed(self) -> int:
        """Requests that ended and did not keep to the SLO."""
        return sum(each.num_rejected + len(each.e2e_s) - each.num_good for each in self.all)

    def index_of(self, request: SimRequest) -> int:
        key = (request.priority, request.tenant)
        index = self._index_of.get(key)
        if index is None:
            index = self._index_of[key] = len(self.all)
            self.all.append(ClassTally(*key))
        return index


class Replica:
    """One scheduler, driven by `add`, `begin_step` and `end_step`, in the order of virtual time."""

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: LinearStepTime,
        tallies: Tallies,
        slo: Slo,
        drafts: DraftSource = NO_DRAFTS,
        pace: Pace = Pace(),  # noqa: B008  (it is frozen)
    ) -> None:
        self.scheduler = LeapingScheduler(config, token_id=_TOKEN_ID)
        self.event_s: float | None = None
        """The event ahead: the end of a step or of a leap, or a moment to begin one."""
        self.busy_s = 0.0
        self.num_tokens = 0
        self.is_open = True
        """Whether it takes requests."""
        self.ended: list[SequenceId] | None = None
        """Requests that have ended since these were last taken away; None: not kept."""
        self.prefilled: list[SequenceId] | None = None
        """Requests with their first token, which is all that they get here; None: they get all."""
        self.preemptions: Counter[str] = Counter()
        self.kv_block_s = 0.0
        """Blocks in use, summed over the time in steps."""
        self.max_used_blocks = 0
        self._copy_s_per_block = config.copy_s_per_block
        self._step_time = step_time
        self._variation = variation_of(step_time, pace.seed)
        self._drafts = SimulatedDrafts(drafts, config.draft_supply) if drafts.rates else None
        self._passes: DraftPasses = ()
        self._tallies = tallies
        self._slo = slo
        self._live: dict[SequenceId, _Live] = {}
        self._plan: SchedulerOutput | None = None
        self._computing_s = 0.0
        self._waited_s = 0.0
        self._sampled: dict[SequenceId, tuple[int, ...]] = {}  # of the last step that ended
        self._sampled_s = 0.0  # when it ended
        self._num_pauses = 0
        self._steady = self.scheduler.steady
        self._is_leaping = pace.stepping is Stepping.LEAP
        self._leap: _Leap | None = None
        self._max_leap = _FIRST_LEAP
        self._has_landed = False  # in a step of a leap that is cut short
        self._params: dict[int, SamplingParams] = {}
        self._terms: dict[int, ServiceTerms] = {}
        self.num_waiting = 0
        """Requests, preempted ones included."""
        self.num_running = 0
        self.outputs: list[SequenceOutput] | None = None
        """Outputs since they were last taken away, for one line before the replicas; None: not kept."""

    def add(self, waiting: RequestUnderWay, now_s: float) -> None:
        request, sequence_id = waiting.request, SequenceId(waiting.number)
        index = self._tallies.index_of(request)
        tally = self._tallies.all[index]
        tally.num_arrived += waiting.begun_s < 0
        most_tokens = min(request.max_tokens, self.scheduler.config.max_model_len - request.prompt_len)
        has_room = most_tokens > 1 and self.scheduler.kv.can_ever_fit(request.prompt_len + 1)
        goes_on = self.prefilled is not None and has_room
        max_tokens = 1 if goes_on else request.max_tokens
        params = self._params.get(max_tokens)
        if params is None:
            params = self._params[max_tokens] = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        terms = self._terms.get(index)
        if terms is None:
            terms = self._terms[index] = ServiceTerms(priority=request.priority, tenant=request.tenant)
        inputs = NO_INPUTS if waiting.begun_s < 0 else _BEGUN
        seq = Sequence(sequence_id, waiting.token_ids, params, terms, inputs=inputs, client_index=index)
        seq.block_keys, seq.tail_key = waiting.block_keys, waiting.tail_key
        num_tokens = request.prompt_len + request.max_tokens
        is_named = len(seq.block_keys) == num_tokens // self.scheduler.config.block_size
        assert is_named or not seq.block_keys, "no key can be made from a name"
        try:
            self.scheduler.add_request(seq, now_s=now_s)
        except NeverFits:
            tally.num_rejected += 1
            if self.ended is not None:
                self.ended.append(sequence_id)
            if self.outputs is not None:
                self.outputs.append(SequenceOutput(sequence_id, (), FinishReason.REJECTED))
            return
        live = self._live[sequence_id] = _Live(seq, min(now_s, request.arrival_s), tally)
        live.first_s = self._tallies.begun_s.pop(sequence_id, waiting.begun_s)
        live.last_s, live.goes_on = now_s, goes_on
        if waiting.begun_s >= 0:
            live.last_s = waiting.begun_s
            self._give_copy(seq)
        self.num_waiting += 1

    def _give_copy(self, seq: Sequence) -> None:
        """Put the keys and values of a prompt into host memory, if there is room for them."""
        kv = self.scheduler.kv
        num_blocks = -(-seq.num_prompt_tokens // kv.block_size)
        if num_blocks <= kv.swap_space.num_free:
            table = BlockTable()
            table.host_ids = kv.swap_space.take(num_blocks)
            seq.tables, seq.num_swapped_tokens = [table], seq.num_prompt_tokens

    @property
    def kv_use(self) -> float:
        """Share of the blocks in use."""
        return self.scheduler.kv.pool.num_used / self.scheduler.kv.pool.num_blocks

    def fail(self, now_s: float) -> list[SequenceId]:
        """Stop in the middle of a step, for good; return the requests that have not ended."""
        self.land(now_s)
        lost = list(self._live)
        for live in self._live.values():
            live.tally.num_arrived -= 1  # it comes again
            self._tallies.begun_s[live.seq.sequence_id] = live.first_s
        self._live.clear()
        self.event_s, self.num_waiting, self.num_running = None, 0, 0
        return lost

    def begin_step(self, now_s: float) -> float | None:
        """Begin a step or a leap; return when to call `end_step`, None if there is no work. Raises Stuck."""
        scheduler = self.scheduler
        while scheduler.has_unfinished_requests:
            if self._is_leaping and (num_steps := self._prepare()):
                return self._plan_leap(now_s, min(num_steps, self._max_leap))
            plan = scheduler.schedule(now_s=now_s)
            if not plan.is_empty or self._steady.num:
                self._num_pauses = 0
                return now_s + self._begin(plan, now_s)
            if not (outputs := scheduler.take_outputs()):
                return now_s + self._pause()
            for news in outputs.values():
                self._settle(news, now_s)
        self.num_waiting = self.num_running = 0
        return None

    def land(self, now_s: float) -> None:
        """Take the step that is under way out of a leap, for a request that comes now."""
        if (leap := self._leap) is None:
            return
        # A step that ends now ends after the request has come.
        num_done = bisect_left(leap.ends_s, now_s)
        self._begin_steady(leap.durations.first(num_done + 1))
        self._note_steady(leap.ends_s[:num_done])
        self._variation.give_back(len(leap.ends_s) - num_done - 1)
        self._leap, self._has_landed, self._max_leap = None, True, _FIRST_LEAP
        self.event_s = leap.ends_s[num_done]

    def end_step(self, now_s: float) -> None:
        """Give a token to each sequence whose share reached the end of its known ones; with drafts more."""
        plan, self._plan = self._plan, None
        if plan is None:
            self._end_without_plan(now_s)
            return
        sampled = {share[0]: _TOKEN for share in plan.scheduled if share[3]}
        if self._drafts is not None:
            self._drafts.verify(plan, sampled)
        self.scheduler.observe_step(plan, self._computing_s, self._passes, waited_s=self._waited_s)
        followed = {} if self._drafts is None else self._drafts.followed(plan, sampled)
        outputs = self.scheduler.update_from_output(
            plan, ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={}, num_followed=followed)
        )
        if self._drafts is not None:
            self.scheduler.update_draft_token_ids(self._drafts.offers(plan, sampled))
        num_flowing = {index: len(news) for index, news in outputs.items()}
        self._note_stalled(self._sampled.keys() - sampled.keys())
        for sequence_id in sorted(sampled.keys() - self._sampled.keys()):
            live = self._live[sequence_id]
            num_flowing[live.seq.client_index] -= 1
            if live.first_s < 0:
                live.first_s = now_s
                live.tally.ttft_s.append(now_s - live.arrival_s)
                live.tally.first_tokens.append(sequence_id)
            else:
                live.tally.gaps.add(now_s - live.last_s)
        for index, news in outputs.items():
            num_flowing[index] -= self._settle(news, now_s)
        for index, num in num_flowing.items():
            if num:
                self._tallies.all[index].gaps.add(now_s - self._sampled_s, num)
        self._note_steady((now_s,))
        self._sampled = sampled

    def _end_without_plan(self, now_s: float) -> None:
        """End a leap, the step of a leap that was cut short, or a pause."""
        if self._leap is not None:
            self._begin_steady(self._leap.durations)
            self._note_steady(self._leap.ends_s)
            self._leap, self._max_leap = None, min(2 * self._max_leap, _LONGEST_LEAP)
        elif self._has_landed:
            self._has_landed = False
            self._note_steady((now_s,))
        else:
            return
        self._steady.finish()
        for news in self.scheduler.take_outputs().values():
            self._settle(news, now_s)

    def _prepare(self) -> int:
        """Set steady decodes aside; return how many steps can be leapt over."""
        steady, sampled = self._steady, self._sampled
        steady.prepare(sampled)
        for sequence_id in steady.entered:
            del sampled[sequence_id]
        for sequence_id in steady.left:  # some had only just entered
            sampled[sequence_id] = _TOKEN
        return steady.most_steps()

    def _plan_leap(self, now_s: float, num_steps: int) -> float:
        """Return when the last of `num_steps` ends."""
        self._num_pauses = 0
        steady = self._steady
        steps = self._step_time.decode_steps(steady.num, steady.num_context_tokens, num_steps)
        durations = self._variation.vary(steps, now_s)
        ends_s = list(accumulate(durations.total_s, initial=now_s))[1:]
        self._leap = _Leap(durations, ends_s)
        self.num_running, self.num_waiting = steady.num, 0
        return ends_s[-1]

    def _begin_steady(self, durations: Durations) -> None:
        """Begin steps in which nothing is decided."""
        num_used = self._steady.leap(durations.computing_s)
        for seconds, num in zip(durations.total_s, num_used, strict=True):
            self.kv_block_s += num * seconds
            self.busy_s += seconds
        self.max_used_blocks = max(self.max_used_blocks, num_used[-1])  # none are given back meanwhile
        self.num_tokens += self._steady.num * len(durations.total_s)

    def _note_steady(self, ends_s: SequenceOf[float]) -> None:
        """Count the times between tokens of the steady decodes, at the ends of steps."""
        if not ends_s:
            return
        gaps_s = [end_s - start_s for start_s, end_s in pairwise((self._sampled_s, *ends_s))]
        for index, num in self._steady.num_by_client.items():
            if num:
                self._tallies.all[index].gaps.add_all(gaps_s, num)
        self._sampled_s = ends_s[-1]

    def _begin(self, plan: SchedulerOutput, now_s: float) -> float:
        """Return the seconds that the step takes."""
        scheduled, steady = plan.scheduled, self._steady
        num_decodes = sum([share[2] == 1 for share in scheduled]) + len(plan.draft_token_ids) + steady.num
        num_context_tokens = 0
        if self._step_time.per_context_token_s:
            num_context_tokens = sum([share[1] + share[2] for share in scheduled]) + steady.num_context_tokens
        num_tokens = plan.num_scheduled_tokens + steady.num
        seconds = self._step_time.seconds(num_tokens, num_decodes, num_context_tokens)
        (seconds,), (computing_s,) = self._variation.vary((seconds,), now_s)
        self._waited_s = seconds - computing_s
        steady.note_plan()
        if plan.swap_out or plan.swap_in:
            seconds += self._copy_s_per_block * (len(plan.swap_out) + len(plan.swap_in))
        self._plan, self._computing_s = plan, seconds - self._waited_s
        if self._drafts is not None:
            self._passes = self._drafts.passes(plan)
            seconds += sum([each for _, each in self._passes])
        for preemption in plan.preemptions:
            mode = "swapped" if preemption.was_swapped else "recomputed"
            self.preemptions[f"{preemption.cause}, {mode}"] += 1
        self.num_running, num_waiting, num_swapped = self.scheduler.get_request_counts()
        self.num_waiting = num_waiting + num_swapped
        num_used = self.scheduler.kv.pool.num_used
        self.kv_block_s += num_used * seconds
        self.max_used_blocks = max(self.max_used_blocks, num_used)
        self.busy_s += seconds
        self.num_tokens += num_tokens
        return seconds

    def _pause(self) -> float:
        self._num_pauses += 1
        if self._num_pauses > _NUM_SHORT_PAUSES + _NUM_LONG_PAUSES:
            counts = self.scheduler.get_request_counts()
            raise Stuck(f"the scheduler plans nothing, with {counts}")
        return _SHORT_PAUSE_S if self._num_pauses <= _NUM_SHORT_PAUSES else _LONG_PAUSE_S

    def _note_stalled(self, sequence_ids: Iterable[SequenceId]) -> None:
        """Note the sequences that had a token in the last step and have none in this: ended, or preempted."""
        for sequence_id in sequence_ids:
            live = self._live.get(sequence_id)
            if live is not None:
                live.last_s = self._sampled_s

    def _settle(self, news: list[SequenceOutput], now_s: float) -> int:
        """Count the requests that ended. Return how many outputs bring no token."""
        num_without = 0
        if self.outputs is not None:
            self.outputs += news
        for output in [each for each in news if each[2] is not None]:
            num_without += not output.token_ids
            live = self._live.pop(output.sequence_id)
            if self.prefilled is not None and live.goes_on and output.token_ids:
                self.prefilled.append(output.sequence_id)
                continue
            if self.ended is not None:
                self.ended.append(output.sequence_id)
            tally, num_tokens = live.tally, live.seq.num_output_tokens
            tally.num_completed += output.finish_reason is FinishReason.LENGTH
            tally.num_cut_short += num_tokens < live.seq.params.max_tokens
            tally.num_output_tokens += num_tokens
            tally.e2e_s.append(now_s - live.arrival_s)
            is_in_time = 0 <= live.first_s <= live.arrival_s + self._slo.ttft_s
            mean_gap_s = (now_s - live.first_s) / max(num_tokens - 1, 1)
            tally.num_good += is_in_time and mean_gap_s <= self._slo.itl_s
        return num_without
