"""Tools of a request: the offered ones, those that a reply may or must call, and the parser of the calls.

Owns: tool_choice and its effects: the tools in the template, the schema that a reply must match,
the parser of its text.
Never: types and bounds (tool_protocol.py), or parsing itself (tool_calls/).
Source: tool_choice as OpenAI documents it; `x-guidance` and %json are llguidance's.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from engine.errors import RequestRejected
from engine.types import Grammar, GrammarKind
from server.api.chat.grammar_tools import OPENING, answer_or_calls, free_or_calls, opened_call
from server.api.chat.message_reader import call_id, short_call_id
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.tool_protocol import FunctionDefinition, NamedTool, Tool, ToolChoiceObject
from server.edge.refusals import unsupported
from server.reply.generate.structured_output import without_unknown_formats
from server.reply.reading.dialects import FORCED_LIST, HERMES, Dialect, named_row
from server.reply.reading.row import Row

PartT = TypeVar("PartT")

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
    """Use of tools in one request."""

    mode: ToolMode = ToolMode.NONE
    offered: tuple[Tool, ...] = ()
    """Tools that the template shows to the model; empty if none may be called."""
    callable: tuple[FunctionDefinition, ...] = ()
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

    @property
    def schema(self) -> dict[str, Any] | None:
        """Schema that the whole reply must match; None: it is free."""
        if self.mode is ToolMode.NAMED:
            return _parameters(self.callable[0])
        if self.mode is ToolMode.REQUIRED:
            return _list_schema(self.callable, self.max_calls)
        return None

    @property
    def grammar(self) -> Grammar | None:
        """Grammar of the reply; None: it is free."""
        if self.mode is ToolMode.OPENED:
            return opened_call(self._call_body, self.max_calls)
        if self.mode is ToolMode.AUTO and self.is_shown_in_messages:
            return free_or_calls(self._call_body, self.max_calls)
        if self.schema is None:
            return None
        text = json.dumps({**self.schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)
        # By "::=", which may stand in a description, grammars in another language are recognized.
        return Grammar(kind=GrammarKind.LARK, text="start: %json " + text.replace("::=", r"\u003a:="))

    def grammar_beside(self, answer: dict[str, Any]) -> Grammar | None:
        """Grammar of a reply that matches the schema `answer` or calls; None if the dialect has none."""
        if self.mode is not ToolMode.AUTO:
            return self.grammar  # it calls, and has no other text
        if self.dialect is None or not (self.is_shown_in_messages or self.dialect.row == HERMES):
            return None
        return answer_or_calls({**answer, "x-guidance": _JSON_OPTIONS}, self._call_body, self.max_calls)

    @property
    def _call_body(self) -> dict[str, Any]:
        """Schema of one call between marks."""
        choices, places = _call_schemas(self.callable, arguments="arguments")
        return {"anyOf": choices, "$defs": places, "x-guidance": _JSON_OPTIONS}

    @property
    def opening(self) -> str:
        """The mark of a call with which the prompt may end; empty if that would open none."""
        is_possible = self.mode in (ToolMode.AUTO, ToolMode.REQUIRED)
        has_form = self.dialect is not None and self.dialect.row == HERMES
        return OPENING if is_possible and has_form else ""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the parameters, by the name of the tool."""
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
    max_calls = 1 if body.parallel_tool_calls is False else None
    if choice.type == "function":
        named = _required_part(choice.function, "tool_choice.function").name
        function = _find(tools, named, param="tool_choice.function.name")
        return ToolUse(
            mode=ToolMode.NAMED, offered=tuple(tools), callable=(function,), max_calls=1, dialect=dialect
        )
    mode = choice.type
    if choice.type == "allowed_tools":
        allowed = _required_part(choice.allowed_tools, "tool_choice.allowed_tools")
        tools, mode = _only(tools, allowed.tools), allowed.mode
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
        callable=tuple(tool.function for tool in tools),
        max_calls=max_calls,
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


def _required_part(part: PartT | None, param: str) -> PartT:
    if part is None:
        raise RequestRejected(f"{param} is required", param=param, code="missing_field")
    return part


def _find(tools: list[Tool], name: str, *, param: str) -> FunctionDefinition:
    for tool in tools:
        if tool.function.name == name:
            return tool.function
    known = ", ".join(tool.function.name for tool in tools)[:200] or "none"
    raise RequestRejected(f"{param}: there is no tool named {name!r}; there is: {known}", param=param)


def _only(tools: list[Tool], allowed: list[NamedTool]) -> list[Tool]:
    for index, tool in enumerate(allowed):
        _find(tools, tool.function.name, param=f"tool_choice.allowed_tools.tools[{index}].function.name")
    names = {tool.function.name for tool in allowed}
    return [tool for tool in tools if tool.function.name in names]


def _parameters(function: FunctionDefinition) -> dict[str, Any]:
    if function.parameters is None:
        return _NO_PARAMETERS
    return {"type": "object", **without_unknown_formats(function.parameters)}


def _list_schema(functions: tuple[FunctionDefinition, ...], max_calls: int | None) -> dict[str, Any]:
    """A list of calls. Each tool's own schema stands in a place of its own, so that its references hold."""
    calls, places = _call_schemas(functions, arguments="parameters")
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "$defs": places}
    return schema if max_calls is None else {**schema, "maxItems": max_calls}


def _call_schemas(
    functions: tuple[FunctionDefinition, ...], *, arguments: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Schemas of a call of each function, and the places that they refer to."""
    calls: list[dict[str, Any]] = []
    places: dict[str, Any] = {}
    for index, function in enumerate(functions):
        place = f"tool{index}"
        places[place] = _moved(_parameters(function), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    arguments: {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return calls, places


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself as they must be when it stands at `place`."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if isinstance(schema, dict):
        return dict(_moved_entries(schema, place))
    return schema


def _moved_entries(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            yield key, place + value[1:]
        else:
            yield key, _moved(value, place)
