"""A call in open thoughts, which is one if the model ends the reply behind it.

Owns: the text since its opening mark, read as calls, until it is known whether it is one.
Never: thoughts that are closed: a call in those is a draft of the model's own.
"""

from typing import TYPE_CHECKING

from server.reply.reading.events import Content, Event

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
