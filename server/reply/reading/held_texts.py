"""Texts that are held until it is known what they are: calls in open thoughts, and headers of messages.

Owns: what such a text turns out to be. A call in open thoughts is one if the model ends the reply behind it;
in closed thoughts it is a draft of the model's own. Text between messages, in rows with marks around the
answer, is a header, or a reply without any.
Never: the messages and the thoughts themselves (machine.py).
"""

from typing import TYPE_CHECKING

from server.reply.reading.events import Content, Event
from server.reply.reading.row import AnswerMarks, CallName, Phase

if TYPE_CHECKING:
    from server.reply.reading.machine import ReplyReader

MAX_DRAFT_CHARS = 256 * 1024
"""Longer calls in open thoughts are thoughts."""


class Draft:
    """Fed with texts and marks, each apart, so that it is given up in the same place however they are cut."""

    def __init__(self, reader: "ReplyReader") -> None:
        """`reader`: of the same row, behind thoughts."""
        self._reader = reader
        self._pieces: list[str] = []
        self._num_chars = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> bool:
        """Take text in; False if no call has it, or it stands behind one: then all of it are thoughts."""
        self._pieces.append(text)
        self._num_chars += len(text)
        return self._num_chars <= MAX_DRAFT_CHARS and not _has_content(self._reader.feed(text))

    def ends_in_calls(self) -> bool:
        """Whether the text, at the end of the reply, is calls and nothing else."""
        return not _has_content(self._reader.finish()) and self._reader.has_whole_calls


def _has_content(events: list[Event]) -> bool:
    return any(isinstance(event, Content) for event in events)


_MAX_HEADER_CHARS = 512
"""More text before any mark is the answer."""


class MessageHeader:
    """Fed with the text outside of messages."""

    def __init__(self, answer: AnswerMarks) -> None:
        self._answer = answer
        self.text = ""
        self.has_region = False
        """There was an answer, or a call, so that text outside of one belongs to nothing."""

    def add(self, text: str) -> str:
        """Return the text that is the answer after all, since it is too long for a header."""
        self.text += text
        if len(self.text) <= _MAX_HEADER_CHARS:
            return ""
        self.has_region = True
        return self._taken()

    def read(self) -> tuple[Phase, CallName | None, str]:
        """Return what begins behind the header, and the header itself."""
        assert self._answer.read_head is not None
        self.has_region = True
        text = self._taken()
        return *self._answer.read_head(text), text + self._answer.head_end

    def end(self) -> tuple[Phase, str]:
        """End a header that nothing follows: it is text, if of a known channel, or before any answer."""
        text, read = self._taken(), self._answer.read_lost_head
        phase, said = (Phase.ANSWER, "") if read is None else read(text)
        is_all = not self.has_region and not any(frame in text for frame in self._answer.frames)
        self.has_region |= bool(said)
        return phase, said or (text if is_all else "")

    def _taken(self) -> str:
        text, self.text = self.text, ""
        return text
