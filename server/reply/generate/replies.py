"""Parts that whole replies and streams share: the head, the usage, the end of a choice.

Owns: the counts of tokens, the open choices, the order of choices.
Pure: fed with TokenOutputs, read as dicts.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from engine.errors import RequestRejected
from engine.journal import Journal
from engine.types import ChosenLogprob, FinishReason, TokenOutput
from server.edge.http.json_body import count_members
from server.reply.generate.wire_logprobs import TokenNames

INLINE_PROMPT_LOGPROBS = 256
"""A reply with more of them is made in a thread: at 20 alternatives each takes 0.1 ms."""

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.EXPIRED: "timeout",  # ours: OpenAI has no time limits
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """Fields that are the same in every chunk of a reply."""

    id: str
    created_s: int
    model: str
    system_fingerprint: str
    """Changes with model, version and device: then a seed may mean other tokens."""

    def body(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """Chunks of a stream that carry usage."""

    at_end: bool = False
    in_every_chunk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """Everything that is known about a reply before its first token."""

    head: ReplyHead
    num_prompt_tokens: tuple[int, ...]
    """One for each prompt."""
    n: int = 1
    """Choices of each prompt; choice i of prompt p is number p * n + i."""
    has_logprobs: bool = False
    usage: UsageReport = UsageReport()
    token_names: TokenNames = TokenNames.TEXT
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids of each prompt; empty if token ids are not returned."""
    has_prediction: bool = False
    """Whether the request came with a text that the client expects."""
    journal: Journal | None = None
    """Record of the request if its times are returned, else None."""
    num_prompt_logprobs: int | None = None
    """Alternatives returned for each token of the prompt; None: no log-probabilities."""

    @property
    def num_choices(self) -> int:
        return len(self.num_prompt_tokens) * self.n

    @property
    def has_token_ids(self) -> bool:
        return bool(self.prompts)


def shown_times(journal: Journal | None) -> dict[str, Any]:
    """Times of a request at its end, as vLLM names them; empty if they are not asked for."""
    if journal is None:
        return {}
    generation_s = journal.generation_s
    num_later = journal.num_output_tokens - 1
    has_pace = bool(generation_s) and num_later > 0
    times = {
        "time_to_first_token_ms": _ms(journal.first_token_s),
        "generation_time_ms": _ms(generation_s),
        "queue_time_ms": _ms(journal.queue_s),
        "mean_itl_ms": _ms(generation_s / num_later) if generation_s and has_pace else None,
        "tokens_per_second": round(num_later / generation_s, 3) if generation_s and has_pace else None,
    }
    return {"metrics": times}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


class StreamReply(Protocol):
    """A stream in the making: each output becomes chunks."""

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]: ...


class FullReply(Protocol):
    """A reply that is sent when all of it is there."""

    def update(self, prompt_index: int, output: TokenOutput) -> None: ...

    def finish(self) -> dict[str, Any]: ...


class Gathered:
    """The whole reply that a stream gathers while it makes its events."""

    def __init__(self, stream: StreamReply, reply: Callable[[], dict[str, Any]]) -> None:
        """`reply` is called at the end of the stream."""
        self._stream = stream
        self._reply = reply

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        self._stream.update(prompt_index, output)

    def finish(self) -> dict[str, Any]:
        self._stream.finish()
        return self._reply()


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; a text that was cut off, is none or is nested too deep is an empty object."""
    with suppress(orjson.JSONDecodeError, RequestRejected):
        value = orjson.loads(text)
        if isinstance(value, dict) and count_members(value):
            return value
    return {}


class Tally:
    """Counts tokens and open choices, for every shape of reply."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._n = plan.n
        self._num_prompt_tokens = sum(plan.num_prompt_tokens)
        self._num_cached_tokens = [0] * len(plan.num_prompt_tokens)
        self._num_output_tokens = 0
        self._num_open = plan.num_choices
        self.num_reasoning_tokens: int | None = None
        """Reasoning tokens of all choices; None: reasoning is not separated."""
        self._has_prediction = plan.has_prediction
        self._num_accepted = self._num_rejected = 0

    def add(self, prompt_index: int, output: TokenOutput) -> tuple[int, str | None]:
        """Count an output; return the number of its choice and its finish reason in OpenAI's words."""
        self._num_output_tokens += len(output.token_ids)
        self._num_accepted += output.num_accepted_prediction
        self._num_rejected += output.num_rejected_prediction
        if output.index == 0:  # the others share the prompt blocks of the first: theirs are no cache hits
            self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        number = prompt_index * self._n + output.index
        if output.finish_reason is None:
            return number, None
        self._num_open -= 1
        return number, _FINISH_REASONS[output.finish_reason]

    def check_complete(self) -> None:
        """A reply that lacks an end must not look like a whole one."""
        if self._num_open:
            raise RuntimeError(f"the engine ended {self._num_open} choices without a finish reason")

    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens)},
        }
        details = {}
        if self.num_reasoning_tokens is not None:
            details["reasoning_tokens"] = self.num_reasoning_tokens
        if self._has_prediction:
            details["accepted_prediction_tokens"] = self._num_accepted
            details["rejected_prediction_tokens"] = self._num_rejected
        return {**usage, "completion_tokens_details": details} if details else usage


@dataclass(slots=True)
class CollectedChoice:
    """The outputs of one choice, for a reply that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    sum_logprobs: float = 0.0
    prompt_logprobs: Sequence[ChosenLogprob] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Collector:
    """Gathers outputs until every choice is finished."""

    def __init__(self, plan: ReplyPlan) -> None:
        self.choices = [CollectedChoice() for _ in range(plan.num_choices)]
        self.tally = Tally(plan)

    def add(self, prompt_index: int, output: TokenOutput) -> int:
        """Gather an output, but for the alternatives of its tokens; return the number of its choice."""
        number, finish_reason = self.tally.add(prompt_index, output)
        choice = self.choices[number]
        choice.texts.append(output.text)
        choice.token_ids.extend(output.token_ids)
        choice.num_logprobs += len(output.logprobs)
        choice.sum_logprobs += sum(token.chosen.logprob for token in output.logprobs)
        choice.prompt_logprobs = output.prompt_logprobs or choice.prompt_logprobs
        if finish_reason is not None:
            choice.finish_reason = finish_reason
            choice.stop_reason = output.stop_reason
        return number

    def finish(self) -> tuple[Sequence[CollectedChoice], dict[str, Any]]:
        """Return the choices in order, and the usage."""
        self.tally.check_complete()
        return self.choices, self.tally.usage()


class ChunkWriter:
    """The frame around the choices of a chunk: head, and usage where it was asked for."""

    def __init__(self, plan: ReplyPlan, kind: str) -> None:
        self._base = plan.head.body(kind)
        self._report = plan.usage
        self._has_token_ids = plan.has_token_ids
        self._journal = plan.journal
        self.tally = Tally(plan)

    @property
    def is_wordy(self) -> bool:
        """True if every output becomes a chunk, text or not: the chunk has its token ids, or their count."""
        return self._report.in_every_chunk or self._has_token_ids

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._base, "choices": [choice]}
        if self._report.in_every_chunk:
            chunk["usage"] = self.tally.usage()
        elif self._report.at_end:
            chunk["usage"] = None
        return chunk

    def finish(self) -> list[dict[str, Any]]:
        """The chunk after the last choice, if usage or times were asked for."""
        self.tally.check_complete()
        last: dict[str, Any] = {}
        if self._report.at_end:
            last["usage"] = self.tally.usage()
        last |= shown_times(self._journal)
        return [{**self._base, "choices": [], **last}] if last else []
