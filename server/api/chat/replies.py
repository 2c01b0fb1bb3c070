"""TokenOutputs to chat completions, whole and in chunks."""

from collections.abc import Sequence
from typing import Any

from engine.types import FinishReason, TokenOutput
from server.api.chat.message_reader import (
    PLAIN,
    Message,
    MessageReader,
    Piece,
    Reading,
    ToolCall,
    reasoning_fields,
)
from server.reply.generate.replies import (
    ChunkWriter,
    CollectedChoice,
    Collector,
    ReplyPlan,
    Tally,
    shown_times,
)
from server.reply.generate.wire_logprobs import GrowingLists, chat_logprobs, prompt_logprobs
from server.reply.reading.events import Arguments, Content, Reasoning


class ChatReply:
    """The whole reply at once."""

    def __init__(self, plan: ReplyPlan, reading: Reading = PLAIN) -> None:
        self._plan = plan
        self._collector = Collector(plan)
        self._readers = ChoiceReaders(plan, reading, self._collector.tally)
        self._messages = [Message(reading.echo) for _ in range(plan.num_choices)]
        num_lists = plan.num_choices if plan.has_logprobs else 0
        self._logprobs = [GrowingLists("content") for _ in range(num_lists)]

    def update(self, prompt_index: int, output: TokenOutput) -> None:
        number = self._collector.add(prompt_index, output)
        if self._logprobs:
            content = chat_logprobs(output.logprobs, self._plan.token_names)["content"]
            self._logprobs[number].add({"content": content})
        self._messages[output.index].add(self._readers.read(output))

    def finish(self) -> dict[str, Any]:
        choices, usage = self._collector.finish()
        reply: dict[str, Any] = {
            **self._plan.head.body("chat.completion"),
            "choices": [self._choice(number, choice) for number, choice in enumerate(choices)],
            "usage": usage,
            "prompt_logprobs": None,
        }
        if self._plan.num_prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                choices[0].prompt_logprobs, num_top=self._plan.num_prompt_logprobs
            )
        if self._plan.has_token_ids:
            reply["prompt_token_ids"] = list(self._plan.prompts[0])
        return reply | shown_times(self._plan.journal)

    def _choice(self, number: int, choice: CollectedChoice) -> dict[str, Any]:
        logprobs = {**self._logprobs[number].json(), "refusal": None} if self._logprobs else None
        shown = {
            "index": number,
            "message": self._messages[number].body(),
            "logprobs": logprobs,
            "finish_reason": self._readers.of[number].finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if self._plan.has_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown


class ChatStream:
    """The reply in chunks: the role first, then text, then the reason of the end, once for each choice.

    Reasoning comes before the answer. A call begins with its id and name; its arguments follow in pieces.
    """

    def __init__(self, plan: ReplyPlan, reading: Reading = PLAIN) -> None:
        self._plan = plan
        self._has_logprobs = plan.has_logprobs
        self._writer = ChunkWriter(plan, "chat.completion.chunk")
        self._readers = ChoiceReaders(plan, reading, self._writer.tally)
        # A reply that calls tools may have no more content than that of its first chunk.
        self._empty = {"content": ""} if reading.is_plain else {}
        self._echo = reading.echo
        self._has_begun = False

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        writer = self._writer
        chunks = self._first_chunks()
        number, finish_reason = writer.tally.add(prompt_index, output)
        chunks += self._delta_chunks(number, output)
        if finish_reason is not None:
            choice = _choice(number, {})
            choice["finish_reason"] = self._readers.of[number].finish_reason(finish_reason)
            choice["stop_reason"] = output.stop_reason
            chunks.append(writer.chunk(choice))
        if self._plan.has_token_ids:
            chunks[-1]["choices"][0]["token_ids"] = list(output.token_ids)
        return chunks

    def _first_chunks(self) -> list[dict[str, Any]]:
        """Begin all choices, before any token, in the order by which OpenAI's client gives them places."""
        if self._has_begun:
            return []
        self._has_begun = True
        role = {"role": "assistant", "content": ""}
        begun = [role, {"content": self._echo}] if self._echo else [role]
        numbers = range(self._plan.num_choices)
        chunks = [self._writer.chunk(_choice(number, delta)) for number in numbers for delta in begun]
        if self._plan.has_token_ids:
            chunks[0]["prompt_token_ids"] = list(self._plan.prompts[0])
        return chunks

    def _delta_chunks(self, number: int, output: TokenOutput) -> list[dict[str, Any]]:
        """Chunks of an output's pieces; the first has the logprobs of all its tokens."""
        writer = self._writer
        deltas = [_delta(piece) for piece in self._readers.read(output)]
        if not deltas and (output.logprobs or (writer.is_wordy and output.finish_reason is None)):
            deltas = [self._empty]
        choices = [_choice(number, delta) for delta in deltas]
        if choices and self._has_logprobs:
            choices[0]["logprobs"] = chat_logprobs(output.logprobs, self._plan.token_names)
        return [writer.chunk(choice) for choice in choices]

    def finish(self) -> list[dict[str, Any]]:
        return self._writer.finish()


class ChoiceReaders:
    """Readers of the choices; their reasoning tokens are counted together."""

    def __init__(self, plan: ReplyPlan, reading: Reading, tally: Tally) -> None:
        self.of = [MessageReader(reading) for _ in range(plan.num_choices)]
        self._tally = tally
        if reading.reports_reasoning:
            tally.num_reasoning_tokens = 0

    def read(self, output: TokenOutput) -> Sequence[Piece]:
        reader = self.of[output.index]
        num_before = reader.num_reasoning_tokens
        pieces = reader.feed(output.text, output.token_ids)
        if output.finish_reason is not None:
            is_cut = output.finish_reason is not FinishReason.STOP or output.stop_reason is not None
            pieces = [*pieces, *reader.finish(is_cut=is_cut)]
        if self._tally.num_reasoning_tokens is not None:
            self._tally.num_reasoning_tokens += reader.num_reasoning_tokens - num_before
        return pieces


class OnlyChoice:
    """The pieces of a reply with one choice, for protocols with shapes of their own."""

    def __init__(self, plan: ReplyPlan, reading: Reading = PLAIN) -> None:
        self._tally = Tally(plan)
        self._readers = ChoiceReaders(plan, reading, self._tally)
        self.is_plain = reading.is_plain
        self.finish_reason = "stop"
        self.stop_reason: int | str | None = None

    def read(self, prompt_index: int, output: TokenOutput) -> Sequence[Piece]:
        _, reason = self._tally.add(prompt_index, output)
        pieces = self._readers.read(output)
        self.finish_reason = self._readers.of[0].finish_reason(reason) or self.finish_reason
        self.stop_reason = output.stop_reason
        return pieces

    @property
    def ends_in_call(self) -> bool:
        """The reply was cut off inside of a call."""
        return self._readers.of[0].ends_in_call

    def usage(self) -> dict[str, Any]:
        """The usage of a reply that is complete."""
        self._tally.check_complete()
        return self._tally.usage()


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Reasoning():
            return dict(reasoning_fields(piece.text))
        case Content():
            return {"content": piece.text}
        case ToolCall():
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Arguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _choice(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
