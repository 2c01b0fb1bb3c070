"""Tools of a response as functions of a chat, and calls of them as items again.

Owns: the name and the shape under which the model sees each tool, the form of its calls on the wire, and the
tools that are left out since they run elsewhere.
Source: OpenAI's reference of tools and items; the types of its Python SDK; the requests of Codex.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final

from engine.errors import RequestRejected
from server.api.chat.tool_protocol import MAX_TOOLS, chat_call
from server.api.responses.protocol import InputItem, ResponsesRequest, ResponseTool, runs_elsewhere
from server.edge.http.json_body import without_nones
from server.edge.refusals import required, unsupported
from server.reply.generate.replies import arguments_of

MAX_NAME_CHARS = 64
_BARE: Final = "functions"
"""The namespace whose functions models know without one."""
_FREE_TEXT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
_SHELL: Final = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
_SHELL_NAME: Final = "local_shell"
_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE_CHARACTERS: Final = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"
)
"""Characters of a JSON text as far as each is there: both halves of a pair of surrogates, say."""


class WireForm(StrEnum):
    """The form of a call on the wire; the value is the type of its item."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    SHELL = "local_shell_call"


ID_PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    WireForm.FUNCTION: "fc",
    WireForm.CUSTOM: "ctc",
    WireForm.SHELL: "lsh",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "local_shell_call_output": "lsho",
}
"""Beginning of the ids of items, by their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTool:
    """A tool that the caller runs."""

    form: WireForm
    name: str
    namespace: str | None = None
    function: Mapping[str, Any]
    """The function that the model sees, under a name that only this tool has."""
    place: str
    """The place of its definition in the request, `tools[2].tools[0]` say."""

    def said(self, arguments: str) -> dict[str, Any]:
        """Fields of the item of a call, of its arguments so far."""
        match self.form:
            case WireForm.CUSTOM:
                return {"name": self.name, "input": _input_of(arguments)}
            case WireForm.SHELL:
                return {"action": {"type": "exec", "env": {}, "command": [], **arguments_of(arguments)}}
        space = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, "arguments": arguments, **space}


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request, by the names that the model sees."""

    tools: Mapping[str, WireTool]
    left_out: tuple[str, ...] = ()
    """Types of the tools that run elsewhere."""

    def named(self, shown: str) -> WireTool:
        """The tool that the model calls. A model may make up a name: it is called as a function."""
        made_up = WireTool(form=WireForm.FUNCTION, name=shown, function={}, place="tools")
        return self.tools.get(shown, made_up)

    def shown(self, name: str, namespace: str | None) -> str:
        """The name that the model sees, of a tool of this request or of an earlier one."""
        for shown, tool in self.tools.items():
            if (tool.name, tool.namespace or _BARE) == (name, namespace or _BARE):
                return shown
        return _joined(namespace, name)


def toolbox_of(body: ResponsesRequest, items: Sequence[InputItem]) -> Toolbox:
    """The tools of a request and of its items. Raises RequestRejected for a type that is not known."""
    found: dict[str, WireTool] = {}
    left_out: list[str] = []
    given = [(f"tools[{place}]", tool) for place, tool in enumerate(body.tools or ())]
    given += [("input", tool) for item in items for tool in item.tools or ()]
    for place, tool in given:
        if runs_elsewhere(tool.type):
            left_out.append(tool.type)
        for wire in _wire_tools(tool, place, found.keys()):
            if (name := wire.function["name"]) in found:
                where = f"{wire.place}.name"
                raise RequestRejected(f"{where}: there are two tools named {name!r}", param=where)
            found[name] = wire
            if len(found) > MAX_TOOLS:
                raise RequestRejected(f"tools: at most {MAX_TOOLS} in all", param="tools")
    return Toolbox(found, tuple(left_out))


