"""Events of a text: reasoning, content, the start of a call, a piece of a call's arguments.

Owns: the order of events, and the treatment of white space beside calls.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the block of reasoning, without its marks and the white space inside and behind them."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; the arguments that follow are its own until the next one begins."""

    index: int
    """Number of the call from 0, in the order of the text."""
    name: str
    id: str | None = None
    """The id that the model wrote; None in most dialects."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


ToolEvent = Content | CallStart | Arguments


class CallEvents:
    """Collects events between two looks. Neighbours of one kind become one event.

    White space next to a call separates it from its surroundings, and is content only where text stands on
    both sides: before the first call of several, and after the last.
    """

    def __init__(self) -> None:
        self._events: list[ToolEvent] = []
        self._pieces: list[str] = []
        """Text of the event under way: content, or arguments if `_is_in_call`."""
        self._is_in_call = False
        self._num_calls = 0
        self._is_after_call = False
        self._has_content = False
        self._spaces: list[str] = []
        """White space held back until the next character is known."""
        self._spaces_before_call: list[str] = []

    def content(self, text: str) -> None:
        visible = text.rstrip()
        if not visible:
            self._spaces.append(text)
            return
        self._switch_to_content()
        if self._is_after_call and not self._has_content:
            self._pieces.append(visible.lstrip())
        else:
            self._pieces += [*self._spaces_before_call, *self._spaces, visible]
        self._spaces_before_call.clear()
        self._spaces = [text[len(visible) :]]
        self._is_after_call = False
        self._has_content = True

    def start(self, name: str, call_id: str | None = None) -> None:
        self._close_event()
        if not self._is_after_call:
            self._spaces_before_call = list(self._spaces)
        self._spaces.clear()
        self._events.append(CallStart(self._num_calls, name, call_id))
        self._num_calls += 1
        self._is_in_call = self._is_after_call = True

    def arguments(self, text: str) -> None:
        """Number of the call that was started last."""
        self._pieces.append(text)

    def take(self) -> list[ToolEvent]:
        """Return all events since the last call."""
        self._close_event()
        events, self._events = self._events, []
        return events

    def finish(self) -> list[ToolEvent]:
        """Return the last events, with the white space at the end of a text that does not end in a call."""
        if self._spaces and not self._is_after_call:
            self._switch_to_content()
            self._pieces.extend(self._spaces)
            self._spaces.clear()
        return self.take()

    def _switch_to_content(self) -> None:
        if self._is_in_call:
            self._close_event()
            self._is_in_call = False

    def _close_event(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(Arguments(self._num_calls - 1, text) if self._is_in_call else Content(text))


class ToolCallParser(ABC):
    """Text in, events out. One for each choice."""

    def __init__(self) -> None:
        self._log = CallEvents()

    def feed(self, text: str) -> list[ToolEvent]:
        """Return the events that are certain by now."""
        for char in text:
            self._push(char)
        return self._log.take()

    def finish(self) -> list[ToolEvent]:
        """End the text: held-back text is content, or the end of the last call."""
        self._end()
        return self._log.finish()

    @property
    def is_inside_call(self) -> bool:
        """A call has begun and not ended."""
        return False

    @abstractmethod
    def _push(self, char: str) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...
