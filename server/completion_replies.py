"""TokenOutputs to text completions, whole and in chunks.

Owns: the shapes that OpenAI documents for /v1/completions; a chunk has the shape of a whole reply.
Never: bytes (sse.py), counting (replies.py).
"""

from typing import Any

from engine.types import TokenOutput
from server.logprobs import TokenOffsets, completion_logprobs
from server.replies import ChunkWriter, CollectedChoice, Collector, ReplyPlan


class CompletionReply:
    """The whole reply at once."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._collector = Collector(plan)

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        self._collector.add(prompt_index, output)

    def finish(self) -> dict[str, Any]:
        choices, usage = self._collector.finish()
        return {
            **self._plan.head.body("text_completion"),
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, number: int, choice: CollectedChoice) -> dict[str, Any]:
        has_logprobs = self._plan.has_logprobs
        return {
            "index": number,
            "text": self._plan.echo(number) + choice.text,
            "logprobs": completion_logprobs(choice.logprobs, TokenOffsets(0)) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class CompletionStream:
    """The reply in chunks; the last one of a choice carries its finish reason."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._has_logprobs = plan.has_logprobs
        self._writer = ChunkWriter(plan, "text_completion")
        self._unsent_echoes = [plan.echo(number) for number in range(plan.num_choices)]
        self._offsets = [TokenOffsets(0) for _ in range(plan.num_choices)]

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        number, finish_reason = self._writer.tally.add(prompt_index, output)
        text = self._unsent_echoes[number] + output.text
        self._unsent_echoes[number] = ""
        if not text and not output.logprobs and finish_reason is None and not self._writer.is_wordy:
            return []  # the text of these tokens is still held back
        logprobs = completion_logprobs(output.logprobs, self._offsets[number]) if self._has_logprobs else None
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return [self._writer.chunk(choice)]

    def finish(self) -> list[dict[str, Any]]:
        return self._writer.finish()
