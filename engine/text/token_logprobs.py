"""Log-probabilities with the texts of their tokens; for a prompt, collected until they are complete."""

from collections.abc import Iterable, Sequence
from typing import overload

from engine.text.tokenizer import SpecialTokens, Tokenizer
from engine.types import ChosenLogprob, GenerationRequest, LogprobEntry
from scheduler.messages import TokenLogprobs


def explain(logprobs: TokenLogprobs, tokenizer: Tokenizer, special: SpecialTokens) -> ChosenLogprob:
    return ChosenLogprob(
        chosen=_entry(logprobs.token_id, logprobs.logprob, tokenizer),
        top=tuple(_entry(token_id, logprob, tokenizer) for token_id, logprob in logprobs.top),
        rank=logprobs.rank,
        is_hidden=special is SpecialTokens.SKIP and tokenizer.is_special(logprobs.token_id),
    )


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> LogprobEntry:
    return LogprobEntry(
        token_id=token_id,
        token=tokenizer.token_string(token_id),
        token_bytes=tokenizer.token_bytes(token_id),
        logprob=logprob,
    )


class ExplainedLogprobs(Sequence[ChosenLogprob]):
    """A sequence that looks texts up when an entry is read: for a long prompt that is work for a thread."""

    def __init__(self, logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> None:
        self._logprobs = logprobs
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._logprobs)

    @overload
    def __getitem__(self, place: int) -> ChosenLogprob: ...
    @overload
    def __getitem__(self, place: slice) -> "ExplainedLogprobs": ...
    def __getitem__(self, place: int | slice) -> "ChosenLogprob | ExplainedLogprobs":
        if isinstance(place, slice):
            return ExplainedLogprobs(self._logprobs[place], self._tokenizer)
        return explain(self._logprobs[place], self._tokenizer, SpecialTokens.KEEP)


class CollectedPromptLogprobs:
    """The log-probabilities of one prompt, which come chunk by chunk from the request's first sequence."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        is_asked = request.params.num_prompt_logprobs is not None
        self._num_missing = len(request.prompt_token_ids) - 1 if is_asked else 0
        self._tokenizer = tokenizer
        self._found: list[TokenLogprobs] = []
        self._unreported = set(range(request.n)) if is_asked else set()

    @property
    def is_complete(self) -> bool:
        return self._num_missing <= 0

    @property
    def num_found(self) -> int:
        """Positions of the prompt that have come."""
        return len(self._found)

    def push(self, logprobs: Iterable[TokenLogprobs]) -> None:
        num_before = len(self._found)
        self._found.extend(logprobs)
        self._num_missing -= len(self._found) - num_before

    def take(self, index: int) -> Sequence[ChosenLogprob]:
        """Return all of them, once for each choice."""
        if index not in self._unreported:
            return ()
        self._unreported.discard(index)
        return ExplainedLogprobs(self._found, self._tokenizer)
