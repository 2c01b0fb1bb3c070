"""Marks such as `<tool_call>` in a text that comes character by character.

Owns: the text that is held back because it may be the beginning of a mark.
"""


class MarkFinder:
    """Finds several marks, none of which is the beginning of another one."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self._first_chars = frozenset(mark[0] for mark in marks)
        self._held = ""

    def push(self, char: str) -> tuple[str, str]:
        """The text that is certainly no mark, and the mark that is complete now, or ""."""
        if not self._held and char not in self._first_chars:
            return char, ""
        held = self._held + char
        start = 0
        while not any(mark.startswith(held[start:]) for mark in self._marks):
            start += 1
        rest = held[start:]
        if rest in self._marks:
            self._held = ""
            return held[:start], rest
        self._held = rest
        return held[:start], ""

    def flush(self) -> str:
        """End the text: held-back text is no mark."""
        held, self._held = self._held, ""
        return held
