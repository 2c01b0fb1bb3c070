"""Reasoning and answer in generated text: a block such as <think> ... </think>, at the beginning of a reply.

Owns: where the block begins and ends, also where the prompt has opened it.
Never: tool calls, which begin after it (tool_calls/), or counting tokens (message_reader.py).
Pure: fed with text in pieces of any size. The pieces, joined, are the same however it was cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, StrEnum

from server.reply.tool_calls.events import Content, Reasoning, ToolEvent
from server.reply.tool_calls.marks import MarkFinder


class ReasoningStart(StrEnum):
    """State of the block before the first token."""

    NONE = "none"  # there is none: all is the answer
    OPEN = "open"  # the prompt ends inside of it
    POSSIBLE = "possible"  # the model opens it, or does not


class Phase(Enum):
    """Place of the text in the reply."""

    UNDECIDED = "undecided"
    REASONING = "reasoning"
    ANSWER = "answer"


Pieces = Reasoning | ToolEvent


class Splitter(ABC):
    """Text of one choice in, reasoning and answer out."""

    def __init__(self, start: ReasoningStart) -> None:
        self.phase = Phase.REASONING if start is ReasoningStart.OPEN else Phase.UNDECIDED
        if start is ReasoningStart.NONE:
            self.phase = Phase.ANSWER
        self.has_block = start is ReasoningStart.OPEN
        """The block has begun, by now; empty or not."""
        self.is_cut_off = False
        """The text ends, and the model has not ended it. Set before `finish`."""

    @property
    def is_inside_call(self) -> bool:
        """A call has begun and not ended, where calls are read here too."""
        return False

    @abstractmethod
    def feed(self, text: str) -> Sequence[Pieces]:
        """Return the pieces that are certain by now."""

    @abstractmethod
    def finish(self) -> Sequence[Pieces]:
        """The text has ended."""


class ReasoningSplitter(Splitter):
    """A block between two marks, before the answer. A block that is not closed stays reasoning."""

    def __init__(self, start: ReasoningStart, *, begin: str, end: str) -> None:
        super().__init__(start)
        self._start = start
        self._begin = begin
        self._state: Callable[[str], None] = self._opening
        self._held = ""
        """Text that may become the opening mark."""
        self._end_mark = MarkFinder(end)
        self._spaces: list[str] = []
        self._is_blank = True
        """No text of the block yet."""
        self._reasoning: list[str] = []
        self._answer: list[str] = []

    def feed(self, text: str) -> list[Pieces]:
        for place, char in enumerate(text):
            if self.phase is Phase.ANSWER and self._state != self._behind:
                self._answer.append(text[place:])
                break
            self._state(char)
        return self._take()

    def finish(self) -> list[Pieces]:
        if self._state == self._opening and self._start is ReasoningStart.POSSIBLE:
            self._answer.append(self._held)
        elif self.phase is Phase.REASONING:
            self._add_reasoning(self._held + self._end_mark.flush())
        return self._take()

    def _take(self) -> list[Pieces]:
        taken: list[Pieces] = []
        if self._reasoning:
            taken.append(Reasoning("".join(self._reasoning)))
        answer = "".join(self._answer)
        if answer:
            taken.append(Content(answer))
        self._reasoning.clear()
        self._answer.clear()
        return taken

    def _opening(self, char: str) -> None:
        """White space only and, perhaps, the beginning of the mark."""
        self._held += char
        visible = self._held.lstrip()
        if visible == self._begin:
            self._held = ""
            self.phase = Phase.REASONING
            self.has_block = True
            self._state = self._inside
        elif not self._begin.startswith(visible):
            held, self._held = self._held, ""
            if self._start is ReasoningStart.OPEN:
                self._state = self._inside
                for one in held:
                    self._inside(one)
            else:
                self.phase = Phase.ANSWER
                self._state = self._answering
                self._answer.append(held)

    def _inside(self, char: str) -> None:
        text, mark = self._end_mark.push(char)
        self._add_reasoning(text)
        if mark:
            self.phase = Phase.ANSWER
            self._state = self._behind

    def _behind(self, char: str) -> None:
        """White space between the block and the answer."""
        if not char.isspace():
            self._state = self._answering
            self._answer.append(char)

    def _answering(self, char: str) -> None:
        self._answer.append(char)

    def _add_reasoning(self, text: str) -> None:
        if self._is_blank:
            text = text.lstrip()
        visible = text.rstrip()
        if visible:
            self._is_blank = False
            self._reasoning += [*self._spaces, visible]
            self._spaces.clear()
        if not self._is_blank:
            self._spaces.append(text[len(visible) :])
