"""Text between messages, in rows with marks around the answer: a header, or a reply without any.

Owns: what such a text turns out to be.
Never: the messages (machine.py).
"""

from server.reply.reading.row import AnswerMarks, CallName, Phase

_MAX_CHARS = 512
"""More text before any mark is the answer."""


class MessageHeader:
    """Fed with the text outside of messages."""

    def __init__(self, answer: AnswerMarks) -> None:
        self._answer = answer
        self.text = ""
        self.has_region = False
        """There was a message, so that text outside of one belongs to nothing."""

    def add(self, text: str) -> str:
        """Return the text that is the answer after all, since it is too long for a header."""
        self.text += text
        if len(self.text) <= _MAX_CHARS:
            return ""
        self.has_region = True
        return self._taken()

    def read(self) -> tuple[Phase, CallName | None, str]:
        """Return what begins behind the header, and the header itself."""
        assert self._answer.read_head is not None
        self.has_region = True
        text = self._taken()
        return *self._answer.read_head(text), text + self._answer.head_end

    def end(self, *, is_last: bool) -> tuple[Phase, str]:
        """End a header that nothing follows: it is text, if it is of a known channel or all there is."""
        text, read = self._taken(), self._answer.read_lost_head
        phase, said = (Phase.ANSWER, "") if read is None else read(text)
        is_all = is_last and not self.has_region and not any(frame in text for frame in self._answer.frames)
        self.has_region |= bool(said)
        return phase, said or (text if is_all else "")

    def _taken(self) -> str:
        text, self.text = self.text, ""
        return text
