"""Replies in harmony, the format of gpt-oss: messages, each in a channel.

    <|channel|>analysis<|message|> ... <|end|><|start|>assistant<|channel|>final<|message|> ...

Owns: which messages are reasoning, which are the answer. A message with a recipient is passed on with its
header, for the reader of tool calls.
Pure: fed with text in pieces of any size. The pieces, joined, are the same however it was cut.
Source: the description of the format that OpenAI published with gpt-oss.
"""

from collections.abc import Callable

from server.api.chat.reasoning import Phase, ReasoningStart, Splitter
from server.reply.tool_calls.events import Content, Reasoning
from server.reply.tool_calls.marks import MarkFinder

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
MARKS = (START, CHANNEL, "<|constrain|>", MESSAGE, END, CALL, "<|return|>")
_ENDS = frozenset({END, CALL, "<|return|>"})
_MAX_HEADER_CHARS = 256
_REASONING = "analysis"


class HarmonySplitter(Splitter):
    """Splits the text of one choice."""

    def __init__(self, start: ReasoningStart) -> None:
        super().__init__(start)
        self._finder = MarkFinder(*MARKS)
        self._header: list[str] = []
        self._is_call = False
        self._pieces: list[Reasoning | Content] = []
        in_header = start is ReasoningStart.POSSIBLE
        self._state: Callable[[str, str], None] = self._in_header if in_header else self._in_body

    def feed(self, text: str) -> list[Reasoning | Content]:
        for char in text:
            self._state(*self._finder.push(char))
        return self._take()

    def finish(self) -> list[Reasoning | Content]:
        self._state(self._finder.flush(), "")
        if self._header:
            self._answer_without_header()
        return self._take()

    def _take(self) -> list[Reasoning | Content]:
        taken, self._pieces = self._pieces, []
        return _joined(taken)

    def _in_header(self, text: str, mark: str) -> None:
        self._header += [text, mark]
        if mark == MESSAGE:
            self._open("".join(self._header))
        elif mark in _ENDS:
            self._header.clear()
        elif sum(map(len, self._header)) > _MAX_HEADER_CHARS:
            self._answer_without_header()

    def _answer_without_header(self) -> None:
        """Take a text that is no header for the answer."""
        text = "".join(self._header)
        self._header.clear()
        self.phase = Phase.ANSWER
        self._state = self._in_body
        self._add(text)

    def _open(self, header: str) -> None:
        self._header.clear()
        self._state = self._in_body
        channel = header.partition(CHANNEL)[2].partition("<")[0].split()
        recipient = header.partition(" to=")[2].partition("<")[0].split()
        self._is_call = bool(recipient)
        self.phase = Phase.ANSWER
        if recipient:
            self._add(f"{CHANNEL}commentary to={recipient[0]}{MESSAGE}")
        elif channel[:1] == [_REASONING]:
            self.phase = Phase.REASONING
            self.has_block = True

    def _in_body(self, text: str, mark: str) -> None:
        self._add(text)
        if mark in _ENDS or mark in (START, CHANNEL):
            if self._is_call:
                self._add(CALL)
            self._is_call = False
            self._header = [] if mark in _ENDS else [mark]
            self._state = self._in_header
        else:
            self._add(mark)

    def _add(self, text: str) -> None:
        if text:
            is_reasoning = self.phase is Phase.REASONING
            self._pieces.append(Reasoning(text) if is_reasoning else Content(text))


def _joined(pieces: list[Reasoning | Content]) -> list[Reasoning | Content]:
    """Join neighbours of one kind."""
    joined: list[Reasoning | Content] = []
    for piece in pieces:
        if joined and type(joined[-1]) is type(piece):
            joined[-1] = type(piece)(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined
