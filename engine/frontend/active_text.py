"""A request for text between its admission and its end."""

import asyncio
from array import array
from typing import Any

from msgspec.structs import replace

from engine.frontend.active_request import ActiveRequest
from engine.process_messages import Begun
from engine.text.detokenizer import IncrementalDetokenizer, StopMatcher, StopText
from engine.text.token_logprobs import CollectedPromptLogprobs, explain
from engine.text.tokenizer import SpecialTokens, Tokenizer
from engine.types import ChosenLogprob, GenerationRequest, TokenOutput
from scheduler.messages import FinishReason, SequenceId, SequenceOutput

_MOST_UNREAD = 512
"""Tokens of a choice that a reader of the whole is not woken for. More would be turned into text at one go,
while other replies wait."""


class TextChoice:
    """One of the n continuations. Unread outputs are merged, so memory stays small."""

    def __init__(self, index: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.has_started = False
        self.is_readable = False
        self.num_tokens = 0
        self.generated = array("I")
        """Tokens so far; those of the output that ends it are left out."""
        self.last_token_s: float | None = None
        self._tokenizer = tokenizer
        self._special = SpecialTokens.SKIP if request.skip_special_tokens else SpecialTokens.KEEP
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            stop=_matcher_of(request),
            special=self._special,
            shown=request.shown_special_ids,
        )
        self._shows_stop = request.include_stop_str_in_output
        self._num_hidden = 0
        self._num_cached_tokens = self._num_kept_tokens = 0
        self._stop_reason: int | str | None = None
        self._may_wait = not request.stop
        """Whether text may be made when it is read: stop strings would have to be found at once."""
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._waiting_ids: list[int] = []
        """The last of `_token_ids`, which are not detokenized yet."""
        self._logprobs: list[ChosenLogprob] = []
        self._num_accepted = self._num_rejected = 0

    def push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        """Take in an output of the engine. Sets `finish_reason` if it was the last."""
        self.is_readable = True
        if output.start is not None and not self.generated:
            self._num_cached_tokens = output.start.num_cached_tokens
            self._num_kept_tokens = output.start.num_kept_tokens
        if output.finish_reason is None:
            self.generated.extend(output.token_ids)
        if self._may_wait and output.finish_reason is None:
            self._waiting_ids += output.token_ids
            self._keep(output, len(output.token_ids))
            return
        ends_by_token = output.finish_reason is FinishReason.STOP and not self._shows_stop
        self._waiting_ids += output.token_ids[:-1] if ends_by_token else output.token_ids
        self._make_text()
        if ends_by_token and self._detokenizer.matched_stop is None:
            self._num_hidden = 1  # the stop token: it counts, but it is not part of the text
        num_seen = self._detokenizer.num_tokens + self._num_hidden
        self._keep(output, num_seen - self.num_tokens)  # tokens after a stop string do not count
        if self._detokenizer.matched_stop is None and output.finish_reason is not None:
            self._texts.append(self._detokenizer.finish())
            self.finish_reason = output.finish_reason
            if output.finish_reason is FinishReason.STOP and output.token_ids[-1] not in eos_token_ids:
                self._stop_reason = output.token_ids[-1]
        if self._detokenizer.matched_stop is not None:  # also in text held back until the end
            self.finish_reason = FinishReason.STOP
            self._stop_reason = self._detokenizer.matched_stop

    def take(self) -> TokenOutput:
        """Return everything since the last call, as one output."""
        self._make_text()
        output = TokenOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            num_cached_tokens=self._num_cached_tokens,
            num_kept_tokens=self._num_kept_tokens,
            num_accepted_prediction=self._num_accepted,
            num_rejected_prediction=self._num_rejected,
        )
        self._num_accepted = self._num_rejected = 0
        self._texts.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        self.is_readable = False
        return output

    @property
    def num_unread(self) -> int:
        """Tokens since the last call of `take`."""
        return len(self._token_ids)

    def _make_text(self) -> None:
        if self._waiting_ids:
            self._texts.append(self._detokenizer.push(self._waiting_ids))
            self._waiting_ids.clear()

    def _keep(self, output: SequenceOutput, num_tokens: int) -> None:
        """Take the first tokens of an output for the reply."""
        self.num_tokens += num_tokens
        self._token_ids += output.token_ids[:num_tokens]
        logprobs = output.logprobs[:num_tokens]
        self._logprobs += [explain(each, self._tokenizer, self._special) for each in logprobs]
        if output.prediction is not None:
            num_accepted = min(output.prediction.num_accepted, num_tokens)
            self._num_accepted += num_accepted
            self._num_rejected += sum(output.prediction) - num_accepted


