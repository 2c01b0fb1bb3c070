"""Tools, the choice among them, and calls of earlier turns, as a chat request brings them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from engine.errors import RequestRejected
from server.edge.wire_model import WireModel

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024
"""Size of the parameters of one tool, as JSON."""
MAX_ARGUMENTS = 1024
"""Members of arguments that are an object."""
MAX_TOOL_TEXT_CHARS = 64 * 1024 * 1024
"""Texts end where the body does; the number is there so that no field is without a bound."""


def as_choice(value: Any) -> Any:
    """A word is an object whose type is the word."""
    return {"type": value} if isinstance(value, str) else value


def _check_schema_size(value: dict[str, Any]) -> dict[str, Any]:
    num_bytes = len(orjson.dumps(value))
    if num_bytes > MAX_SCHEMA_BYTES:
        message = f"must be at most {MAX_SCHEMA_BYTES} bytes of JSON, not {num_bytes}"
        raise PydanticCustomError("too_large", "{reason}", {"reason": message})
    return value


_Text = Annotated[str, StringConstraints(max_length=MAX_TOOL_TEXT_CHARS)]
_Arguments = Annotated[dict[str, Any], Field(max_length=MAX_ARGUMENTS)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", min_length=1, max_length=128)]
"""Names as OpenAI has them, and as MCP has them: with dots, and longer."""
ParametersSchema = Annotated[dict[str, Any], Field(max_length=256), AfterValidator(_check_schema_size)]


def _as_json_text(value: Any) -> Any:
    is_object = isinstance(value, dict) and len(value) <= MAX_ARGUMENTS
    return orjson.dumps(value).decode() if is_object else value


class EarlierFunction(WireModel):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    arguments: Annotated[_Text, BeforeValidator(_as_json_text, json_schema_input_type=_Text | _Arguments)]
    """JSON text, as the model wrote it, or the object."""


class EarlierCall(WireModel):
    """A call that the model made in an earlier turn."""

    id: CallId
    type: Literal["function"] = "function"
    function: EarlierFunction


class FunctionDefinition(WireModel):
    name: FunctionName
    description: _Text | None = None
    parameters: ParametersSchema | None = None
    """JSON Schema of an object; absent: there are none."""
    strict: bool | None = None
    """Without effect: arguments keep to the schema if and only if a grammar makes the call."""


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(WireModel):
    name: FunctionName


class NamedTool(WireModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(WireModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ToolChoiceObject(WireModel):
    """A word stands for an object with nothing but that type."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


_ToolChoiceShapes = Literal["none", "auto", "required"] | ToolChoiceObject
ToolChoice = Annotated[ToolChoiceObject, BeforeValidator(as_choice, json_schema_input_type=_ToolChoiceShapes)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[EarlierCall], Field(max_length=MAX_TOOLS, fail_fast=True)]


def refuse_other_fields(choice: WireModel, fields: Mapping[str, tuple[str, ...]]) -> None:
    """Raise RequestRejected for a field that the choice's type does not have; `fields` are by type."""
    given = choice.model_dump(exclude_none=True)
    kind = given.pop("type")
    for name in given:
        if name not in fields.get(kind, ()):
            param = f"tool_choice.{name}"
            raise RequestRejected(f"{param}: a choice of type {kind!r} has no such field", param=param)


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of an earlier turn, of another protocol's."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
