"""Room for encoder outputs, of images say, until the prompt's positions for them are computed.

Owns: how many encoder tokens a step may still compute, and which sequences' outputs are held.
Never: encodes. The worker keeps an output from the plan that names it until the last of its positions was
computed, or its sequence was released.
Source: the encoder budget of vLLM's second engine.

Outputs are not shared: a sequence with the same input after the same prefix finds the KV of its positions in
the prefix cache and needs no encoder output at all. A sequence holds outputs only for positions that its own
next shares compute, so no two sequences wait for each other.
"""

from scheduler.config import SchedulerConfig
from scheduler.input_messages import EncoderInput
from scheduler.messages import SequenceId
from scheduler.sequence import Sequence


class EncoderCache:
    """Sizes are in encoder tokens: positions of the prompt that take an output."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_step_tokens = config.max_encoder_tokens
        self._left_in_step = 0
        self._num_free = config.encoder_cache_tokens
        self._num_free_later = 0  # outputs that a plan uses for the last time are held until its end
        self._held: dict[SequenceId, list[EncoderInput]] = {}

    @property
    def num_held_tokens(self) -> int:
        return sum(item.num_tokens for items in self._held.values() for item in items)

    def holders(self) -> set[SequenceId]:
        """Sequences with outputs; for tests and invariants."""
        return set(self._held)

    def next_plan(self) -> None:
        self._left_in_step = self._max_step_tokens
        self._num_free += self._num_free_later
        self._num_free_later = 0

    def computable_tokens(self, seq: Sequence, start: int, num_wanted: int) -> int:
        """Tokens from `start` on that can be computed: up to the first input without room."""
        left, free = self._left_in_step, self._num_free
        for item in self._missing(seq, start, start + num_wanted):
            if item.num_tokens > min(left, free):
                return max(item.offset - start, 0)
            left -= item.num_tokens
            free -= item.num_tokens
        return num_wanted

    def take(self, seq: Sequence, start: int, end: int) -> tuple[EncoderInput, ...]:
        """Inputs to encode for a share [start, end), for which there is room.

        Outputs that end before `end` are
        dropped.
        """
        fresh = self._missing(seq, start, end)
        num_fresh = sum(item.num_tokens for item in fresh)
        self._left_in_step -= num_fresh
        self._num_free -= num_fresh
        held = [*self._held.pop(seq.sequence_id, ()), *fresh]
        needed = [item for item in held if item.end > end]
        self._num_free_later += sum(item.num_tokens for item in held if item.end <= end)
        if needed:
            self._held[seq.sequence_id] = needed
        return tuple(fresh)

    def release(self, seq: Sequence) -> None:
        """Drop the outputs of a sequence that left the running queue."""
        self._num_free_later += sum(item.num_tokens for item in self._held.pop(seq.sequence_id, ()))

    def _missing(self, seq: Sequence, start: int, end: int) -> list[EncoderInput]:
        held = self._held.get(seq.sequence_id, ())
        return [
            item for item in seq.encoder_inputs if item.end > start and item.offset < end and item not in held
        ]
