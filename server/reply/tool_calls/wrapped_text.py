"""Text outside of calls, where calls may have wrappers: marks around several of them.

Owns: the wrappers that are dropped beside a call, and are content elsewhere.
Never: what a call looks like inside (named_calls.py, tagged_calls.py).
"""

from server.reply.tool_calls.events import CallEvents
from server.reply.tool_calls.marks import MarkFinder


class WrappedText:
    """Fed with the characters outside of calls."""

    def __init__(self, log: CallEvents, *, opening: str, wrappers: tuple[str, ...]) -> None:
        self._log = log
        self._opening = opening
        self._finder = MarkFinder(opening, *wrappers)
        self._held: list[str] = []
        """Wrappers, and white space behind them."""
        self._is_behind_call = False

    def push(self, char: str) -> bool:
        """True if the opening mark of a call is complete."""
        text, mark = self._finder.push(char)
        if text:
            self._add(text)
        if mark == self._opening:
            return True
        if mark and not self._is_behind_call:
            self._held.append(mark)
        return False

    def begin_after_call(self) -> None:
        """Go on behind a call, where wrappers are dropped."""
        self._held.clear()
        self._is_behind_call = True

    def hold_nothing(self) -> None:
        """Drop the wrappers before a call."""
        self._held.clear()

    def give_up(self, text: str) -> None:
        """Pass on `text`, which began as a call, with the wrappers before it."""
        self._release()
        self._log.content(text)
        self._is_behind_call = False

    def finish(self) -> None:
        """End the text: held-back text is content."""
        rest = self._finder.flush()
        if rest:
            self._add(rest)
        self._release()

    def _add(self, text: str) -> None:
        if self._held and text.isspace():
            self._held.append(text)
            return
        self._release()
        self._log.content(text)
        self._is_behind_call = self._is_behind_call and text.isspace()

    def _release(self) -> None:
        if self._held:
            self._log.content("".join(self._held))
            self._held.clear()
