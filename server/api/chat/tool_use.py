"""Tools of a request: the offered ones, those that a reply may or must call, and its grammar.

Owns: tool_choice and its effects: the tools in the template, the grammar that a reply must match,
the row of its calls.
Source: tool_choice as OpenAI documents it; the grammars are llguidance's Lark, with `x-guidance` and %json.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from engine.errors import RequestRejected
from engine.types import Grammar, GrammarKind
from server.api.chat.message_reader import call_id, short_call_id
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.shown_tools import CLOSING, OPENING
from server.api.chat.tool_protocol import (
    FunctionDefinition,
    NamedTool,
    Tool,
    ToolChoiceObject,
    refuse_other_fields,
)
from server.edge.refusals import required, unsupported
from server.reply.generate.structured_output import json_schema_grammar, without_unknown_formats
from server.reply.reading.dialects import FORCED_LIST, HERMES, Dialect, named_row
from server.reply.reading.row import Row

_JSON_OPTIONS = {
    # On one line, as templates show calls to the model: free white space tempts small models to write on
    # and on.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # As for response_format: nothing is left out in silence, and "exactly one of" is read as "one of".
    "lenient": False,
    "coerce_one_of": True,
}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolMode(StrEnum):
    """Permission or duty of a reply to call tools."""

    NONE = "none"
    AUTO = "auto"  # the model decides, and writes in its own dialect
    OPENED = "opened"  # the template has decided for a call, and opened it
    REQUIRED = "required"  # it must; a grammar sees to that
    NAMED = "named"  # one certain tool, and only its arguments are generated


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    mode: ToolMode = ToolMode.NONE
    offered: tuple[Tool, ...] = ()
    """Tools that the template shows to the model; empty if none may be called."""
    callable: tuple[FunctionDefinition, ...] = ()
    asked: tuple[Tool, ...] = ()
    """All tools of the request."""
    max_calls: int | None = None
    dialect: Dialect | None = None

    @property
    def is_shown_in_messages(self) -> bool:
        """The model's template has no place for the tools."""
        return self.dialect is not None and not self.dialect.is_trained

    @property
    def definitions(self) -> tuple[dict[str, Any], ...]:
        """Definitions for the template, without `strict`, which is for us."""
        return tuple(
            {
                "type": "function",
                "function": tool.function.model_dump(exclude_none=True, exclude={"strict"}),
            }
            for tool in self.offered
        )

    def grammar(self, answer: dict[str, Any] | None = None) -> Grammar | None:
        """Grammar of the reply; None: it is free. `answer`: schema of a reply that calls nothing.

        None with an `answer` says that the dialect has no grammar.
        """
        rules: list[str] = []
        match self.mode:
            case ToolMode.NAMED:
                return _lark(start=_parameters(self.callable[0]))
            case ToolMode.REQUIRED:
                most = {} if self.max_calls is None else {"maxItems": self.max_calls}
                calls = _call_schemas(self.callable, arguments="parameters")
                places = calls.pop("$defs")
                return _lark(start={"type": "array", "items": calls, "minItems": 1, **most, "$defs": places})
            case ToolMode.OPENED:
                rules.append("start: calls")
            case ToolMode.AUTO if answer is not None and self._has_marks:
                rules.append(f'start: answer | "{OPENING}" calls')
            case ToolMode.AUTO if answer is None and self.is_shown_in_messages:
                rules.append("start: TEXT | opened calls")
                rules.append(f'opened[suffix="{OPENING}"]: /(?s:.*)/')
                rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPENING}(?s:.*)/")
            case _:
                return None
        more = "" if self.max_calls == 1 else f' ("{OPENING}" call)*'
        rules += [f"calls: call{more}", f'call: body "{CLOSING}"']
        answers = {} if answer is None else {"answer": answer}
        return _lark(*rules, **answers, body=_call_schemas(self.callable, arguments="arguments"))

    def grammars_of_parameters(self) -> list[tuple[str, Grammar]]:
        """Make the grammar of each tool that may be called, by the field that has it."""
        return [
            (f"tools[{index}].function.parameters", json_schema_grammar(_parameters(tool.function)))
            for index, tool in enumerate(self.asked)
            if tool.function in self.callable
        ]

    @property
    def _has_marks(self) -> bool:
        """Calls stand between the marks of the grammars here."""
        return self.dialect is not None and self.dialect.row == HERMES

    @property
    def opening(self) -> str:
        """The mark of a call with which the prompt may end; empty if that would open none."""
        is_possible = self.mode in (ToolMode.AUTO, ToolMode.REQUIRED)
        return OPENING if is_possible and self._has_marks else ""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {function.name: function.parameters or {} for function in self.callable}

    def row_in(self, row: Row) -> Row:
        """The row of a model's replies with the calls that this reply may have, and no others."""
        if self.mode in (ToolMode.AUTO, ToolMode.OPENED):
            return row
        if self.mode is ToolMode.NAMED:
            return replace(named_row(self.callable[0].name), thoughts=row.thoughts, answer=row.answer)
        if self.mode is ToolMode.REQUIRED:
            return replace(FORCED_LIST, thoughts=row.thoughts, answer=row.answer)
        answer = row.answer
        if row.call is not None and answer.openings:  # calls are parts of the answer then
            answer = replace(
                answer,
                openings=(*answer.openings, *row.call.openings),
                closings=(*answer.closings, *row.call.closings),
            )
        return Row(thoughts=row.thoughts, answer=answer)

    @property
    def new_call_id(self) -> Callable[[], str]:
        return short_call_id if self.dialect is not None and self.dialect.name == "mistral" else call_id

    @property
    def finish_reason(self) -> str:
        """Finish reason of a reply with calls; as OpenAI's, it is `stop` if the caller has named the call."""
        return "stop" if self.mode is ToolMode.NAMED else "tool_calls"


