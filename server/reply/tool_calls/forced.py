"""Calls in a reply that a grammar keeps to calls: the arguments of one named tool, or a list of calls.

Owns: that nothing in such a reply is content.
"""

from server.reply.tool_calls.events import Content, ToolCallParser, ToolEvent
from server.reply.tool_calls.object_calls import ObjectCallParser


class ForcedCallParser(ToolCallParser):
    """A single call of this name, whose arguments are the whole text."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._has_started = False

    def _push(self, char: str) -> None:
        if not self._has_started:
            if char.isspace():
                return
            self._has_started = True
            self._log.start(self._name)
        self._log.arguments(char)

    def _end(self) -> None:
        """Holds back no text."""


class ForcedListParser(ObjectCallParser):
    """A list of calls. If it was cut off between two of them, the rest is dropped."""

    def feed(self, text: str) -> list[ToolEvent]:
        return _calls_only(super().feed(text))

    def finish(self) -> list[ToolEvent]:
        return _calls_only(super().finish())


def _calls_only(events: list[ToolEvent]) -> list[ToolEvent]:
    return [event for event in events if not isinstance(event, Content)]
