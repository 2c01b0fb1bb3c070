"""A pooling request between its admission and its end.

Owns: its vector or score, until that is read.
Never: handles text, or talks to the engine process (client.py does).
"""

import asyncio

from engine.frontend.active_request import ActiveRequest
from engine.types import PooledOutput, PoolingRequest
from scheduler.messages import FinishReason, SequenceId, SequenceOutput


class PooledChoice:
    """The single sequence of a pooling request, with its vector."""

    index = 0
    num_tokens = 0

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.last_token_s: float | None = None
        self.vector = b""
        self.num_cached_tokens = 0


class ActivePooling(ActiveRequest[PoolingRequest, PooledChoice]):
    """A request for one vector or score, which is read once, at its end."""

    prompt_param = "input"

    def __init__(self, request: PoolingRequest, sequence_id: SequenceId, readable: asyncio.Event) -> None:
        self._choice = PooledChoice()
        super().__init__(request, {sequence_id: self._choice}, readable)
        self._is_read = False

    def take(self) -> list[PooledOutput]:
        """Return the vector once; empty before it is there. Raises the error that ended the request."""
        if self.error is not None:
            raise self.error
        reason = self._choice.finish_reason
        if reason is None or self._is_read:
            return []
        self._is_read = True
        return [
            PooledOutput(
                vector=self._choice.vector,
                finish_reason=reason,
                num_cached_tokens=self._choice.num_cached_tokens,
            )
        ]

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:  # noqa: ARG002 - the base class has it
        if output.start is not None:
            self._choice.num_cached_tokens = output.start.num_cached_tokens
        if output.finish_reason is not None:
            self._choice.finish_reason = output.finish_reason
            self._choice.vector = output.pooled
            self._readable.set()
