"""The call of a reply that a grammar keeps to the arguments of one named tool.

Owns: that the whole text is the arguments.
"""

from server.tool_calls.events import ToolCallParser


class ForcedCallParser(ToolCallParser):
    """One call, of this name, whatever the text is."""

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
        """Nothing is held back."""
