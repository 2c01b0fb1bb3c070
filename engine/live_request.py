"""One request between its admission and its last output, as the API process sees it.

Owns: the text of its choices, what is ready to be read, and the error that ended it.
Never: talks to the engine process; client.py does.
"""

import asyncio
import time

from engine.detokenizer import IncrementalDetokenizer, StopText
from engine.errors import (
    DeadlineExceeded,
    EngineError,
    EngineUnavailable,
    RequestFailed,
    RequestRejected,
)
from engine.tokenizer import SpecialTokens, Tokenizer
from engine.types import GenerationRequest, LogprobEntry, TokenLogprob, TokenOutput
from scheduler.messages import FinishReason, SequenceId, SequenceOutput, TokenLogprobs


class Choice:
    """One of the n continuations. What the reader has not fetched yet is merged, so it stays small."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self.num_tokens = 0
        self.last_token_s: float | None = None
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            stop=request.stop,
            stop_text=StopText.INCLUDE if request.include_stop_str_in_output else StopText.EXCLUDE,
            special=SpecialTokens.SKIP if request.skip_special_tokens else SpecialTokens.KEEP,
        )
        self._shows_stop = request.include_stop_str_in_output
        self._hides_special = request.skip_special_tokens
        self._num_hidden = 0
        self._num_cached_tokens = 0
        self._stop_reason: int | str | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in what the engine generated; `finish_reason` says afterwards whether that was all."""
        if output.start is not None:
            self._num_cached_tokens = output.start.num_cached_tokens
        ends_by_token = output.finish_reason is FinishReason.STOP and not self._shows_stop
        shown = output.token_ids[:-1] if ends_by_token else output.token_ids
        self._texts.append(self._detokenizer.push(shown))
        if ends_by_token and self._detokenizer.matched_stop is None:
            self._num_hidden = 1  # the stop token: it counts, but it is not part of the text
        num_seen = self._detokenizer.num_tokens + self._num_hidden
        num_kept = num_seen - self.num_tokens  # none of those after a stop string
        self.num_tokens += num_kept
        self._token_ids.extend(output.token_ids[:num_kept])
        self._logprobs.extend(self._explain(logprobs) for logprobs in output.logprobs[:num_kept])
        self.has_news = True
        if self._detokenizer.matched_stop is None and output.finish_reason is not None:
            self._texts.append(self._detokenizer.finish())
            self.finish_reason = output.finish_reason
            if output.finish_reason is FinishReason.STOP and output.token_ids[-1] not in eos_token_ids:
                self._stop_reason = output.token_ids[-1]
        if self._detokenizer.matched_stop is not None:  # also in what was held back until the end
            self.finish_reason = FinishReason.STOP
            self._stop_reason = self._detokenizer.matched_stop

    def take(self) -> TokenOutput:
        """All that was not told yet, as one output."""
        output = TokenOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            num_cached_tokens=self._num_cached_tokens,
        )
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        self.has_news = False
        return output

    def _explain(self, logprobs: TokenLogprobs) -> TokenLogprob:
        return TokenLogprob(
            chosen=self._entry(logprobs.token_id, logprobs.logprob),
            top=tuple(self._entry(token_id, logprob) for token_id, logprob in logprobs.top),
            is_hidden=self._hides_special and self._tokenizer.is_special(logprobs.token_id),
        )

    def _entry(self, token_id: int, logprob: float) -> LogprobEntry:
        return LogprobEntry(
            token_id=token_id,
            token=self._tokenizer.token_string(token_id),
            token_bytes=self._tokenizer.token_bytes(token_id),
            logprob=logprob,
        )


_REASONS: dict[type[EngineError], FinishReason] = {
    RequestRejected: FinishReason.REJECTED,
    DeadlineExceeded: FinishReason.EXPIRED,
    EngineUnavailable: FinishReason.ABORTED,  # cut off by the end of the server
}


class LiveRequest:
    """Fed by the receiver, read by one reader; over when every choice has ended, or with an error.

    `news` is set whenever there is something to read; several requests may share it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sequence_ids: tuple[SequenceId, ...],
        tokenizer: Tokenizer,
        news: asyncio.Event,
    ) -> None:
        self.request = request
        self.arrived_s = time.monotonic()
        self.num_unstarted = len(sequence_ids)
        """Choices that were not part of a step yet."""
        self.choices = {
            sequence_id: Choice(index, request, tokenizer) for index, sequence_id in enumerate(sequence_ids)
        }
        self.error: EngineError | None = None
        self._news = news

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

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

    def push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in news of one of the choices."""
        if output.finish_reason is FinishReason.REJECTED:
            self.fail(RequestRejected(output.message, param="prompt", code="context_length_exceeded"))
        elif output.finish_reason is FinishReason.FAILED:
            self.fail(RequestFailed(output.message or "the model failed on this request"))
        elif output.finish_reason is FinishReason.EXPIRED and not self._has_tokens:
            self.fail(DeadlineExceeded(output.message))
        else:
            self.choices[output.sequence_id].push(output, eos_token_ids)
            self._news.set()

    def fail(self, error: EngineError) -> None:
        """End it with an error; the first one counts."""
        self.error = self.error or error
        self._news.set()

    def take(self) -> list[TokenOutput]:
        """What is new; may be nothing. Raises the error that ended the request."""
        if self.error is not None:
            raise self.error
        return [choice.take() for choice in self.choices.values() if choice.has_news]

    @property
    def _has_tokens(self) -> bool:
        return any(choice.num_tokens for choice in self.choices.values())
