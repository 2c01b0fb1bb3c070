"""Requests between their admission and their end: the base of both kinds, and the pooling kind.

Owns: which of a request's sequences have started and ended, the error that ended all of them, and the vector
or score of a pooling request until that is read.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineDiedTwice,
    EngineError,
    EngineUnavailable,
    GrammarRejected,
    Overloaded,
    RequestFailed,
    RequestRejected,
)
from engine.frontend.metrics import AbortCause
from engine.frontend.vllm_metrics import Timeline
from engine.frontend.waiting_deadlines import is_own_limit, kinds_named
from engine.process_messages import Begun
from engine.types import GenerationRequest, PoolingRequest
from scheduler.messages import (
    FinishReason,
    SamplingParams,
    SequenceId,
    SequenceOutput,
    TimeLimitKind,
    TimeLimits,
)
from scheduler.routing.dispatcher import CallNeeds, Ticket

_ABORT_CAUSES: dict[type[EngineError], AbortCause] = {
    EngineUnavailable: AbortCause.SHUTDOWN,
    EngineDied: AbortCause.ENGINE_DIED,
    EngineDiedTwice: AbortCause.ENGINE_DIED,
}
_REASONS: dict[type[EngineError], FinishReason] = {
    GrammarRejected: FinishReason.UNFIT,
    RequestRejected: FinishReason.REJECTED,
    Overloaded: FinishReason.REJECTED,  # displaced by a more urgent request
    DeadlineExceeded: FinishReason.EXPIRED,
    EngineUnavailable: FinishReason.ABORTED,  # cut off by a shutdown
}

_NO_SAMPLING = SamplingParams()
NO_TICKET: Ticket[Any] = Ticket(
    None, CallNeeds(rank=(), priority=0, tenant="", num_sequences=0, num_prompt_tokens=0), is_closed=True
)
"""Ticket of a request that is not admitted."""


class RequestChoice(Protocol):
    """One sequence of a request and its result so far: text (TextChoice) or a vector (PooledChoice)."""

    finish_reason: FinishReason | None
    has_started: bool
    """Whether an engine process has had it in a step."""
    last_token_s: float | None
    num_tokens: int

    @property
    def index(self) -> int: ...


ChoiceT = TypeVar("ChoiceT", bound=RequestChoice)
RequestT = TypeVar("RequestT", bound=GenerationRequest | PoolingRequest)


class ActiveRequest(Generic[RequestT, ChoiceT]):
    """An admitted request. The receiver of messages feeds it, one reader reads it.

    It is over when every choice has ended, or with an error. `readable` is set whenever there is
    something to read; several requests may share it.
    """

    prompt_param = "prompt"
    """The request field that holds the prompt, for error messages."""

    def __init__(
        self, request: RequestT, choices: Mapping[SequenceId, ChoiceT], readable: asyncio.Event
    ) -> None:
        self.request = request
        self.choices = choices
        self.arrived_s = time.monotonic()
        self.num_unstarted = len(choices)
        """Sequences that have not been in a step yet."""
        self.is_over = False
        self.started_s = self.arrived_s
        """The first step of its first sequence; meaningless before."""
        self.first_token_s: float | None = None
        self.expected_first_token_s: float | None = None
        """Seconds from its arrival, as they were foreseen then."""
        self.num_cached_tokens = 0
        self.num_deaths = 0
        """Engine processes that died while they held this request."""
        self.last_death_s = -inf
        """Time of the last of them."""
        self.sent_s = self.arrived_s
        """Last time that it was sent to an engine."""
        self.ticket = NO_TICKET
        """Its place in the line, then its engine, from its admission until it leaves."""
        self.allowed_limits = TimeLimits()
        """The operator's time limits, from its admission."""
        self.error: EngineError | None = None
        self._readable = readable

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def first_id(self) -> SequenceId:
        """The lowest sequence id; earlier requests have lower ids."""
        return next(iter(self.choices))

    @property
    def has_started(self) -> bool:
        return self.num_unstarted < len(self.choices)

    @property
    def timeline(self) -> Timeline | None:
        """The times of its life so far; None if it has generated nothing."""
        if self.first_token_s is None:
            return None
        choices = self.choices.values()
        return Timeline(
            started_s=self.started_s,
            first_token_s=self.first_token_s,
            last_token_s=max(choice.last_token_s or self.first_token_s for choice in choices),
            num_tokens=max(choice.num_tokens for choice in choices),
            num_computed_prompt_tokens=max(0, self.num_prompt_tokens - self.num_cached_tokens),
        )

    @property
    def unfinished_ids(self) -> tuple[SequenceId, ...]:
        return tuple(
            sequence_id for sequence_id, choice in self.choices.items() if choice.finish_reason is None
        )

    @property
    def reason_of_end(self) -> FinishReason:
        """The finish reason of choices without one of their own: by the error, or because the reader left."""
        if self.error is None:
            return FinishReason.ABORTED
        return _REASONS.get(type(self.error), FinishReason.FAILED)

    @property
    def abort_cause(self) -> AbortCause | None:
        """The cause of an early end, for the metrics. None if the request itself was at fault."""
        if self.error is None:
            return AbortCause.CLIENT_LEFT
        return _ABORT_CAUSES.get(type(self.error))

    def push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        if output.finish_reason is None:  # nearly every token
            self._push(output, eos_token_ids)
        elif output.finish_reason is FinishReason.REJECTED:
            self.fail(
                RequestRejected(output.message, param=self.prompt_param, code="context_length_exceeded")
            )
        elif output.finish_reason is FinishReason.FAILED:
            self.fail(RequestFailed(output.message or "the model failed on this request"))
        elif output.finish_reason is FinishReason.UNFIT:
            self.fail(GrammarRejected(output.message))
        elif output.finish_reason is FinishReason.EXPIRED and not self.has_reply:
            self.expire(output.message, kinds_named(output.message))
        else:
            self._push(output, eos_token_ids)

    def fail(self, error: EngineError) -> None:
        """End the request with an error; the first one counts."""
        self.error = self.error or error
        self._note_end()
        self._readable.set()

    def expire(self, message: str, kinds: Iterable[TimeLimitKind]) -> None:
        """End the request as a time limit of one of these kinds ran out, its own or the operator's."""
        if is_own_limit(kinds, self.request.terms.time_limits, self.allowed_limits):
            self.request.journal.own_limit_ran_out = True
        self.fail(DeadlineExceeded(message))

    def fields_of_kind(self) -> dict[str, Any]:
        """Fields of AddRequest that one kind of request has, and the other not."""
        raise NotImplementedError

    def begun(self) -> tuple[Begun, ...]:
        """Beginnings for the next engine process, one for each unfinished choice; none: it begins anew."""
        return ()

    @property
    def has_reply(self) -> bool:
        """Whether there is something to send even if no more comes."""
        return False

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in an output that is not an error."""
        raise NotImplementedError

    def _note_end(self) -> None:
        """Note the end of a choice, or of all by an error."""
        self.is_over = self.error is not None or all(choice.finish_reason for choice in self.choices.values())


class PooledChoice:
    """The single sequence of a pooling request, with its vector."""

    index = 0
    num_tokens = 0

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.has_started = False
        self.last_token_s: float | None = None
        self.vector = b""


class ActivePooling(ActiveRequest[PoolingRequest, PooledChoice]):
    """A request for one vector or score, which is read once, at its end."""

    prompt_param = "input"

    def __init__(self, request: PoolingRequest, sequence_id: SequenceId, readable: asyncio.Event) -> None:
        self._choice = PooledChoice()
        super().__init__(request, {sequence_id: self._choice}, readable)

    def fields_of_kind(self) -> dict[str, Any]:
        return {"params": _NO_SAMPLING, "pooling": self.request.params}

    def vector(self) -> bytes:
        """Return the vector of a request that is over. Raises the error that ended it."""
        if self.error is not None:
            raise self.error
        return self._choice.vector

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:  # noqa: ARG002 - the base class has it
        if output.finish_reason is not None:
            self._choice.finish_reason = output.finish_reason
            self._choice.vector = output.pooled
            self._note_end()
            self._readable.set()
