"""TokenOutputs to text completions, whole and in chunks.

Owns: the shapes that OpenAI documents for /v1/completions (a chunk has the shape of a whole reply), the
echo, and which of several choices are the best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from engine.types import ChosenLogprob, FinishReason, TokenOutput, TokenText
from server.reply.generate.replies import (
    ChunkWriter,
    CollectedChoice,
    Collector,
    ReplyPlan,
    shown_times,
)
from server.reply.generate.wire_logprobs import (
    COMPLETION_LISTS,
    GrowingLists,
    TokenOffsets,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """Everything that is known about a completion before its first token."""

    shared: ReplyPlan
    """Its n counts all that are generated."""
    num_kept: int
    """Choices of each prompt that are returned: the ones with the highest log-probability per token."""
    num_logprobs: int
    generates: bool
    """False: only the prompt comes back."""
    echoes: tuple[str, ...]
    """Text with which each prompt's choices begin; empty if nothing is echoed."""
    first_tokens: tuple[TokenText, ...]
    """The first token of each prompt, which has no log-probability; empty if nothing is echoed."""

    def prompt_of(self, number: int) -> int:
        """The place of the prompt of a choice."""
        return number // self.shared.n

    def echo(self, number: int) -> str:
        return self.echoes[self.prompt_of(number)] if self.echoes else ""

    def seen(self, output: TokenOutput) -> TokenOutput:
        """The shown part of an output: if only the prompt is wanted, without the sampled token."""
        if self.generates:
            return output
        is_over = output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        reason = FinishReason.LENGTH if is_over else output.finish_reason
        return replace(output, text="", token_ids=(), logprobs=(), finish_reason=reason, stop_reason=None)

    def echoed_logprobs(self, number: int, tokens: Sequence[ChosenLogprob]) -> dict[str, Any]:
        return echoed_logprobs(
            self.first_tokens[self.prompt_of(number)],
            tokens,
            self.echo(number),
            num_top=self.num_logprobs,
            names=self.shared.token_names,
        )


class CompletionReply:
    """The whole reply at once."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._collector = Collector(plan.shared)
        numbers = range(plan.shared.num_choices if plan.shared.has_logprobs else 0)
        self._logprobs = [GrowingLists(*COMPLETION_LISTS) for _ in numbers]
        self._offsets = [TokenOffsets(len(plan.echo(number))) for number in numbers]

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        output = self._plan.seen(output)
        number = self._collector.add(prompt_index, output)
        if self._logprobs:
            names = self._plan.shared.token_names
            self._logprobs[number].add(completion_logprobs(output.logprobs, self._offsets[number], names))

    def finish(self) -> dict[str, Any]:
        choices, usage = self._collector.finish()
        kept = best_of(choices, self._plan)
        return {
            **self._plan.shared.head.body("text_completion"),
            "choices": [self._choice(index, number, choices[number]) for index, number in enumerate(kept)],
            "usage": usage,
            **shown_times(self._plan.shared.journal),
        }

    def _choice(self, index: int, number: int, choice: CollectedChoice) -> dict[str, Any]:
        plan = self._plan
        shown: dict[str, Any] = {
            "index": index,
            "text": plan.echo(number) + choice.text,
            "logprobs": self._shown_logprobs(number, choice) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "token_ids": None,
        }
        if plan.shared.num_prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(
                choice.prompt_logprobs, num_top=plan.shared.num_prompt_logprobs
            )
        if plan.shared.has_token_ids:
            shown["prompt_token_ids"] = list(plan.shared.prompts[plan.prompt_of(number)])
            shown["token_ids"] = choice.token_ids
        return shown

    def _shown_logprobs(self, number: int, choice: CollectedChoice) -> dict[str, Any]:
        lists = self._logprobs[number]
        if self._plan.echoes:
            echoed = GrowingLists(*COMPLETION_LISTS)
            echoed.add(self._plan.echoed_logprobs(number, choice.prompt_logprobs))
            lists.follow(echoed)
        return dict(lists.json())


def best_of(choices: Sequence[CollectedChoice], plan: CompletionPlan) -> list[int]:
    """Numbers of the choices to return: each prompt's best, best first; all, in order, if all are kept."""
    size = plan.shared.n
    if plan.num_kept == size:
        return list(range(len(choices)))
    kept: list[int] = []
    for start in range(0, len(choices), size):
        ranked = sorted(range(start, start + size), key=lambda number: -_mean_logprob(choices[number]))
        kept += ranked[: plan.num_kept]
    return kept


def _mean_logprob(choice: CollectedChoice) -> float:
    return choice.sum_logprobs / choice.num_logprobs if choice.num_logprobs else 0.0


class CompletionStream:
    """The reply in chunks; the last one of a choice carries its finish reason."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._writer = ChunkWriter(plan.shared, "text_completion")
        num_choices = plan.shared.num_choices
        self._has_begun = [False] * num_choices
        self._offsets = [TokenOffsets(len(plan.echo(number))) for number in range(num_choices)]

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        output = self._plan.seen(output)
        number, finish_reason = self._writer.tally.add(prompt_index, output)
        is_first, self._has_begun[number] = not self._has_begun[number], True
        has_echo = is_first and bool(self._plan.echoes)
        is_silent = not output.text and not output.logprobs and finish_reason is None
        if is_silent and not has_echo and not self._writer.is_wordy:
            return []  # the text of these tokens is still held back
        choice = _choice(number, (self._plan.echo(number) if is_first else "") + output.text)
        choice["logprobs"] = self._logprobs(number, output, has_echo=has_echo)
        if finish_reason is not None:
            choice["finish_reason"] = finish_reason
            choice["stop_reason"] = output.stop_reason
        if self._plan.shared.has_token_ids:
            if is_first:
                choice["prompt_token_ids"] = list(self._plan.shared.prompts[prompt_index])
            choice["token_ids"] = list(output.token_ids)
        return [self._writer.chunk(choice)]

    def finish(self) -> list[dict[str, Any]]:
        return self._writer.finish()

    def _logprobs(self, number: int, output: TokenOutput, *, has_echo: bool) -> dict[str, Any] | None:
        plan = self._plan
        if not plan.shared.has_logprobs:
            return None
        generated = completion_logprobs(output.logprobs, self._offsets[number], plan.shared.token_names)
        if not has_echo:
            return generated
        return joined(plan.echoed_logprobs(number, output.prompt_logprobs), generated)


def _choice(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": None, "finish_reason": None}
