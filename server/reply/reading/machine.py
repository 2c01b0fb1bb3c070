"""The reader of replies: text of one choice in, thoughts, content and calls out.

Owns: the state of the text, in each of which all marks of the row are looked for. A mark closes everything
inside of its own level, from the inside out, and then acts on its own level.

    FIRST ──▶ THOUGHT ──▶ FIRST ──▶ TEXT ──▶ HEAD ──▶ BODY ──▶ AFTER ──▶ TEXT
                │ ▲                  │                ▲
                ▼ │                  └────────────────┘
               DRAFT           OUTSIDE: between messages, in rows with marks around the answer

Never: the inside of a call (json_text.py, object_calls.py, tagged_calls.py, whole_calls.py), or output that
is taken back.
"""

from collections.abc import Callable
from typing import ClassVar

from server.reply.reading.events import CallStart, Event, ReplyEvents
from server.reply.reading.held_texts import Draft, MessageHeader
from server.reply.reading.row import (
    FAILED,
    MORE,
    TEXT,
    THOUGHT,
    BodyPlace,
    BodyReader,
    BodySpec,
    Call,
    CallHead,
    CallName,
    Phase,
    ReaderState,
    Row,
    ToolSchemas,
    lexers_of,
)

_BETWEEN = ",;}]` \t\r\n"
"""Characters that may stand behind the arguments of a call."""

_OnText = Callable[["ReplyReader", str], int]
"""Takes text without marks; returns the number of characters that were taken."""
_OnMark = Callable[["ReplyReader", str], bool]
"""Takes a mark; False if it is to be looked at again, in the state that was entered."""