def _wire_tools(tool: ResponseTool, place: str, taken: Collection[str]) -> Iterator[WireTool]:
    match tool.type:
        case "function":
            yield _function(tool, place, None, "")
        case "namespace":
            space = required(tool.name, f"{place}.name")
            for number, each in enumerate(required(tool.tools, f"{place}.tools")):
                where = f"{place}.tools[{number}]"
                if each.type != "function":
                    what = f"a namespace has functions, and no tools of type {each.type!r}"
                    raise unsupported(f"{where}.type", f"{where}: {what}")
                yield _unlike(_function(each, where, space, tool.description or ""), taken)
        case "custom":
            name = required(tool.name, f"{place}.name")
            function = {"name": name, "description": _free_text(tool), "parameters": _FREE_TEXT}
            yield WireTool(form=WireForm.CUSTOM, name=name, function=without_nones(function), place=place)
        case "local_shell":
            function = {
                "name": _SHELL_NAME,
                "description": "Run a command on the caller's machine.",
                "parameters": _SHELL,
            }
            yield WireTool(form=WireForm.SHELL, name=_SHELL_NAME, function=function, place=place)
        case kind if not runs_elsewhere(kind):
            raise unsupported(
                f"{place}.type",
                f"tools of type {kind!r} are not supported; use function, namespace or custom",
            )


def _function(tool: ResponseTool, place: str, namespace: str | None, about: str) -> WireTool:
    name = required(tool.name, f"{place}.name")
    described = {
        "name": _joined(namespace, name),
        "description": "\n".join(filter(None, (about, tool.description))) or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return WireTool(
        form=WireForm.FUNCTION, name=name, namespace=namespace, function=without_nones(described), place=place
    )


def _joined(namespace: str | None, name: str) -> str:
    """The name of a function of a namespace; a long one ends in a hash of it."""
    joined = name if namespace in (None, _BARE) else f"{namespace}__{name}"
    return joined if len(joined) <= MAX_NAME_CHARS or namespace is None else _hashed(joined)


def _hashed(name: str) -> str:
    digest = sha256(name.encode()).hexdigest()[:8]
    return f"{name[: MAX_NAME_CHARS - 9]}_{digest}"


def _unlike(tool: WireTool, taken: Collection[str]) -> WireTool:
    if tool.function["name"] not in taken:
        return tool
    return replace(tool, function={**tool.function, "name": _hashed(f"{tool.namespace}__{tool.name}__")})


def _free_text(tool: ResponseTool) -> str | None:
    """A description with the grammar of the text, which the model keeps to by itself."""
    asked = tool.format
    if asked is None or asked.definition is None:
        return tool.description
    grammar = f"`input` is free text that follows this grammar ({asked.syntax}):\n{asked.definition}"
    return "\n".join(filter(None, (tool.description, grammar)))


def call_of(item: InputItem, tools: Toolbox, where: str) -> dict[str, Any]:
    """An item of a call as a call of a chat. Raises RequestRejected."""
    match item.type:
        case WireForm.CUSTOM:
            shown = required(item.name, f"{where}.name")
            arguments = json.dumps({"input": required(item.input, f"{where}.input")}, ensure_ascii=False)
        case WireForm.SHELL:
            shown, action = _SHELL_NAME, required(item.action, f"{where}.action")
            kept = {name: value for name, value in action.items() if name not in ("type", "env")}
            arguments = json.dumps(kept, ensure_ascii=False)
        case _:
            shown = tools.shown(required(item.name, f"{where}.name"), item.namespace)
            arguments = required(item.arguments, f"{where}.arguments")
    return chat_call(required(item.call_id, f"{where}.call_id"), shown, arguments)


def _input_of(arguments: str) -> str:
    """The text of a custom call, as far as it is there; all of the arguments if they are of another form."""
    whole = arguments_of(arguments)
    if not whole:
        return InputText().feed(arguments)
    text = whole.get("input")
    return text if isinstance(text, str) else arguments


class InputText:
    """The text of a custom call out of `{"input": TEXT}`, as the JSON comes in pieces."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_open = False

    def feed(self, piece: str) -> str:
        """Return what is now there of the text; the end of a call has all of it (`WireTool.said`)."""
        self._rest += piece
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open = True
            self._rest = self._rest[opening.end() :]
        whole = _WHOLE_CHARACTERS.match(self._rest)
        assert whole is not None, "no characters at all fit as well"
        self._rest = self._rest[whole.end() :]
        text: str = json.loads(f'"{whole[0]}"', strict=False)  # a model may write line breaks as they are
        return text
