"""Events of a text: reasoning, content, the start of a call, a piece of a call's arguments.

Owns: the order of events, and the treatment of white space around parts and calls.
"""

from dataclasses import dataclass

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thoughts, without their marks and the white space inside and behind them."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A call begins; the arguments that follow are its own until the next one begins."""

    index: int
    """Number of the call from 0, in the order of the text."""
    name: str
    id: str | None = None
    """The id that the model wrote; None in most dialects."""


class Arguments(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The way in which several parts of one kind are joined."""

    keeps_spaces: bool = False
    """White space around each part stays."""
    join: str = ""
    """Text between two parts."""


class ReplyEvents:
    """Collects events between two looks. Neighbours of one kind become one event.

    White space next to a call separates it from its surroundings, and is content only where text stands on
    both sides: before the first call of several, and after the last.
    """

    def __init__(self, thoughts: Parts | None, content: Parts | None = None) -> None:
        """Without `content` its white space stays, but for that next to calls."""
        self._thoughts = _JoinedParts(thoughts or Parts())
        self._content = None if content is None else _JoinedParts(content)
        self._events: list[Event] = []
        self.pieces: list[str] = []
        """Text of the event under way; behind the start of a call, of its arguments."""
        self._kind: type[Reasoning | Content | Arguments] = Content
        self.num_calls = 0
        self.is_after_call = False
        """No text has come behind the last call."""
        self.has_content = False
        self._is_running = False
        """The last event is content that ends in no white space."""
        self._spaces: list[str] = []
        """White space held back until the next character is known."""
        self._spaces_before_call: list[str] = []

    def reasoning(self, text: str) -> None:
        certain = self._thoughts.add(text)
        if certain:
            if self._kind is not Reasoning:
                self._switch_to(Reasoning)
            self.pieces.append(certain)

    def content(self, text: str) -> None:
        if self._is_running and not text[-1].isspace():
            self.pieces.append(text)
            return
        if self._content is not None:
            text = self._content.add(text)
        visible = text.rstrip()
        if not visible:
            self._spaces.append(text)
            self._is_running = False
            return
        self._switch_to(Content)
        rest = text[len(visible) :]
        if self.is_after_call and not self.has_content:
            self.pieces.append(visible.lstrip())
        elif self._spaces or self._spaces_before_call:
            self.pieces += [*self._spaces_before_call, *self._spaces, visible]
        else:
            self.pieces.append(visible)
        self._spaces_before_call.clear()
        self._spaces = [rest] if rest else []
        self.is_after_call = False
        self.has_content = True
        self._is_running = not rest and self._content is None

    def content_of_call(self, text: str) -> None:
        """Content that stood in the call that is over, so that marks around calls may still follow."""
        self.content(text)
        self.is_after_call, self._is_running = True, False

    def start(self, name: str, call_id: str | None = None) -> None:
        self._close_event()
        if not self.is_after_call:
            self._spaces_before_call = list(self._spaces)
        self._spaces.clear()
        self._events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1
        self._kind = Arguments
        self._is_running = False
        self.is_after_call = True

    def arguments(self, text: str) -> None:
        """Number of the call that was started last."""
        if self._kind is not Arguments:
            self._switch_to(Arguments)
        self.pieces.append(text)

    def forget(self, *, last_call: CallStart | None) -> None:
        """Begin anew behind a prompt, in which a call may have begun."""
        self._events.clear()
        self.pieces.clear()
        self._spaces.clear()
        self._spaces_before_call.clear()
        self.num_calls, self.is_after_call, self.has_content, self._is_running = 0, False, False, False
        for parts in (self._thoughts, self._content):
            if parts is not None:
                parts.forget()
        if last_call is not None:
            self.start(last_call.name, last_call.id)

    def end_part(self) -> None:
        """End a part of the thoughts or of the content, whichever it is."""
        self._thoughts.end_part()
        if self._content is not None:
            self._content.end_part()

    def take(self) -> list[Event]:
        """Return all events since the last call."""
        if self.pieces:
            self._close_event()
        if not self._events:
            return []
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the last events, with the white space at the end of a text that does not end in a call."""
        if self._spaces and not self.is_after_call:
            self._switch_to(Content)
            self.pieces.extend(self._spaces)
            self._spaces.clear()
        return self.take()

    def _switch_to(self, kind: type[Reasoning | Content | Arguments]) -> None:
        if self._kind is not kind:
            self._close_event()
            self._kind = kind
            self._is_running = False

    def _close_event(self) -> None:
        pieces, kind = self.pieces, self._kind
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        if not text:
            return
        if kind is Arguments:
            self._events.append(Arguments(self.num_calls - 1, text))
        else:
            self._events.append(Content(text) if kind is Content else Reasoning(text))


class _JoinedParts:
    """The text of one kind, part by part."""

    def __init__(self, rule: Parts) -> None:
        self._keeps_spaces = rule.keeps_spaces
        self._join = rule.join
        self._has_text = False
        self._is_in_part = False
        """The part has text by now."""
        self._spaces = ""
        """White space that ends the part, unless text follows."""

    def add(self, text: str) -> str:
        """Return the text that is certain by now."""
        if self._keeps_spaces:
            visible, spaces = text, ""
        elif self._is_in_part:
            visible = text.rstrip()
            spaces = text[len(visible) :]
            if visible:
                before, self._spaces = self._spaces, spaces
                return before + visible if before else visible
        else:
            text = text.lstrip()
            visible = text.rstrip()
            spaces = text[len(visible) :]
        if not visible:
            self._spaces += spaces
            return ""
        before = self._spaces if self._is_in_part or not self._has_text else self._join
        self._spaces, self._has_text, self._is_in_part = spaces, True, True
        return before + visible

    def end_part(self) -> None:
        self._is_in_part = False
        self._spaces = ""

    def forget(self) -> None:
        """Begin anew behind a prompt: its text and the white space there have been said."""
        self._has_text = False
        self._spaces = ""
