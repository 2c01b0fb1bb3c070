"""Steady decodes: running sequences that get one token in each step, while nothing else is asked of them.

Owns: which these are, and the steps at which something is asked: a block is full, another one is needed, the
end is near. For a simulator, which knows each token beforehand: a step then costs what happens in it, and
steps in which nothing happens can be leapt over.
Never: decides anything. A step in which a running sequence might have to give way is planned with all of
them, and so is every step of a server.

Sequences that are set aside are not in the running queue. They are counted beside it (`num_steady`), so that
a plan leaves a token and a place to each. Their own fields stand still; `_settle` moves them on.

    calendar   step 17: a, d      block full, or block needed: in a leap it is done there, in order of rank;
               step 18: a         before a plan the sequence goes back to the queue instead
    ends       step 41: d         the last token: back to the queue
"""

from collections import Counter
from collections.abc import Container
from math import inf, isinf

from scheduler.config import Batching, Fairness
from scheduler.messages import SequenceId
from scheduler.sequence import Sequence
from scheduler.step.scheduler_state import SchedulerState

# Before a plan, fewer steps than these are not worth it.
_LEAST_STEPS = 3


class SteadyDecodes:
    """`prepare` comes before each plan, then a plan or a leap. The next token of each is always `token_id`.

    Nothing but `schedule`, `update_from_output` and `add_request` may be called while any are set aside.
    """

    def __init__(self, state: SchedulerState, token_id: int) -> None:
        self._state = state
        self._queues, self._kv, self._counters = state.queues, state.kv, state.counters
        self._token_id = token_id
        self._block_size = state.config.block_size
        self._is_possible = _is_possible(state)
        self._since: dict[SequenceId, int] = {}  # the step before which the fields of a sequence stood still
        self._calendar: dict[int, list[Sequence]] = {}
        self._ends: dict[int, list[Sequence]] = {}
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
        for seq in self._ends.pop(step, ()):
            self._bring_back(seq)
        num_free, num_running = self._kv.pool.num_free, queues.num_running
        if num_free < 2 * num_running:
            steady = []
        else:
            steady = [seq for seq in queues.running if seq.sequence_id in flowing and self._is_steady(seq)]
        if len(queues.waiting) or len(steady) < len(queues.running) or num_free < 3 * num_running:
            for seq in self._calendar.pop(step, ()):
                self._bring_back(seq)
            steady = [seq for seq in steady if self._steps_ahead(seq) >= _LEAST_STEPS]
        for seq in steady:
            self._set_aside(seq)

    def most_steps(self) -> int:
        """Steps that can be leapt over; 0 if the next one must be planned."""
        queues = self._queues
        if not queues.num_steady or queues.running or len(queues.waiting):
            return 0
        until_end = min(self._ends) - self._counters.num_steps
        # In so many steps each needs one block for each full one, and one; and so many must be left.
        until_short = (self._kv.pool.num_free // queues.num_steady - 2) * self._block_size
        return max(min(until_end, until_short), 0)

    def leap(self, seconds: float) -> None:
        """Do what the next step does, which takes so long; at most `most_steps` times after `prepare`."""
        step, num = self._counters.num_steps, self.num
        events = self._calendar.pop(step, None)
        if events is not None:
            for seq in sorted(events, key=lambda seq: seq.running_rank):
                self._pass_block(seq, step)
            self._kv.complete_plan()
        self._counters.num_steps = step + 1
        self._counters.num_scheduled_tokens += num
        self.num_context_tokens += num
        self._state.step_time.observe(num, seconds)

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

    def _steps_to_block(self, num_computed: int, num_slots: int) -> int:
        """Steps before the one that needs a block, or fills one."""
        return 0 if num_computed >= num_slots else (-num_computed - 1) % self._block_size

    def _steps_ahead(self, seq: Sequence) -> int:
        to_block = self._steps_to_block(seq.num_computed_tokens, seq.num_slots)
        return min(self._steps_to_end(seq), to_block)

    def _all(self) -> list[Sequence]:
        return [seq for seqs in self._ends.values() for seq in seqs]

    def _set_aside(self, seq: Sequence) -> None:
        step = self._counters.num_steps
        self._queues.set_aside(seq)
        self._since[seq.sequence_id] = step
        to_block = self._steps_to_block(seq.num_computed_tokens, seq.num_slots)
        self._calendar.setdefault(step + to_block, []).append(seq)
        self._ends.setdefault(step + self._steps_to_end(seq), []).append(seq)
        self._highest_priority = max(self._highest_priority, seq.priority)
        self.num_context_tokens += seq.num_computed_tokens + 1
        self.num_by_client[seq.client_index] += 1
        self.entered.append(seq.sequence_id)

    def _bring_back(self, seq: Sequence) -> None:
        self._settle(seq)
        del self._since[seq.sequence_id]
        step = self._counters.num_steps
        to_block = self._steps_to_block(seq.num_computed_tokens, seq.num_slots)
        _take_off(self._calendar, step + to_block, seq)
        _take_off(self._ends, step + self._steps_to_end(seq), seq)
        self._queues.bring_back(seq)
        self.num_context_tokens -= seq.num_computed_tokens + 1
        self.num_by_client[seq.client_index] -= 1
        self.left.append(seq.sequence_id)
        if not self.num:
            self._highest_priority = -inf

    def _settle(self, seq: Sequence) -> None:
        """Move a sequence on to the next step."""
        step = self._counters.num_steps
        num_steps = step - self._since[seq.sequence_id]
        self._since[seq.sequence_id] = step
        seq.token_ids += [self._token_id] * num_steps
        seq.num_tokens += num_steps
        seq.num_computed_tokens += num_steps

    def _pass_block(self, seq: Sequence, step: int) -> None:
        """Give a sequence its next block, or let others find the one that this step fills."""
        self._settle(seq)
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + 1
        if end > seq.num_slots:
            fresh = self._kv.append(seq)
            assert fresh is not None, "a leap ends before blocks are short"
        if end % self._block_size == 0:
            self._kv.publish(seq, start, end)
        to_block = self._steps_to_block(end, seq.num_slots)
        self._calendar.setdefault(step + 1 + to_block, []).append(seq)


def _is_possible(state: SchedulerState) -> bool:
    """Whether a decode is never more than one token, and nothing else happens to it but preemption."""
    config = state.config
    has_extras = config.max_encoder_tokens or config.max_drafts or config.num_host_blocks
    is_plain = config.batching is Batching.MIXED and config.fairness is Fairness.NONE
    return is_plain and not has_extras and not state.kv.attended.is_limited and config.num_stages == 1


def _take_off(calendar: dict[int, list[Sequence]], step: int, seq: Sequence) -> None:
    """Remove an entry; the day's whole list may have been taken already."""
    entries = calendar.get(step)
    if entries is not None:
        entries.remove(seq)
        if not entries:
            del calendar[step]
