"""The plan of a reply: everything that follows from body and model before there is a prompt, chosen once.

Owns: how tools, thoughts and grammars go together, and what the end of the prompt changes of it.

A grammar holds from the first token of the answer on. Where the model reasons first, it must not hold
before: so the block of thoughts is opened in the prompt, and the token that ends it begins the grammar.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from engine.errors import RequestRejected
from engine.text.template_messages import Chat
from engine.types import AnswerStart, Grammar, ModelInfo
from server.api.chat.message_reader import Reading
from server.api.chat.protocol import THINKING_SWITCHES, ChatCompletionRequest
from server.api.chat.template_input import predicted_text, template_input, turns_reasoning_off
from server.api.chat.tool_use import ToolMode, ToolUse, tool_use_of
from server.edge.http.edge import Parsers
from server.reply.generate.engine_requests import FieldNames, Wanted, check_fields
from server.reply.generate.structured_output import WantedGrammar, wanted_grammar
from server.reply.reading.dialects import HERMES, Dialect, find_dialect, find_style
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import AnswerMarks, Phase, Row
from server.reply.reading.template_rows import find_template_row

_NUM_END_TOKENS = (64, 512, 4096)
"""Tokens at the end of a prompt in which the anchor of a response template is looked for: more if need be."""
_NAMES = FieldNames("messages", "max_completion_tokens")
_OLDER_NAMES = FieldNames("messages", "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReading:
    """Way in which replies of the model are read."""

    info: ModelInfo
    dialect: Dialect | None
    """Dialect of its calls; None: they are not read."""
    row: Row
    """The checkpoint's own as far as it has one, where both options leave the choice to it."""
    has_own_calls: bool = False
    """The checkpoint's template says how calls are written: the model was trained to."""
    shown: dict[tuple[str, ...], frozenset[int]] = field(default_factory=dict)
    """Special tokens by the marks that have them, as far as they were asked for."""

    @property
    def reads_thoughts(self) -> bool:
        return self.row.thoughts is not None

    def place_at(self, prompt_end: str, behind_anchor: str | None) -> Phase:
        """Return the part of a reply that begins behind a prompt that ends so."""
        thoughts = self.row.thoughts
        if thoughts is None:
            return Phase.ANSWER
        if behind_anchor is not None:
            reader = ReplyReader(self.row, {}, Phase.POSSIBLE)
            reader.begin_behind(behind_anchor)
            return reader.place
        end = prompt_end.rstrip()
        if end.endswith(thoughts.begin):
            return Phase.THOUGHT
        return Phase.ANSWER if end.endswith(thoughts.ends) else Phase.POSSIBLE

    def shown_ids(self, marks: tuple[str, ...]) -> frozenset[int]:
        """Special tokens that must stay in the text, since they are these marks or parts of them."""
        if marks not in self.shown:
            text, known = "\n".join(marks), self.info.added_tokens
            self.shown[marks] = frozenset(number for token, number in known.items() if token in text)
        return self.shown[marks]


_READINGS: dict[tuple[Parsers, int], ModelReading] = {}
_MAX_READINGS = 64


def model_reading(parsers: Parsers, info: ModelInfo) -> ModelReading:
    """Return the rows of a model, chosen once for each state of it: some have thousands of special tokens."""
    key = parsers, id(info)  # of no other object, as long as the reading has it
    if key not in _READINGS:
        if len(_READINGS) == _MAX_READINGS:
            del _READINGS[next(iter(_READINGS))]
        _READINGS[key] = _chosen_reading(parsers, info)
    return _READINGS[key]


