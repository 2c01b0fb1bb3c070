"""One scheduler with a model whose only property is how long its steps take.

Owns: a step under way, and when each live request got its tokens.
Never: decides anything about scheduling: every plan is the scheduler's own.

The driver must cost little beside the scheduler, so nothing is done for each token of each step that the
interpreter cannot do in one call. The times between tokens are counted by step: whoever got a token in
this step and in the one before has waited from the end of that one to the end of this one, and those
are nearly all.
"""

from collections import Counter
from collections.abc import Iterable

from bench.simulate.arrivals import SimRequest
from bench.simulate.fitted_step_time import LinearStepTime
from bench.simulate.simulated_drafts import NO_DRAFTS, DraftSource, SimulatedDrafts
from bench.simulate.tally import ClassTally, Slo
from scheduler.config import SchedulerConfig
from scheduler.draft_messages import DraftPasses
from scheduler.messages import (
    FinishReason,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceOutput,
    ServiceTerms,
)
from scheduler.scheduler import NeverFits, Scheduler
from scheduler.sequence import Sequence

_TOKEN: tuple[int, ...] = (1,)
# A scheduler with work that plans nothing may wait for the clock (to delay prefills, say), but not for
# ever. So it is asked again every millisecond of a second, then every second of an hour.
_NUM_SHORT_PAUSES, _SHORT_PAUSE_S = 1000, 0.001
_NUM_LONG_PAUSES, _LONG_PAUSE_S = 3600, 1.0


class Stuck(Exception):
    """The scheduler has work and plans none of it: a fault of the scheduler."""


class _Live:
    """A request that is waiting or running."""

    __slots__ = ("arrival_s", "first_s", "last_s", "seq", "tally")

    def __init__(self, seq: Sequence, arrival_s: float, tally: ClassTally) -> None:
        self.seq = seq
        self.arrival_s = arrival_s
        self.tally = tally
        self.first_s = -1.0  # of its first token; before that below 0
        self.last_s = -1.0  # of its last token, where it got none in the step before


