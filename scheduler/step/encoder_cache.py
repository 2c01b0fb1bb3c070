"""Room for encoder outputs, of images say, until the prompt's positions for them are computed.

Never: encodes. The worker encodes what plans name, in their steps, and says when an output is there.

A sequence claims room once it runs; then its shares end before the first input whose output is not there yet.
Waiting sequences hold nothing, and one claims in the order of its positions: so none of them waits for
another in a circle. Two with the same input each have room for it, and the worker encodes it once.
"""

from collections.abc import Iterator

from scheduler.config import SchedulerConfig
from scheduler.input_messages import EncoderInput
from scheduler.messages import SequenceId
from scheduler.sequence import Sequence


class EncoderCache:
    """Sizes are in encoder tokens: positions of the prompt that take an output."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._num_free = config.encoder_cache_tokens
        self._num_free_later = 0  # outputs that a plan uses for the last time are held until its end
        self._held: dict[SequenceId, dict[int, EncoderInput]] = {}  # by offset
        self._pending: dict[SequenceId, dict[int, EncoderInput]] = {}  # of these, those that are not there
        self._step = 0
        self._since: dict[SequenceId, int] = {}  # step of the first claim since it was admitted
        self.owed_s = 0.0
        """Time that slices took beyond theirs, to be made up for."""

    def pending(self) -> dict[SequenceId, tuple[EncoderInput, ...]]:
        """Inputs to encode, of the sequences in the order of their claims."""
        return {sequence_id: tuple(items.values()) for sequence_id, items in self._pending.items()}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is to be encoded, and no room comes back with the next plan."""
        return not (self._pending or self._num_free_later)

    def next_plan(self, step: int) -> None:
        """Begin to plan a step."""
        self._step = step
        self._num_free += self._num_free_later
        self._num_free_later = 0

    def has_room(self, seq: Sequence, start: int) -> bool:
        """Whether a sequence has a token to compute from `start` on, or room for what it must encode."""
        if seq.is_indivisible:
            return sum(item.num_tokens for item in self._missing(seq, start)) <= self._num_free
        first = next(self._missing(seq, start), None)
        return first is None or first.offset > start or first.num_tokens <= self._num_free

    def claim(self, seq: Sequence) -> None:
        """Take room for the inputs that are not computed yet, up to the first for which there is none."""
        for item in self._missing(seq, seq.num_computed_tokens):
            if item.num_tokens > self._num_free:
                return
            self._num_free -= item.num_tokens
            self._since.setdefault(seq.sequence_id, self._step)
            for items in (self._held, self._pending):
                items.setdefault(seq.sequence_id, {})[item.offset] = item

    def note_encoded(self, sequence_id: SequenceId, offsets: tuple[int, ...], *, step: int) -> None:
        """Learn that outputs are there from a step on, unless the sequence has left meanwhile."""
        if step < self._since.get(sequence_id, 0):
            return
        items = self._pending.get(sequence_id, {})
        for offset in offsets:
            items.pop(offset, None)
        if not items:
            self._pending.pop(sequence_id, None)

    def computable_tokens(self, seq: Sequence, start: int, num_wanted: int) -> int:
        """Tokens from `start` on that can be computed: up to the first input without an output."""
        held, pending = self._held.get(seq.sequence_id, {}), self._pending.get(seq.sequence_id, {})
        for item in seq.encoder_inputs:
            if item.offset >= start + num_wanted:
                break
            if item.end > start and (item.offset not in held or item.offset in pending):
                return 0 if seq.is_indivisible else max(item.offset - start, 0)
        return num_wanted

    def drop(self, seq: Sequence, end: int) -> None:
        """Drop the outputs that no share behind `end` needs."""
        held = self._held.get(seq.sequence_id, {})
        for offset in [offset for offset, item in held.items() if item.end <= end]:
            self._num_free_later += held.pop(offset).num_tokens
        if not held:
            self._held.pop(seq.sequence_id, None)

    def release(self, seq: Sequence) -> None:
        """Drop all outputs of a sequence that left the running queue."""
        self._pending.pop(seq.sequence_id, None)
        self._since.pop(seq.sequence_id, None)
        self.drop(seq, seq.num_prompt_tokens)

    def _missing(self, seq: Sequence, start: int) -> Iterator[EncoderInput]:
        held = self._held.get(seq.sequence_id, {})
        return (item for item in seq.encoder_inputs if item.end > start and item.offset not in held)