def tool_use_of(body: ChatCompletionRequest, dialect: Dialect | None) -> ToolUse:
    """Read tools and tool_choice. `dialect` None: calls cannot be read. Raises RequestRejected."""
    tools = body.tools or []
    _check_names(tools)
    choice = body.tool_choice or ToolChoiceObject(type="auto")
    refuse_other_fields(choice, {"function": ("function",), "allowed_tools": ("allowed_tools",)})
    may_be_called = tools
    mode: str = choice.type
    if choice.type == "function":
        named = required(choice.function, "tool_choice.function").name
        mode, may_be_called = "named", [_find(tools, named, param="tool_choice.function.name")]
    elif choice.type == "allowed_tools":
        allowed = required(choice.allowed_tools, "tool_choice.allowed_tools")
        tools, mode = _only(tools, allowed.tools), allowed.mode
        may_be_called = tools
    if mode == "required" and not tools:
        raise RequestRejected("tool_choice: there are no tools to choose from", param="tool_choice")
    if mode == "none" or not tools:
        return ToolUse(dialect=dialect)
    if mode == "auto" and dialect is None:
        raise unsupported(
            "tools",
            "the server was started with --tool-call-parser none: use tool_choice required, or name a"
            " function",
        )
    return ToolUse(
        mode=ToolMode(mode),
        offered=tuple(tools),
        callable=tuple(tool.function for tool in may_be_called),
        asked=tuple(body.tools or ()),
        max_calls=1 if mode == "named" or body.parallel_tool_calls is False else None,
        dialect=dialect,
    )


def _check_names(tools: list[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        if tool.function.name in seen:
            raise RequestRejected(
                f"{where}.name: there are two tools named {tool.function.name!r}", param=f"{where}.name"
            )
        seen.add(tool.function.name)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise RequestRejected(
                f"{where}.parameters: must be the schema of an object: its type must be 'object'",
                param=f"{where}.parameters",
            )


def _find(tools: list[Tool], name: str, *, param: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)[:200] or "none"
    raise RequestRejected(f"{param}: there is no tool named {name!r}; there is: {known}", param=param)


def _only(tools: list[Tool], allowed: list[NamedTool]) -> list[Tool]:
    names = {tool.function.name: f"tools[{index}].function.name" for index, tool in enumerate(allowed)}
    for name, place in names.items():
        _find(tools, name, param=f"tool_choice.allowed_tools.{place}")
    return [tool for tool in tools if tool.function.name in names]


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    if function.parameters is None:
        return _NO_PARAMETERS
    return {"type": "object", **without_unknown_formats(function.parameters)}


def _call_schemas(functions: tuple[FunctionDefinition, ...], *, arguments: str) -> dict[str, Any]:
    """Schema of a call of one of them. Parameters stand in places of their own, so that references hold."""
    places = {f"tool{index}": _parameters(function) for index, function in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function.name}, arguments: {"$ref": f"#/$defs/{place}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for place, function in zip(places, functions, strict=True)
    ]
    moved = {place: _moved(schema, f"#/$defs/{place}") for place, schema in places.items()}
    return {"anyOf": calls, "$defs": moved}


def _lark(*rules: str, **schemas: dict[str, Any]) -> Grammar:
    """A grammar of rules, and of JSON by a schema for each further name."""
    lines = [*rules]
    for name, schema in schemas.items():
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
        # By "::=", which may stand in a description, grammars in another language are recognized.
        lines.append(f"{name}: %json " + text.replace("::=", r"\u003a:="))
    return Grammar(kind=GrammarKind.LARK, text="\n".join(lines))


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself as they must be when it stands at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
