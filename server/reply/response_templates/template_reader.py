"""A reply, read by a response template: reasoning, content and calls as events.

Owns: which field the text is in, the text that is held back, and the end of what a template may cost.
Never: the marks themselves (template.py), or an exception: a reply that takes too many steps goes on as
content.
Source: the regions of transformers' streaming response parser, read character by character here.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from server.reply.response_templates.field_values import FieldText, TemplateCall
from server.reply.response_templates.searches import Match, Search, SearchSteps, TooManySteps
from server.reply.response_templates.template import Field, Mark, ResponseTemplate, Role
from server.reply.tool_calls.argument_values import ToolSchemas
from server.reply.tool_calls.events import Arguments, CallStart, Content, Reasoning, ToolEvent

log = logging.getLogger(__name__)

Event = Reasoning | ToolEvent

MAX_HELD_CHARS = 4 * 1024
"""Text that may become a mark is held back so far; then it is none."""
MAX_CALL_CHARS = 256 * 1024
"""Longer calls are content."""
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Watched:
    field: Field
    is_opening: bool
    search: Search

    @property
    def order(self) -> tuple[int, int, bool, str]:
        """First the match that begins first; of those the longest; of those the beginning of a field."""
        match = self.match
        return match.start, match.start - match.end, not self.is_opening, self.field.name

    @property
    def match(self) -> Match:
        assert self.search.match is not None
        return self.search.match


@dataclass(slots=True)
class _OpenCall:
    """A field of calls under way."""

    begin: int
    """Place of its opening mark, which may be in the prompt."""
    opening: str
    groups: dict[str, str]
    text: FieldText
    is_content: bool = False
    """It became too long, and was passed on."""


class TemplateReader:
    """Text of one choice in, events out."""

    def __init__(self, template: ResponseTemplate, schemas: ToolSchemas | None) -> None:
        """`schemas` None: no tool may be called, and calls are content."""
        self._template = template
        self._schemas = schemas
        self._steps = SearchSteps()
        self._events: list[Event] = []
        self._shown = {role: _ShownText(template.field_of(role)) for role in Role}
        self._queue: deque[str] = deque()
        """Characters to read."""
        self._held = ""
        """Characters that were read, and belong to no field yet."""
        self._place = 0
        """Number of characters that were read."""
        self._num_paid = 0
        """Characters that brought their steps; those that are read again bring none."""
        self._begin = 0
        """Place of the first character of the reply, behind the end of the prompt."""
        self._unclaimed: list[str] | None = []
        """Text outside of all fields; None as soon as there was a field. Much of it is content at once."""
        self._num_unclaimed = 0
        """Characters of it, also of those that were shown."""
        self._field: Field | None = None
        self._call: _OpenCall | None = None
        self._num_calls = 0
        self._has_given_up = False
        self._has_ended_in_call = False
        self.has_reasoned = False
        """A field of reasoning has begun, and not ended in the prompt."""
        self.has_answered = False
        """There was content, or a call."""
        self._watched = self._watch(_NOWHERE)
        self._is_plain: dict[str, bool] = {}
        """Characters at which no mark may begin that is watched for."""

    @property
    def is_inside_call(self) -> bool:
        """A call has begun and not ended, not even with the text."""
        return self._call is not None or self._has_ended_in_call

    @property
    def is_reasoning(self) -> bool:
        """The text is in a field of reasoning."""
        return self._field is not None and self._field.role is Role.REASONING

    def begin_behind(self, prompt: str) -> None:
        """Take in the end of the prompt, from the anchor on, in which fields may have begun."""
        self.feed(prompt)
        self._begin = self._place
        self._unclaimed, self._num_unclaimed = [], 0
        self._num_calls = 0
        self.has_answered, self.has_reasoned = False, self.is_reasoning
        for shown in self._shown.values():
            shown.forget()

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain by now."""
        if self._has_given_up:
            self._show(Role.CONTENT, text)
            return self._take()
        self._queue.extend(text)
        self._try_to(self._read)
        return self._take()

    def finish(self, *, is_cut_off: bool) -> list[Event]:
        """End the text: held-back text is no mark, and the last field ends.

        `is_cut_off`: the model has not ended it. Then a call that has not ended is content.
        """
        if not self._has_given_up:
            self._try_to(self._end_cut_off if is_cut_off else self._end)
        if self._unclaimed and self._template.implicit is None:
            self._show(Role.CONTENT, "".join(self._unclaimed))  # a reply that knows nothing of the template
        return self._take()

    def _try_to(self, read: Callable[[], None]) -> None:
        try:
            read()
        except TooManySteps:
            self._has_given_up = True
            log.warning("a reply takes too many steps of the response template; the rest is content")
            rest = self._held + "".join(self._queue)
            self._queue.clear()
            if self._call is not None and not self._call.is_content:
                rest = self._text_of(self._call) + rest
            elif self._unclaimed:
                rest = "".join(self._unclaimed) + rest
            elif self._place - len(self._held) < self._begin:
                rest = rest[self._begin - self._place + len(self._held) :]
            self._held, self._call, self._field, self._unclaimed = "", None, None, None
            self._show(Role.CONTENT, rest)

    def _read(self) -> None:
        while self._queue:
            if not self._held and self._place:
                self._skip()
                if not self._queue:
                    break
            char = self._queue.popleft()
            self._advance(char)
            for watched in self._watched:
                watched.search.push(char, self._place - 1)
            self._settle()

    def _skip(self) -> None:
        """Pass on the characters before the next one at which a mark may begin."""
        while passed := self._plain_text():
            self._advance(passed)
            self._add_held(self._place)

    def _plain_text(self) -> str:
        """Take such characters from the queue: one alone where it costs steps, for it brings some."""
        is_single = self._call is not None and self._call.text.takes_steps
        queue, is_plain = self._queue, self._is_plain
        passed: list[str] = []
        while queue:
            char = queue[0]
            known = is_plain.get(char)
            if known is None:
                known = all(watched.search.is_indifferent_to(char) for watched in self._watched)
                is_plain[char] = known
            if not known:
                break
            passed.append(queue.popleft())
            if is_single:
                break
        return "".join(passed)

    def _advance(self, text: str) -> None:
        self._held += text
        self._place += len(text)
        if self._place > self._num_paid:
            self._steps.earn(self._place - self._num_paid)
            self._num_paid = self._place

    def _end(self) -> None:
        self._end_marks()
        self._has_ended_in_call = self._call is not None
        self._end_field("")

    def _end_cut_off(self) -> None:
        self._end_marks()
        self._has_ended_in_call = self._call is not None
        if self._call is not None:
            self._pass_on(self._call)
        self._end_field("")

    def _end_marks(self) -> None:
        while True:
            self._read()
            for watched in self._watched:
                watched.search.finish(self._place)
            best = self._best()
            if best is None:
                break
            self._take_mark(best)
        self._add_held(self._place)

    def _settle(self) -> None:
        """Pass on all text that is certain: a mark, once none that began earlier can come, or no mark."""
        if len(self._held) > MAX_HELD_CHARS:
            for watched in self._watched:
                watched.search.drop_before(self._place - MAX_HELD_CHARS)
        begins = [watched.search.begins_at for watched in self._watched]
        certain = min((begin for begin in begins if begin is not None), default=self._place)
        best = self._best()
        if best is not None and best.match.start < certain:
            self._take_mark(best)
        elif best is None or best.match.start > certain:
            self._add_held(certain)

    def _best(self) -> _Watched | None:
        matched = [watched for watched in self._watched if watched.search.match is not None]
        return min(matched, key=lambda watched: watched.order) if matched else None

    def _take_mark(self, watched: _Watched) -> None:
        """Begin or end a field, and read on behind the mark."""
        match = watched.match
        self._add_held(match.start)
        mark, rest = self._held[: match.end - match.start], self._held[match.end - match.start :]
        groups = {
            name: mark[begin - match.start : end - match.start] for name, (begin, end) in match.groups.items()
        }
        if watched.is_opening:
            self._end_field("")
            self._begin_field(watched.field, mark, groups)
        else:
            if self._call is not None:
                self._call.groups.update(groups)
            self._end_field(mark)
        self._held = ""
        self._queue.extendleft(reversed(rest))
        self._place = match.end
        self._watched = self._watch(match.end if match.start == match.end else _NOWHERE)
        self._is_plain = {}

    def _watch(self, not_empty_at: int) -> list[_Watched]:
        """Look for the end of the field; outside of one, for the beginning of each."""
        pairs: list[tuple[Field, bool, Mark | None]]
        if self._field is not None:
            pairs = [(self._field, False, self._field.closing)]
        else:
            pairs = [(field, True, field.opening) for field in self._template.fields]
            pairs += [
                (field, False, field.closing) for field in self._template.fields if field.opening is None
            ]
        return [
            _Watched(field, is_opening, Search(mark.program, self._steps, not_empty_at=not_empty_at))
            for field, is_opening, mark in pairs
            if mark is not None
        ]

    def _begin_field(self, field: Field, mark: str, groups: dict[str, str]) -> None:
        self._field = field
        self._unclaimed = None
        if field.role is Role.CALLS:
            begin = self._place - len(self._held)
            self._call = _OpenCall(begin, mark, groups, FieldText(field.rule, self._steps))
        self.has_reasoned = self.has_reasoned or self.is_reasoning

    def _end_field(self, mark: str) -> None:
        call, self._call, self._field = self._call, None, None
        if call is not None and call.is_content:
            self._show(Role.CONTENT, mark)
        for shown in self._shown.values():
            shown.end_part()
        if call is None or call.is_content:
            return
        calls = self._calls(call)
        if calls:
            self.has_answered = True
        else:
            self._show(Role.CONTENT, self._text_of(call) + mark)
            self._shown[Role.CONTENT].end_part()
        for each in calls:
            self._events.append(CallStart(self._num_calls, each.name, each.id))
            self._events.append(Arguments(self._num_calls, each.arguments))
            self._num_calls += 1

    def _calls(self, call: _OpenCall) -> list[TemplateCall]:
        """Calls of a field that has ended; empty if it has none that can be read."""
        try:
            return [] if self._schemas is None else call.text.calls(call.groups, self._schemas)
        except (ValueError, TooManySteps):
            return []

    def _add_held(self, end: int) -> None:
        """Give the held text before the place `end` to the field."""
        begin = self._place - len(self._held)
        text, self._held = self._held[: end - begin], self._held[end - begin :]
        call = self._call
        if call is not None:
            self._add_to_call(call, text)
            return
        text = text[max(self._begin - begin, 0) :]
        field = self._field or self._template.implicit
        if field is not None:
            self._show(field.role, text)
        elif self._unclaimed is not None:
            self._unclaimed.append(text)
            self._num_unclaimed += len(text)
            if self._num_unclaimed > MAX_HELD_CHARS:
                self._show(Role.CONTENT, "".join(self._unclaimed))
                self._unclaimed.clear()

    def _add_to_call(self, call: _OpenCall, text: str) -> None:
        if call.is_content:
            self._show(Role.CONTENT, text)
            return
        call.text.add(text)
        if call.text.num_chars > MAX_CALL_CHARS:
            self._pass_on(call)

    def _pass_on(self, call: _OpenCall) -> None:
        """Show a call that has not ended as content, also what follows of it."""
        if not call.is_content:
            call.is_content = True
            self._show(Role.CONTENT, self._text_of(call))

    def _text_of(self, call: _OpenCall) -> str:
        """Text of a call with its opening mark, without what the prompt has of it."""
        text = call.opening + call.text.text
        return text[max(self._begin - call.begin, 0) :]

    def _show(self, role: Role, text: str) -> None:
        text = self._shown[role].add(text)
        if not text:
            return
        self.has_reasoned = self.has_reasoned or role is Role.REASONING
        self.has_answered = self.has_answered or role is Role.CONTENT
        kind = Reasoning if role is Role.REASONING else Content
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class _ShownText:
    """The text of a field, part by part, without the white space around each."""

    def __init__(self, field: Field | None) -> None:
        self._keeps_spaces = field is not None and field.rule.args.get("strip", True) is False
        join = field.join if field is not None else None
        self._join = "\n" if join is None else join
        self._has_text = False
        self._is_in_part = False
        """The part has text by now."""
        self._spaces = ""
        """White space that ends the part, unless text follows."""

    def add(self, text: str) -> str:
        """Return the text that is certain by now."""
        if self._keeps_spaces:
            visible, spaces = text, ""
        else:
            text = text if self._is_in_part else text.lstrip()
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
        """Begin the reply behind a prompt: its text and the white space there have been said."""
        self._has_text = False
        self._spaces = ""