def _chosen_reading(parsers: Parsers, info: ModelInfo) -> ModelReading:
    """Choose the rows by the model's own template or by the tables."""
    dialect = find_dialect(parsers.tool_calls, info.chat_template)
    row = Row() if dialect is None else dialect.row
    is_left_to_us = parsers.tool_calls == parsers.reasoning == "auto"
    own = find_template_row(info.response_template) if is_left_to_us and info.response_template else None
    if own is not None:
        calls = row if own.call is None else own
        row = replace(calls, thoughts=own.thoughts, answer=own.answer, anchors=own.anchors)
    elif style := find_style(parsers.reasoning, info.chat_template, info.added_tokens):
        row = replace(row, thoughts=style.thoughts, answer=style.answer or row.answer)
    has_own_calls = own is not None and own.call is not None
    return ModelReading(info=info, dialect=dialect, row=row, has_own_calls=has_own_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Decisions that needed the end of the prompt."""

    suffix: str
    """Text to add to the prompt."""
    wanted: Wanted
    reading: Reading
    has_budget: bool
    """The thoughts have a budget, if there are any whose end is one token."""

    @property
    def ignores_budget(self) -> bool:
        return self.has_budget and (self.wanted.answer is None or not self.wanted.answer.has_known_marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """The choices of one request."""

    body: ChatCompletionRequest
    model: ModelReading
    tools: ToolUse
    chat: Chat
    grammar: WantedGrammar | None
    """Grammar of the reply; None: it is free."""

    @property
    def in_vain(self) -> list[str]:
        """Switches that the template does not read, as the caller wrote them."""
        body, read = self.body, self.model.info.template_variables
        unread = (name for name in body.chat_template_kwargs or () if name not in read)
        names = [f"chat_template_kwargs.{name}" for name in unread]
        switches = (*THINKING_SWITCHES, *(("reasoning_effort",) if body.reasoning_effort else ()))
        if body.enable_thinking is not None and read.isdisjoint(switches):
            names.append(body.as_written("enable_thinking"))
        return names

    @property
    def possible_suffix(self) -> str:
        """The longest text that `behind` may add to the prompt."""
        row = self.model.row
        if self.grammar is None or row.thoughts is None:
            return ""
        return max((row.answer.opened, self._begin_token, row.thoughts.ends[0]), key=len)

    @property
    def _begin_token(self) -> str:
        """The mark that opens the thoughts, where the model knows it and they are not turned off."""
        model, thoughts = self.model, self.model.row.thoughts
        if thoughts is None or turns_reasoning_off(self.chat):
            return ""
        is_known = thoughts.begin in model.info.chat_template and thoughts.begin in model.info.added_tokens
        return thoughts.begin if is_known and thoughts.ends[0] in model.info.added_tokens else ""

    def behind(self, end_of: Callable[[int], str], num_tokens: int) -> Turn:
        """Decide what depends on the end of a prompt, which is read from the last anchor on, if it has one.

        `end_of` returns the text of a number of its last tokens. Raises RequestRejected.
        """
        row, end, behind = self.model.row, "", None
        for num_read in _NUM_END_TOKENS:
            end = end_of(num_read)
            behind = row.behind_anchor(end)
            if not row.anchors or num_read >= num_tokens or behind is not None:
                break
        if self.tools.opening and end.rstrip().endswith(self.tools.opening):
            tools = replace(self.tools, mode=ToolMode.OPENED)
            return self._turn(Phase.CALL, _of_calls(tools.grammar(), tools), tools=tools)
        place = self._place(end, behind)
        if self.grammar is None:
            return self._turn(place, None, prompt_end=behind or "")
        suffix, place = self._before_grammar(place)
        return self._turn(place, self.grammar, suffix=suffix)

    def _place(self, prompt_end: str, behind_anchor: str | None) -> Phase:
        thoughts = self.model.row.thoughts
        if not self.body.continue_final_message or thoughts is None:
            return self.model.place_at(prompt_end, behind_anchor)
        begun = self._last_text
        is_open = begun.rfind(thoughts.begin) > begun.rfind(thoughts.ends[0])
        return Phase.THOUGHT if is_open else Phase.ANSWER

    @property
    def _last_text(self) -> str:
        last = self.body.messages[-1]
        return "".join(part.text or part.refusal or "" for part in last.content or ()) + (last.refusal or "")

    def _before_grammar(self, place: Phase) -> tuple[str, Phase]:
        """Return the text before the reply, and where that then begins: a grammar leaves it open nowhere."""
        thoughts, opened = self.model.row.thoughts, self.model.row.answer.opened
        if thoughts is None or place is Phase.ANSWER:
            return "", Phase.ANSWER
        if place is Phase.THOUGHT:
            return ("", place) if self._end_id is not None else (thoughts.ends[0] + opened, Phase.ANSWER)
        begin = "" if opened else self._begin_token
        return opened or begin, Phase.THOUGHT if begin else Phase.ANSWER

    @property
    def _end_id(self) -> int | None:
        thoughts = self.model.row.thoughts
        return None if thoughts is None else self.model.info.added_tokens.get(thoughts.ends[0])

    def _turn(
        self,
        place: Phase,
        grammar: WantedGrammar | None,
        *,
        suffix: str = "",
        tools: ToolUse | None = None,
        prompt_end: str = "",
    ) -> Turn:
        tools = tools or self.tools
        row = tools.row_in(self.model.row)
        if grammar is not None:  # it holds from the thoughts on, so that nothing frames the answer
            row = replace(row, answer=AnswerMarks(closings=row.answer.closings, parts=row.answer.parts))
        if grammar is not None and tools.mode in (ToolMode.AUTO, ToolMode.OPENED):  # it has the generic calls
            row = replace(row, call=HERMES.call, wraps=(), unwraps=())
        has_echo = self.body.echo and self.body.messages[-1].role == "assistant"
        is_by_template = bool(self.model.row.anchors) and grammar is None
        return Turn(
            suffix=suffix,
            has_budget=self.body.thinking_token_budget is not None,
            wanted=self._wanted(grammar, self._answer(place), self.model.shown_ids(_marks_of(row, place))),
            reading=Reading(
                row=row,
                schemas=tools.schemas,
                start=Phase.POSSIBLE if is_by_template else place,
                prompt_end=prompt_end,
                shows_reasoning=self.body.include_reasoning is not False,
                reasoning_end_id=self._end_id,
                reports_reasoning=self.model.reads_thoughts,
                max_calls=tools.max_calls,
                new_call_id=tools.new_call_id,
                finish_reason_of_calls=tools.finish_reason,
                echo=self._last_text if has_echo else "",
            ),
        )

    def _wanted(
        self, grammar: WantedGrammar | None, answer: AnswerStart | None, shown_ids: frozenset[int]
    ) -> Wanted:
        body = self.body
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.max_tokens is not None and body.max_tokens != asked:
            raise RequestRejected(
                "max_tokens and max_completion_tokens contradict each other", param="max_tokens"
            )
        return Wanted(
            names=_NAMES if body.max_tokens is None else _OLDER_NAMES,
            max_tokens=asked,
            num_choices=body.n or 1,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=body.prompt_logprobs,
            grammar=grammar,
            answer=answer,
            shown_special_ids=shown_ids,
            prediction=None if body.prediction is None else predicted_text(body.prediction, self.model.info),
        )

    def _answer(self, place: Phase) -> AnswerStart | None:
        """Return the beginning of the answer, if it is behind the mark that ends the thoughts."""
        thoughts, known = self.model.row.thoughts, self.model.info.added_tokens
        if thoughts is None or place not in (Phase.THOUGHT, Phase.POSSIBLE):
            return None
        begin = "" if place is Phase.THOUGHT else thoughts.begin
        return AnswerStart(
            token_ids=_token_ids(known, thoughts.ends[0]),
            text=self.model.row.answer.opened or thoughts.ends[0],
            begin=begin,
            begin_token_ids=_token_ids(known, begin),
            max_tokens=self.body.thinking_token_budget,
        )


def _token_ids(known: Mapping[str, int], mark: str) -> tuple[int, ...]:
    """The token that a mark is; empty if it is none."""
    return (known[mark],) if mark in known else ()


def _marks_of(row: Row, place: Phase) -> tuple[str, ...]:
    """Marks of a row that a reply from this place on may have."""
    marks = row if place is not Phase.ANSWER else replace(row, thoughts=None, answer=AnswerMarks())
    begin = () if marks.thoughts is None else (marks.thoughts.begin,)
    ends = () if marks.call is None or marks.call.head is None else marks.call.head.ends
    return (*marks.marks, *begin, *ends)


def plan_reading(body: ChatCompletionRequest, model: ModelReading) -> ReadingPlan:
    """Choose all that needs no prompt. Raises RequestRejected."""
    asked, dialect = wanted_grammar(body.response_format, body.structured_outputs), model.dialect
    if dialect is not None and model.has_own_calls and asked is None:
        dialect = replace(dialect, is_trained=True)
    tools = tool_use_of(body, dialect)
    grammar = _beside_calls(asked, tools)
    check_fields(body, model.info)
    chat = template_input(body, model.info, tools)
    return ReadingPlan(body=body, model=model, tools=tools, chat=chat, grammar=grammar)


def _beside_calls(asked: WantedGrammar | None, tools: ToolUse) -> WantedGrammar | None:
    """The grammar of the reply, whether fields or tools ask for it. Raises RequestRejected."""
    if asked is None or not tools.offered:
        return asked or _of_calls(tools.grammar(), tools)
    grammar = None if asked.answer is None else tools.grammar(asked.answer)
    if grammar is None:
        raise RequestRejected(
            f"{asked.param} and tools exclude each other here: a reply that must match it could not call"
            " tools; use tool_choice none",
            param=asked.param,
        )
    return _of_calls(grammar, tools)


def _of_calls(grammar: Grammar | None, tools: ToolUse) -> WantedGrammar | None:
    if grammar is None:
        return None
    return WantedGrammar(grammar=grammar, param="tools", parts=tools.grammars_of_parameters)
