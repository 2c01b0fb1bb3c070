"""TokenOutputs to chat completions, whole and in chunks.

Owns: the shapes that OpenAI documents for /v1/chat/completions.
Never: bytes (sse.py), counting (replies.py).
"""

from typing import Any

from engine.types import TokenOutput
from server.logprobs import chat_logprobs
from server.replies import ChunkWriter, CollectedChoice, Collector, ReplyPlan


class ChatReply:
    """The whole reply at once."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._collector = Collector(plan)

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        self._collector.add(prompt_index, output)

    def finish(self) -> dict[str, Any]:
        choices, usage = self._collector.finish()
        return {
            **self._plan.head.body("chat.completion"),
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, number: int, choice: CollectedChoice) -> dict[str, Any]:
        return {
            "index": number,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs) if self._plan.has_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatStream:
    """The reply in chunks: the role first, then text, then the reason of the end, once for each choice."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._has_logprobs = plan.has_logprobs
        self._writer = ChunkWriter(plan, "chat.completion.chunk")
        self._has_begun = [False] * plan.num_choices

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        writer = self._writer
        number, finish_reason = writer.tally.add(prompt_index, output)
        chunks = []
        if not self._has_begun[number]:
            self._has_begun[number] = True
            chunks.append(writer.chunk(_choice(number, {"role": "assistant", "content": ""})))
        if output.text or output.logprobs or (writer.is_wordy and finish_reason is None):
            choice = _choice(number, {"content": output.text})
            if self._has_logprobs:
                choice["logprobs"] = chat_logprobs(output.logprobs)
            chunks.append(writer.chunk(choice))
        if finish_reason is not None:
            choice = _choice(number, {})
            choice["finish_reason"] = finish_reason
            choice["stop_reason"] = output.stop_reason
            chunks.append(writer.chunk(choice))
        return chunks

    def finish(self) -> list[dict[str, Any]]:
        return self._writer.finish()


def _choice(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