def _matcher_of(request: GenerationRequest) -> StopMatcher | None:
    if not request.stop:
        return None
    shown = StopText.INCLUDE if request.include_stop_str_in_output else StopText.EXCLUDE
    params = request.params
    return StopMatcher(request.stop, shown, answer=params.answer, min_tokens=params.min_tokens)


class ActiveText(ActiveRequest[GenerationRequest, TextChoice]):
    """A request for text."""

    def __init__(
        self,
        request: GenerationRequest,
        sequence_ids: tuple[SequenceId, ...],
        tokenizer: Tokenizer,
        readable: asyncio.Event,
        *,
        is_read_whole: bool = False,
    ) -> None:
        """A request that is read whole is readable at its end, and when much of it has not been read."""
        choices = {
            sequence_id: TextChoice(index, request, tokenizer)
            for index, sequence_id in enumerate(sequence_ids)
        }
        super().__init__(request, choices, readable)
        self._prompt_logprobs = CollectedPromptLogprobs(request, tokenizer)
        self._is_read_whole = is_read_whole

    def _push(self, output: SequenceOutput, eos_token_ids: tuple[int, ...]) -> None:
        if output.prompt_logprobs:
            self._prompt_logprobs.push(output.prompt_logprobs)
        if output.token_ids or output.finish_reason is not None:
            choice = self.choices[output.sequence_id]
            choice.push(output, eos_token_ids)
            if choice.finish_reason is not None:
                self._note_end()
            if not self._is_read_whole or self.is_over or choice.num_unread >= _MOST_UNREAD:
                self._readable.set()

    def take(self) -> list[TokenOutput]:
        """Return the new outputs, if any. Raises the error that ended the request."""
        if self.error is not None:
            raise self.error
        if not self._prompt_logprobs.is_complete and not self.is_over:
            return []  # the prompt's log-probabilities come first
        return [self._take(choice) for choice in self.choices.values() if choice.is_readable]

    def _take(self, choice: TextChoice) -> TokenOutput:
        output = choice.take()
        prompt_logprobs = self._prompt_logprobs.take(choice.index)
        return replace(output, prompt_logprobs=prompt_logprobs) if prompt_logprobs else output

    def fields_of_kind(self) -> dict[str, Any]:
        request = self.request
        adapter = request.adapter
        return {
            "params": request.params,
            "prediction": request.prediction,
            "restore_at": request.restore_at,
            "encoder_inputs": request.encoder_inputs,
            "payloads": request.payloads,
            "adapter": "" if adapter is None else adapter.identity,
            "adapter_folder": "" if adapter is None else adapter.folder,
        }

    def begun(self) -> tuple[Begun, ...]:
        if not self.has_started:
            return ()
        num_reported = self._prompt_logprobs.num_found
        return tuple(
            Begun(choice.index, tuple(choice.generated), 0 if choice.index else num_reported)
            for choice in self.choices.values()
            if choice.finish_reason is None
        )

    @property
    def has_reply(self) -> bool:
        has_tokens = any(choice.num_tokens for choice in self.choices.values())
        return has_tokens and self._prompt_logprobs.is_complete
