"""One prompt between its admission and its vector, as the API process sees it.

Owns: the vector until it is read.
Never: text, or talks to the engine process; client.py does.
"""

import asyncio

from engine.frontend.active_request import Live
from engine.types import PooledOutput, PoolingRequest
from scheduler.messages import FinishReason, SequenceId, SequenceOutput


class PooledChoice:
    """The only part of a pooling request."""

    index = 0
    num_tokens = 0

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.last_token_s: float | None = None
        self.vector = b""
        self.num_cached_tokens = 0


class LivePooling(Live[PoolingRequest, PooledChoice]):
    """Read once, when it is over."""

    prompt_param = "input"

    def __init__(self, request: PoolingRequest, sequence_id: SequenceId, news: asyncio.Event) -> None:
        self._choice = PooledChoice()
        super().__init__(request, {sequence_id: self._choice}, news)
        self._is_read = False

    def take(self) -> list[PooledOutput]:
        """The vector, once; nothing before it is there. Raises the error that ended the request."""
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

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:  # noqa: ARG002 - Live's
        if output.start is not None:
            self._choice.num_cached_tokens = output.start.num_cached_tokens
        if output.finish_reason is not None:
            self._choice.finish_reason = output.finish_reason
            self._choice.vector = output.pooled
            self._news.set()