class Tallies:
    """Counts by priority and tenant, in the order of appearance: that place is the client_index."""

    def __init__(self) -> None:
        self.all: list[ClassTally] = []
        self._index_of: dict[tuple[int, str], int] = {}

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
    ) -> None:
        self.scheduler = Scheduler(config)
        self.is_awake = False
        """Whether an event is ahead: the end of a step, or a moment to begin one."""
        self.busy_s = 0.0
        self.num_tokens = 0
        self.preemptions: Counter[str] = Counter()
        self.kv_block_s = 0.0
        """Blocks in use, summed over the time in steps."""
        self.max_used_blocks = 0
        self._copy_s_per_block = config.copy_s_per_block
        self._step_time = step_time
        self._drafts: SimulatedDrafts | None = None
        if drafts.rates:
            self._drafts = SimulatedDrafts(drafts, config.draft_supply)
        self._passes: DraftPasses = ()
        self._tallies = tallies
        self._slo = slo
        self._live: dict[SequenceId, _Live] = {}
        self._plan: SchedulerOutput | None = None
        self._step_s = 0.0
        self._sampled: dict[SequenceId, tuple[int, ...]] = {}  # of the last step that ended
        self._sampled_s = 0.0  # when it ended
        self._num_pauses = 0
        self._params: dict[int, SamplingParams] = {}
        self._terms: dict[int, ServiceTerms] = {}
        self.num_waiting = 0
        """Requests, preempted ones included."""
        self.num_running = 0
        self.outputs: list[SequenceOutput] | None = None
        """Outputs since they were last taken away, for one line before the replicas; None: not kept."""

    def add(
        self, request: SimRequest, token_ids: tuple[int, ...], sequence_id: SequenceId, now_s: float
    ) -> None:
        index = self._tallies.index_of(request)
        tally = self._tallies.all[index]
        tally.num_arrived += 1
        params = self._params.get(request.max_tokens)
        if params is None:
            params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
            self._params[request.max_tokens] = params
        terms = self._terms.get(index)
        if terms is None:
            terms = self._terms[index] = ServiceTerms(priority=request.priority, tenant=request.tenant)
        seq = Sequence(sequence_id, token_ids, params, terms, client_index=index)
        try:
            self.scheduler.add_request(seq, now_s=now_s)
        except NeverFits:
            tally.num_rejected += 1
            if self.outputs is not None:
                self.outputs.append(SequenceOutput(sequence_id, (), FinishReason.REJECTED))
            return
        self._live[sequence_id] = _Live(seq, min(now_s, request.arrival_s), tally)
        self.num_waiting += 1

    def begin_step(self, now_s: float) -> float | None:
        """Begin a step; return when to call `end_step`, None if there is no work. Raises Stuck."""
        scheduler = self.scheduler
        while scheduler.has_unfinished_requests:
            plan = scheduler.schedule(now_s=now_s)
            if not plan.is_empty:
                self._num_pauses = 0
                return now_s + self._begin(plan)
            if not (outputs := scheduler.take_outputs()):
                return now_s + self._pause()
            for news in outputs.values():
                self._settle(news, now_s)
        self.num_waiting = self.num_running = 0
        return None

    def end_step(self, now_s: float) -> None:
        """Give a token to each sequence whose share reached the end of its known ones; with drafts more."""
        plan, self._plan = self._plan, None
        if plan is None:  # it was a pause
            return
        sampled = dict.fromkeys([share[0] for share in plan.scheduled if share[3]], _TOKEN)
        if self._drafts is not None:
            self._drafts.verify(plan, sampled)
        self.scheduler.observe_step(plan, self._step_s, self._passes)
        outputs = self.scheduler.update_from_output(
            plan, ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={})
        )
        if self._drafts is not None:
            self.scheduler.update_draft_token_ids(self._drafts.offers(plan, sampled))
        num_flowing = {index: len(news) for index, news in outputs.items()}
        self._note_stalled(self._sampled.keys() - sampled.keys())
        for sequence_id in sampled.keys() - self._sampled.keys():
            live = self._live[sequence_id]
            num_flowing[live.seq.client_index] -= 1
            if live.first_s < 0:
                live.first_s = now_s
                live.tally.ttft_s.append(now_s - live.arrival_s)
            else:
                live.tally.gaps.add(now_s - live.last_s)
        for index, news in outputs.items():
            num_flowing[index] -= self._settle(news, now_s)
            if num_flowing[index]:
                self._tallies.all[index].gaps.add(now_s - self._sampled_s, num_flowing[index])
        self._sampled, self._sampled_s = sampled, now_s

    def _begin(self, plan: SchedulerOutput) -> float:
        """Return the seconds that the step takes."""
        scheduled = plan.scheduled
        num_decodes = sum([share[2] == 1 for share in scheduled]) + len(plan.draft_token_ids)
        num_context_tokens = 0
        if self._step_time.per_context_token_s:
            num_context_tokens = sum([share[1] + share[2] for share in scheduled])
        seconds = self._step_time.seconds(plan.num_scheduled_tokens, num_decodes, num_context_tokens)
        if plan.swap_out or plan.swap_in:
            seconds += self._copy_s_per_block * (len(plan.swap_out) + len(plan.swap_in))
        self._plan, self._step_s = plan, seconds
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
        self.num_tokens += plan.num_scheduled_tokens
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
            tally, num_tokens = live.tally, live.seq.num_output_tokens
            tally.num_completed += output.finish_reason is FinishReason.LENGTH
            tally.num_cut_short += num_tokens < live.seq.params.max_tokens
            tally.num_output_tokens += num_tokens
            tally.e2e_s.append(now_s - live.arrival_s)
            is_in_time = 0 <= live.first_s <= live.arrival_s + self._slo.ttft_s
            mean_gap_s = (now_s - live.first_s) / max(num_tokens - 1, 1)
            tally.num_good += is_in_time and mean_gap_s <= self._slo.itl_s
        return num_without
