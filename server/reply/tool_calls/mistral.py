"""Calls as Mistral's models write them.

    up to tokenizer v7    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    v11                   [TOOL_CALLS]name{...}
    v13                   [TOOL_CALLS]name[CALL_ID]123456789[ARGS]{...}     the id may be absent

Owns: the newer form, in which the name stands before the arguments; the older one is object_calls.py's.
Source: the instruct tokenizers of mistral-common.
"""

from server.reply.tool_calls.call_reader import Progress, ValueScanner
from server.reply.tool_calls.marks import MarkFinder
from server.reply.tool_calls.object_calls import ObjectCallParser, ObjectSyntax

OPENING = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_MAX_NAME_CHARS = 256
_NOT_IN_NAMES = frozenset("{}\"'<>(),;:")


class MistralParser(ObjectCallParser):
    """One `[TOOL_CALLS]` may be followed by a list of objects, or by one name."""

    def __init__(self) -> None:
        super().__init__(ObjectSyntax(opening=OPENING), frozenset())
        self._name: list[str] = []
        self._marks_in_name = MarkFinder(CALL_ID, ARGUMENTS)
        self._is_name_over = False
        self._value = ValueScanner()

    @property
    def is_inside_call(self) -> bool:
        return self._state == self._in_arguments or super().is_inside_call

    def _end(self) -> None:
        if self._state == self._in_name:
            self._undecided.append(self._marks_in_name.flush())
            self._log.content("".join(self._undecided))
        elif self._state != self._in_arguments:
            super()._end()

    def _before_call(self, char: str) -> None:
        is_first = len(self._undecided) == 1
        if is_first and (char.isalnum() or char == "_"):
            self._name.clear()
            self._marks_in_name = MarkFinder(CALL_ID, ARGUMENTS)
            self._is_name_over = False
            self._state = self._in_name
            self._in_name(char)
        else:
            super()._before_call(char)

    def _in_name(self, char: str) -> None:
        if char == "{":
            self._log.start("".join(self._name))
            self._value = ValueScanner()
            self._state = self._in_arguments
            self._in_arguments(char)
            return
        text, mark = self._marks_in_name.push(char)
        self._undecided.append(text + mark)
        if not self._is_name_over:
            self._name.append(text)
        self._is_name_over |= bool(mark)
        if char in _NOT_IN_NAMES or char.isspace() or len(self._undecided) > _MAX_NAME_CHARS:
            last = self._undecided.pop()
            self._undecided.append(last[:-1])
            self._give_up(last[-1])

    def _in_arguments(self, char: str) -> None:
        progress = self._value.push(char)
        if progress is not Progress.BEYOND:
            self._log.arguments(char)
        if progress is not Progress.INSIDE:
            self._undecided.clear()
            self._state = self._after_call
        if progress is Progress.BEYOND:
            self._after_call(char)