class ReplyReader:
    """Fed with the text of one choice, in pieces of any size."""

    def __init__(self, row: Row, schemas: ToolSchemas, start: Phase) -> None:
        """`schemas`: the tools that may be called, of which a row without calls reads none."""
        self._row = row
        self._schemas = schemas
        self._lexers = lexers_of(row)
        thoughts = row.thoughts
        self._log = ReplyEvents(None if thoughts is None else thoughts.parts, row.answer.parts)
        self._held = ""
        """Text that may become a mark, or that a body has not taken yet."""
        self._lead = ""
        """White space before the first character."""
        self._keeps_lead = True
        self._wrap = ""
        """Marks before a call, and white space behind them: content unless a call follows."""
        self._opening = ""
        """Text of the opening mark of the call that may begin, with `_wrap` before it."""
        self._head = ""
        self._body: BodyReader | None = None
        self._header = MessageHeader(row.answer)
        self._draft: Draft | None = None
        self.has_thought = start is Phase.THOUGHT
        """Thoughts have begun by now, empty or not."""
        self._is_blank = True
        """No text of the thoughts yet."""
        self.is_in_thought = False
        self._state = ReaderState.TEXT
        self._begin(start)

    def _begin(self, start: Phase) -> None:
        row, thoughts = self._row, self._row.thoughts
        is_possible = start is Phase.POSSIBLE
        if start is Phase.THOUGHT or (is_possible and thoughts is not None and thoughts.begins_open):
            self.has_thought = True
            self._enter(ReaderState.THOUGHT)
        elif start is Phase.CALL and row.call is not None:
            self._open("")
        elif is_possible and row.answer.is_framed:
            self._enter(ReaderState.OUTSIDE)
        elif is_possible and thoughts is not None:
            self._enter(ReaderState.FIRST)
            self._lexer = self._lexers.with_begin
        else:
            self._enter(ReaderState.FIRST if row.may_begin_bare or row.named else ReaderState.TEXT)

    @property
    def place(self) -> Phase:
        """Part of the reply that the text is in now."""
        if self.is_in_thought:
            return Phase.THOUGHT
        if self._state in (ReaderState.HEAD, ReaderState.BODY):
            return Phase.CALL
        is_first = self._state is ReaderState.FIRST and self._lexer is self._lexers.with_begin
        is_open = (is_first or self._state is ReaderState.OUTSIDE) and not self._header.has_region
        return Phase.POSSIBLE if is_open and not self.has_thought else Phase.ANSWER

    @property
    def is_inside_call(self) -> bool:
        """A call was written down, and is not over."""
        return self._body is not None and self._body.has_begun

    @property
    def has_whole_calls(self) -> bool:
        """There were calls, none of which the text ends in."""
        return self._log.num_calls > 0 and not self.is_inside_call

    def begin_behind(self, prompt: str) -> None:
        """Take in the end of the prompt, in which a part of the reply may have begun."""
        calls = [event for event in self.feed(prompt) if isinstance(event, CallStart)]
        self.has_thought = self.place is Phase.THOUGHT
        self._lead = self._wrap = self._opening = self._header.text = self._held = ""
        self._log.forget(last_call=calls[-1] if calls and self.is_inside_call else None)

    def feed(self, text: str) -> list[Event]:
        """Return the events that are certain by now."""
        is_new = not self._held
        if not is_new:
            text = self._held + text
        if self._body is not None and text:
            at = self._body.feed(text, 0, is_last=False)
            self._held = text[at:]
            if self._body.progress is MORE:
                return self._log.take()
            self._leave_body(self._body)
            text = self._held
        elif is_new and text and self._take_plain(text):
            return self._log.take()
        self._held = self._read(text, is_last=False)
        return self._log.take()

    def _take_plain(self, text: str) -> bool:
        """Take text in which no mark begins, as most does not."""
        state = self._state
        if self._lexer.first.search(text) is not None:
            return False
        if state is THOUGHT:
            self._thought_text(text)
        elif state is TEXT and not self._wrap:
            self._content(text)
        else:
            return False
        return True

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the text: held-back text is no mark. `is_cut`: the model has not ended it."""
        rest = self._read(self._held, is_last=True)
        self._held = ""
        while rest and self._state is not ReaderState.BODY:
            before = self._state
            is_half = is_cut and (before is ReaderState.HEAD or self._is_half_mark(rest))
            rest = "" if is_half else rest[self._ON[self._state][0](self, rest) :]
            if rest and before is not self._state:
                rest = self._read(rest, is_last=True)
        self._end(rest, is_cut=is_cut)
        return self._log.finish()

    def _is_half_mark(self, rest: str) -> bool:
        is_first = self._state is ReaderState.FIRST
        marks = self._row.marks_around_calls(is_first=is_first, is_behind=self._log.is_after_call)
        is_outside = is_first or self._state is ReaderState.TEXT
        is_long = len(rest) > 1 or self._wrap != ""
        return is_outside and is_long and any(mark.startswith(rest) for mark in marks)

    def _read(self, text: str, *, is_last: bool) -> str:
        """Read as far as it is certain; return the rest."""
        at, end = 0, len(text)
        while at < end:
            if self._state is ReaderState.BODY:
                body = self._body
                assert body is not None
                at = body.feed(text, at, is_last=is_last)
                if body.progress is MORE:
                    return text[at:]
                self._leave_body(body)
                continue
            state = self._state
            on_text, on_mark = self._ON[state]
            stop, mark = self._lexer.next(text, at)
            if stop > at:
                at += on_text(self, text[at:stop])
                if at < stop or self._state is not state:
                    continue
            if not mark:
                return text[at:]
            if on_mark(self, mark):
                at = stop + len(mark)
        return ""

    def _enter(self, state: ReaderState) -> None:
        self._state = state
        self.is_in_thought = state is ReaderState.THOUGHT or state is ReaderState.DRAFT
        self._lexer = self._lexers.of(state)

    def _end(self, rest: str, *, is_cut: bool) -> None:
        """End the state that the text ends in."""
        match self._state:
            case ReaderState.FIRST:
                self._release_lead()
            case ReaderState.TEXT:
                self._release_wrap("" if is_cut else self._wrap)
            case ReaderState.DRAFT if (draft := self._draft) is not None:
                if is_cut or not draft.ends_in_calls():
                    self._leave_draft()
                else:
                    self._enter(ReaderState.TEXT)
                    self._end(self._read(draft.text, is_last=True), is_cut=False)
            case ReaderState.HEAD if not is_cut:
                self._end_head()
            case ReaderState.BODY if (body := self._body) is not None:
                num_calls, has_begun = body.num_calls, body.has_begun
                body.finish(rest, is_cut=is_cut)
                is_marked = self._opening != "" or not self._row.may_begin_bare  # in the prompt, if not here
                is_none = not has_begun and body.num_calls == num_calls
                if is_none and not (is_cut and (is_marked or num_calls)):
                    self._content(body.raw.lstrip(_BETWEEN) if num_calls else self._opening + body.raw)
            case ReaderState.OUTSIDE:
                self._leave_outside()

    @property
    def _call(self) -> Call:
        assert self._row.call is not None
        return self._row.call

    @property
    def _call_head(self) -> CallHead:
        assert self._call.head is not None
        return self._call.head

    def _content(self, text: str) -> None:
        if text and not self._row.is_forced:
            self._log.content(text)

    def _release_lead(self) -> None:
        lead, self._lead = self._lead, ""
        if self._keeps_lead:
            self._content(lead)

    def _release_wrap(self, text: str) -> None:
        self._wrap = ""
        self._content(text)

    def _first_text(self, text: str) -> int:
        visible = text.lstrip()
        spaces = text[: len(text) - len(visible)]
        self._lead += spaces
        if not visible:
            return len(text)
        if self._row.named:
            self._begin_call(CallName(name=self._row.named))
            return len(spaces)
        self._release_lead()
        self._enter(ReaderState.TEXT)
        if self._row.may_begin_bare and visible[0] in "{[":
            self._opening = ""
            self._begin_body(self._call.body, is_bare=True)
            return len(spaces)
        self._content(visible)
        return len(text)

    def _first_mark(self, mark: str) -> bool:
        thoughts = self._row.thoughts
        if thoughts is not None and self._lexer is self._lexers.with_begin:
            if mark == thoughts.begin:
                self._begin_thought()
                return True
            if mark in thoughts.ends:  # there were none: MiniMax M3 says so by the mark alone
                self._lead, self._keeps_lead, self._lexer = "", False, self._lexers.base
                return True
        self._release_lead()
        self._enter(ReaderState.TEXT)
        return False

    def _text(self, text: str) -> int:
        if self._wrap:
            if text.isspace():
                self._wrap += text
                return len(text)
            self._release_wrap(self._wrap)
        self._content(text)
        return len(text)

    def _mark(self, mark: str) -> bool:
        row, call = self._row, self._row.call
        answer, thoughts = row.answer, row.thoughts
        if call is not None and mark in call.openings:
            self._open(mark)
        elif mark in answer.closings or mark in answer.openings:
            self._release_wrap(self._wrap)
            self._log.end_part()
            if answer.is_framed:
                self._header.has_region = True
                self._enter(ReaderState.TEXT if mark in answer.openings else ReaderState.OUTSIDE)
        elif mark in answer.frames or mark == answer.head_end:
            self._log.end_part()
            self._enter(ReaderState.OUTSIDE)
            return False
        elif thoughts is not None and thoughts.may_return and mark == thoughts.begin:
            self._release_wrap(self._wrap)
            self._begin_thought()
        elif self._log.is_after_call:
            pass  # a mark of calls next to a call belongs to none of the text
        elif mark in row.wraps or mark in row.unwraps:
            self._wrap += mark
        else:
            self._release_wrap(self._wrap)
            self._content(mark)
        return True

    def _begin_thought(self) -> None:
        self._lead = ""
        self.has_thought, self._is_blank = True, True
        self._log.end_part()
        self._enter(ReaderState.THOUGHT)

    def _thought_text(self, text: str) -> int:
        self._is_blank = self._is_blank and text.isspace()
        self._log.reasoning(text)
        return len(text)

    def _thought_mark(self, mark: str) -> bool:
        row, thoughts, call = self._row, self._row.thoughts, self._row.call
        if thoughts is not None and (mark in thoughts.ends or mark in row.answer.closings):
            self._log.end_part()
            if row.answer.is_framed:
                self._enter(ReaderState.OUTSIDE)
            else:
                self._keeps_lead = False
                self._enter(ReaderState.FIRST)
        elif mark in row.answer.openings or mark in row.answer.frames or mark == row.answer.head_end:
            self._enter(ReaderState.TEXT)
            return False
        elif thoughts is not None and mark == thoughts.begin and self._is_blank:
            pass  # opened twice
        elif call is not None and (mark in call.openings or mark in row.wraps):
            self._draft = Draft(ReplyReader(row, self._schemas, Phase.ANSWER))
            self._enter(ReaderState.DRAFT)
            self._draft_text(mark)
        else:
            self._thought_text(mark)
        return True

    def _draft_text(self, text: str) -> int:
        if self._draft is not None and not self._draft.add(text):
            self._leave_draft()
        return len(text)

    def _draft_mark(self, mark: str) -> bool:
        if self._row.thoughts is not None and mark in self._row.thoughts.ends:
            self._leave_draft()
            return False
        self._draft_text(mark)
        return True

    def _leave_draft(self) -> None:
        assert self._draft is not None
        self._enter(ReaderState.THOUGHT)
        self._thought_text(self._draft.text)

    def _open(self, mark: str) -> None:
        self._opening, self._wrap = self._wrap + mark, ""
        if self._call.head is None:
            self._begin_body(self._call.body)
        else:
            self._head = ""
            self._enter(ReaderState.HEAD)

    def _begin_body(self, spec: BodySpec, *, name: str = "", is_bare: bool = False) -> None:
        place = BodyPlace(self._log, self._lexers.base, self._row, self._schemas, name, is_bare)
        self._body = spec.begin(place)
        self._enter(ReaderState.BODY)

    def _begin_call(self, found: CallName) -> None:
        self._log.start(found.name, found.id)
        self._opening = self._head = ""
        self._begin_body(self._call.body, name=found.name)

    def _leave_body(self, body: BodyReader) -> None:
        self._body = None
        if body.progress is FAILED:
            self._enter(ReaderState.TEXT)
            self._content(("" if body.num_calls else self._opening) + body.raw)
        else:
            self._enter(ReaderState.AFTER)

    def _head_text(self, text: str) -> int:
        call, head = self._call, self._call_head
        visible = text.lstrip()
        if call.headless is not None and visible and visible[0] in "{[" and not self._head.strip():
            self._opening += self._head + text[: len(text) - len(visible)]
            self._begin_body(call.headless)
            return len(text) - len(visible)
        self._head += text
        if len(self._head) > head.max_chars or head.forbidden.search(self._head) is not None:
            self._give_up_head()
        return len(text)

    def _head_mark(self, mark: str) -> bool:
        call, head = self._call, self._call_head
        if mark == "{" and call.headless is not None and not self._head.strip():
            self._head_text(mark)
            return False
        if mark in head.inner or (mark in head.ends and mark.isspace() and not self._head.strip()):
            self._head += mark
            return True
        found = head.read(self._head)
        if found is None:
            if mark in head.ends:
                self._head += mark
            self._give_up_head()
            return mark in head.ends
        self._begin_call(found)
        return mark in head.ends and mark != "{"

    def _give_up_head(self) -> None:
        text, self._opening, self._head = self._opening + self._head, "", ""
        self._enter(ReaderState.TEXT)
        self._content(text)

    def _end_head(self) -> None:
        """A name alone is a call if the model has ended the reply behind it, and the tool is offered."""
        head = self._call_head
        found = None if "{" in head.ends else head.read(self._head)
        if found is None or found.name not in self._schemas:
            self._give_up_head()
            return
        self._log.start(found.name, found.id)
        self._log.arguments("{}")

    def _after_text(self, text: str) -> int:
        rest = text.lstrip(_BETWEEN)
        fillers = text[: len(text) - len(rest)]
        self._log.content("".join(char for char in fillers if char.isspace()))
        if rest:
            self._enter(ReaderState.TEXT)
        return len(fillers)

    def _after_mark(self, mark: str) -> bool:
        self._enter(ReaderState.OUTSIDE if self._row.answer.is_framed else ReaderState.TEXT)
        self._header.has_region = True
        return mark in self._call.closings

    def _outside_text(self, text: str) -> int:
        if answer := self._header.add(text):
            self._enter(ReaderState.TEXT)
            self._content(answer)
        return len(text)

    def _outside_mark(self, mark: str) -> bool:
        thoughts, answer = self._row.thoughts, self._row.answer
        if mark == answer.head_end:
            self._read_header()
        elif mark in answer.frames:
            self._header.text += mark
        elif mark in answer.closings:
            self._leave_outside()
        else:
            if not self.has_thought:  # behind thoughts it is the header of the answer
                self._leave_outside()
            self._header.text = ""
            if thoughts is None or mark != thoughts.begin:
                self._header.has_region = True
                self._enter(ReaderState.TEXT)
                return False
            self._begin_thought()
        return True

    def _read_header(self) -> None:
        phase, found, text = self._header.read()
        if phase is Phase.THOUGHT and self._row.thoughts is not None:
            self._begin_thought()
        elif found is not None and self._row.call is not None:
            self._begin_call(found)
        else:
            self._enter(ReaderState.TEXT)
            self._content(text if phase is Phase.CALL else "")

    def _leave_outside(self) -> None:
        phase, text = self._header.end()
        if text.strip():
            show = self._log.reasoning if phase is Phase.THOUGHT else self._content
            show(text.lstrip() if self.has_thought else text)
            self._log.end_part()

    _ON: ClassVar[dict[ReaderState, tuple[_OnText, _OnMark]]] = {
        ReaderState.FIRST: (_first_text, _first_mark),
        ReaderState.TEXT: (_text, _mark),
        ReaderState.THOUGHT: (_thought_text, _thought_mark),
        ReaderState.DRAFT: (_draft_text, _draft_mark),
        ReaderState.HEAD: (_head_text, _head_mark),
        ReaderState.AFTER: (_after_text, _after_mark),
        ReaderState.OUTSIDE: (_outside_text, _outside_mark),
    }
