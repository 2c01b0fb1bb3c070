"""Steady decodes: running sequences that get one token in each step, while nothing else is asked of them.

Owns: which these are, and the steps at which something is asked: a block is full, another one is needed, the
end is near. For a simulator, which knows each token beforehand: a step then costs what happens in it, and
steps in which nothing happens can be leapt over.
Never: decides anything. A step in which a running sequence might have to give way is planned with all of
them.

Sequences that are set aside are not in the running queue. They are counted apart (`SteadyQueues`), so that
a plan leaves a token and a place to each. Their own fields stand still; `_settle` moves them on.

    calendar   step 17: a, d      block full, or block needed: done there, in order of rank; before a plan the
               step 18: a         ones behind a prompt, or behind another that needs one, go back to the queue
    ends       step 41: d         the last token: back to the queue before a plan, else it ends with the leap

Keys that are there before their tokens are names, which no other sequence has. No prompt misses such blocks,
so they are published when their sequence goes back.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from collections.abc import Sequence as SequenceOf
from math import inf, isinf
from operator import attrgetter

from scheduler.cache_groups import CacheGroup
from scheduler.config import Batching, Fairness, HostTier, PreemptionMode, PrefixCaching
from scheduler.messages import FinishReason, SequenceId, SequenceOutput
from scheduler.queues.request_queues import RequestQueues
from scheduler.sequence import Sequence
from scheduler.step.scheduler_state import SchedulerState

# Before a plan, fewer steps up to the end than these are not worth it.
_LEAST_STEPS = 3

_running_rank_of = attrgetter("running_rank")


class SteadyQueues(RequestQueues):
    """Queues that count running sequences which are not in `running`: each has tokens, and needs one."""

    num_steady = 0

    def set_aside(self, seq: Sequence) -> None:
        """Take a sequence from the running queue, and count it."""
        self._leave_running(seq)
        self.num_steady += 1

    def bring_back(self, seq: Sequence) -> None:
        """Put a sequence that was set aside back into the running queue."""
        insort(self.running, seq, key=_running_rank_of)
        self.num_steady -= 1

    @property
    def num_running(self) -> int:
        return super().num_running + self.num_steady

    def num_decodes(self) -> int:
        return super().num_decodes() + self.num_steady

    def has_replies(self) -> bool:
        return self.num_steady > 0 or super().has_replies()


class SteadyDecodes:
    """`prepare` comes before each plan, then a plan, or a leap and `finish`. Each token is `token_id`.

    Nothing but `schedule`, `update_from_output` and `add_request` may be called while any are set aside.
    """

    def __init__(
        self,
        state: SchedulerState,
        queues: SteadyQueues,
        token_id: int,
        *,
        end: Callable[[Sequence, FinishReason, SequenceOutput], None],
    ) -> None:
        self._state = state
        self._end = end
        self._queues, self._kv, self._counters = queues, state.kv, state.counters
        self._token_id = token_id
        self._block_size = state.config.block_size
        self._is_possible = _is_possible(state)
        self._publishes = state.config.prefix_caching is PrefixCaching.ON
        self._since: dict[SequenceId, int] = {}  # the step before which the fields of a sequence stood still
        self._calendar: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._ends: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._highest_priority = -inf  # of those that were set aside since there was none
        self.num_context_tokens = 0
        """Keys that attention reads for these in the next step."""
        self.num_by_client: Counter[int] = Counter()
        """Sequences by client_index."""
        self.entered: list[SequenceId] = []
        self.left: list[SequenceId] = []
        """Changes of the last `prepare`."""

    @property
    def num(self) -> int:
        """Sequences that are set aside."""
        return self._queues.num_steady

    def prepare(self, flowing: Container[SequenceId]) -> None:
        """Set aside and bring back, before a plan or a leap.

        Those in `flowing` got a token in the last step.
        """
        self.entered, self.left = [], []
        if not self._is_possible:
            return
        if self._some_may_give_way():
            for seq in list(self._all()):
                self._bring_back(seq)
            return
        step, queues = self._counters.num_steps, self._queues
        num_free, num_running = self._kv.pool.num_free, queues.num_running
        if num_free < 2 * num_running:
            steady = []
        else:
            steady = [seq for seq in queues.running if seq.sequence_id in flowing and self._is_steady(seq)]
        is_planned = len(queues.waiting) or len(steady) < len(queues.running) or num_free < 3 * num_running
        if is_planned:
            for seq in self._ends.pop(step, ()):
                self._bring_back(seq)
        for seq in steady:
            if not is_planned or self._steps_to_end(seq) >= _LEAST_STEPS:
                self._set_aside(seq)
        if is_planned:
            self._pass_blocks(step)

    def most_steps(self) -> int:
        """Steps that can be leapt over, up to the first end; 0 if the next one must be planned."""
        queues = self._queues
        if not queues.num_steady or queues.running or len(queues.waiting):
            return 0
        until_end = min(self._ends) + 1 - self._counters.num_steps
        # Until then each needs one block for each full one, and one; and as many must be left.
        until_short = (self._kv.pool.num_free // queues.num_steady - 2) * self._block_size
        return max(min(until_end, until_short), 0)

    def leap(self, durations_s: SequenceOf[float]) -> list[int]:
        """Do what the next steps do, which take so long; at most `most_steps` after `prepare`.

        Returns the blocks in use after the beginning of each.
        """
        counters, calendar, pool, num = self._counters, self._calendar, self._kv.pool, self.num
        num_used, lacking = [], list[Sequence]()
        for step in range(counters.num_steps, counters.num_steps + len(durations_s)):
            if step in calendar:
                for seq in self._events(step):
                    self._pass_block(seq, step, lacking)
            num_used.append(pool.num_used + len(lacking))
        self._give_blocks(lacking)
        counters.num_steps += len(durations_s)
        counters.num_scheduled_tokens += num * len(durations_s)
        self.num_context_tokens += num * len(durations_s)
        self._state.step_time.observe_all(num, durations_s)
        return num_used

    def finish(self) -> None:
        """End those whose last token the last step of a leap has sampled; the scheduler posts it."""
        for seq in sorted(self._ends.pop(self._counters.num_steps - 1, ()), key=_running_rank_of):
            self._bring_back(seq)
            self._end(seq, FinishReason.LENGTH, self._last_output(seq))

    def _last_output(self, seq: Sequence) -> SequenceOutput:
        token_ids = (self._token_id,)
        return SequenceOutput(
            seq.sequence_id, token_ids, FinishReason.LENGTH, num_preemptions=seq.num_preemptions
        )

    def note_plan(self) -> None:
        """Note that a plan was made: each of these gets a token of its step."""
        self.num_context_tokens += self.num

    def _some_may_give_way(self) -> bool:
        """Whether, in the next step, one of these may be preempted, or displaced by a waiting sequence."""
        queues = self._queues
        if self._kv.pool.num_free < queues.num_running:
            return True
        if not self._state.order.displaces or not len(queues.waiting):
            return False
        highest = max((seq.priority for seq in queues.running), default=-inf)
        return queues.most_urgent().priority < max(highest, self._highest_priority)

    def _is_steady(self, seq: Sequence) -> bool:
        if seq.num_tokens - seq.num_computed_tokens != 1 or seq.num_tokens != len(seq.token_ids):
            return False
        if seq.adapter or seq.prediction or not isinf(seq.time_limits.nearest_s):
            return False
        has_more = seq.pending_start is None and self._steps_to_end(seq) > 0
        return has_more and self._token_id not in seq.params.stop_token_ids

    def _steps_to_end(self, seq: Sequence) -> int:
        """Steps before the one that samples its last token."""
        return seq.max_length - seq.num_tokens - 1

    def _is_named(self, seq: Sequence) -> bool:
        """Whether the keys of all its blocks are there."""
        return len(seq.block_keys) >= seq.max_length // self._block_size

    def _steps_to_block(self, seq: Sequence, num_computed: int) -> int:
        """Steps before the one that needs a block, or fills one that others are to find."""
        if num_computed >= seq.num_slots:
            return 0
        if self._publishes and not self._is_named(seq):
            return (-num_computed - 1) % self._block_size
        return seq.num_slots - num_computed

    def _all(self) -> list[Sequence]:
        return [seq for seqs in self._ends.values() for seq in seqs]

    def _set_aside(self, seq: Sequence) -> None:
        step = self._counters.num_steps
        self._queues.set_aside(seq)
        self._since[seq.sequence_id] = step
        to_block = self._steps_to_block(seq, seq.num_computed_tokens)
        self._calendar[step + to_block].append(seq)
        self._ends[step + self._steps_to_end(seq)].append(seq)
        self._highest_priority = max(self._highest_priority, seq.priority)
        self.num_context_tokens += seq.num_computed_tokens + 1
        self.num_by_client[seq.client_index] += 1
        self.entered.append(seq.sequence_id)

    def _bring_back(self, seq: Sequence) -> None:
        step, start = self._counters.num_steps, seq.num_computed_tokens
        self._settle(seq, step)
        if self._is_named(seq):
            self._kv.index.publish(seq, start, seq.num_computed_tokens)
        del self._since[seq.sequence_id]
        to_block = self._steps_to_block(seq, seq.num_computed_tokens)
        _take_off(self._calendar, step + to_block, seq)
        _take_off(self._ends, step + self._steps_to_end(seq), seq)
        self._queues.bring_back(seq)
        self.num_context_tokens -= seq.num_computed_tokens + 1
        self.num_by_client[seq.client_index] -= 1
        self.left.append(seq.sequence_id)
        if not self.num:
            self._highest_priority = -inf

    def _settle(self, seq: Sequence, step: int) -> None:
        """Move a sequence on to a step."""
        num_steps = step - self._since[seq.sequence_id]
        self._since[seq.sequence_id] = step
        seq.token_ids += [self._token_id] * num_steps
        seq.num_tokens += num_steps
        seq.num_computed_tokens += num_steps

    def _events(self, step: int) -> list[Sequence]:
        """Take what the calendar has for a step, in order of rank."""
        events = self._calendar.pop(step, [])
        if len(events) > 1:
            events.sort(key=_running_rank_of)
        return events

    def _pass_blocks(self, step: int) -> None:
        """Do what the calendar says, as a plan would: in order of rank, and the queue after these."""
        events = self._events(step)
        if not events:
            return
        needing = (seq.running_rank for seq in self._queues.running if self._needs_blocks(seq))
        first, lacking = next(needing, None), list[Sequence]()
        for place, seq in enumerate(events):
            if first is not None and first < seq.running_rank:
                for later in events[place:]:
                    self._bring_back(later)
                break
            self._pass_block(seq, step, lacking)
        self._give_blocks(lacking)

    def _needs_blocks(self, seq: Sequence) -> bool:
        """Whether a plan may take blocks for a sequence of the queue, or let others find one."""
        is_decode = seq.num_tokens - seq.num_computed_tokens == 1
        return not is_decode or not self._steps_to_block(seq, seq.num_computed_tokens)

    def _pass_block(self, seq: Sequence, step: int, lacking: list[Sequence]) -> None:
        """Note that a sequence lacks a block, or let others find the one that this step fills."""
        if not self._publishes or self._is_named(seq):
            lacking.append(seq)
            self._calendar[step + self._block_size].append(seq)
            return
        start = seq.num_computed_tokens + step - self._since[seq.sequence_id]
        end = start + 1
        if end > seq.num_slots:
            lacking.append(seq)
        self._give_blocks(lacking)  # what they held is not found any more: first that, then what is new
        if end % self._block_size == 0:
            if len(seq.block_keys) * self._block_size < end:  # the key is made of the tokens
                self._settle(seq, step)
            self._kv.index.publish(seq, start, end)
        self._calendar[step + 1 + self._steps_to_block(seq, end)].append(seq)

    def _give_blocks(self, lacking: list[Sequence]) -> None:
        """Give a block to each in turn."""
        if lacking:
            self._kv.append_blocks(lacking)
            lacking.clear()


def _is_possible(state: SchedulerState) -> bool:
    """Whether a decode is never more than one token, and nothing else happens to it but preemption."""
    config = state.config
    swaps = config.host_tier is HostTier.ON or config.preemption_mode is not PreemptionMode.RECOMPUTE
    has_extras = config.encoder_cache_tokens or config.max_drafts or (swaps and config.num_host_blocks)
    is_plain = config.batching is Batching.MIXED and config.fairness is Fairness.NONE
    return is_plain and not has_extras and config.groups == (CacheGroup(),) and config.num_stages == 1


def _take_off(calendar: dict[int, list[Sequence]], step: int, seq: Sequence) -> None:
    """Remove an entry; the day's whole list may have been taken already."""
    entries = calendar.get(step)
    if entries is not None:
        entries.remove(seq)
        if not entries:
            del calendar[step]
