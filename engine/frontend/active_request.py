"""What requests of every kind share between their admission and their end.

Owns: who of a request's sequences has started and ended, and the error that ended all of them.
Never: what is read from a request: texts (active_text.py) or vectors (active_pooling.py).
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineDiedTwice,
    EngineError,
    EngineUnavailable,
    Overloaded,
    RequestFailed,
    RequestRejected,
)
from engine.frontend.metrics import AbortCause
from engine.types import GenerationRequest, PoolingRequest
from scheduler.messages import FinishReason, SequenceId, SequenceOutput

_ABORT_CAUSES: dict[type[EngineError], AbortCause] = {
    EngineUnavailable: AbortCause.SHUTDOWN,
    EngineDied: AbortCause.ENGINE_DIED,
    EngineDiedTwice: AbortCause.ENGINE_DIED,
}
_REASONS: dict[type[EngineError], FinishReason] = {
    RequestRejected: FinishReason.REJECTED,
    Overloaded: FinishReason.REJECTED,  # gave way to a more urgent one
    DeadlineExceeded: FinishReason.EXPIRED,
    EngineUnavailable: FinishReason.ABORTED,  # cut off by the end of the server
}


class Part(Protocol):
    """What one sequence of a request becomes: a choice, or a vector."""

    finish_reason: FinishReason | None
    last_token_s: float | None
    num_tokens: int

    @property
    def index(self) -> int: ...


PartT = TypeVar("PartT", bound=Part)
RequestT = TypeVar("RequestT", bound=GenerationRequest | PoolingRequest)


class Live(Generic[RequestT, PartT]):
    """Fed by the receiver, read by one reader; over when every part has ended, or with an error.

    `news` is set whenever there is something to read; several requests may share it.
    """

    prompt_param = "prompt"
    """How a request of this kind calls its prompt."""

    def __init__(self, request: RequestT, choices: Mapping[SequenceId, PartT], news: asyncio.Event) -> None:
        self.request = request
        self.choices = choices
        self.arrived_s = time.monotonic()
        self.num_unstarted = len(choices)
        """Parts that did not belong to a step yet."""
        self.num_deaths = 0
        """Engine processes that died with it."""
        self.error: EngineError | None = None
        self._news = news

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def first_id(self) -> SequenceId:
        """The lowest of its sequences: of two requests, the earlier one has the lower."""
        return next(iter(self.choices))

    @property
    def has_started(self) -> bool:
        return self.num_unstarted < len(self.choices)

    @property
    def is_over(self) -> bool:
        return self.error is not None or all(choice.finish_reason for choice in self.choices.values())

    @property
    def unfinished_ids(self) -> tuple[SequenceId, ...]:
        return tuple(
            sequence_id for sequence_id, choice in self.choices.items() if choice.finish_reason is None
        )

    @property
    def reason_of_end(self) -> FinishReason:
        """Of the choices that have none of their own: what the error says, or that the reader left."""
        if self.error is None:
            return FinishReason.ABORTED
        return _REASONS.get(type(self.error), FinishReason.FAILED)

    @property
    def abort_cause(self) -> AbortCause | None:
        """If it is left before it is over; None: something was wrong with the request itself."""
        if self.error is None:
            return AbortCause.CLIENT_LEFT
        return _ABORT_CAUSES.get(type(self.error))

    def push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in news of one of the sequences."""
        if output.finish_reason is None:  # as with nearly every token
            self._push(output, eos_token_ids)
        elif output.finish_reason is FinishReason.REJECTED:
            self.fail(
                RequestRejected(output.message, param=self.prompt_param, code="context_length_exceeded")
            )
        elif output.finish_reason is FinishReason.FAILED:
            self.fail(RequestFailed(output.message or "the model failed on this request"))
        elif output.finish_reason is FinishReason.EXPIRED and not self._has_reply:
            self.fail(DeadlineExceeded(output.message))
        else:
            self._push(output, eos_token_ids)

    def fail(self, error: EngineError) -> None:
        """End it with an error; the first one counts."""
        self.error = self.error or error
        self._news.set()

    @property
    def _has_reply(self) -> bool:
        """There is something to send, even if no more comes."""
        return False

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in what is not an error."""
        raise NotImplementedError
