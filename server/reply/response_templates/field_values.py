"""The text of a field of calls, as names and arguments.

Owns: the types of content that a template may name, its transform, and the arguments' types by the schemas.
Never: finds the field (template_reader.py), or searches for expressions in a whole text at once: that is
done while the text comes.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from server.reply.response_templates.expressions import of_expression
from server.reply.response_templates.searches import MatchCollector, SearchSteps
from server.reply.tool_calls.argument_values import ToolSchemas, as_json, types_of
from server.reply.tool_calls.brace_calls import read_braces

_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_MAX_DEPTH = 32
_NAMES_OF_ARGS = {
    "text": {"strip"},
    "int": {"strip"},
    "float": {"strip"},
    "bool": {"strip"},
    "json": {"strip", "unquoted_keys", "string_delims", "allow_non_json"},
    "xml-inline": {"tag_pattern", "value_parser", "merge_duplicates"},
    "kv-lines": {"strip", "line_sep", "kv_sep", "value_parser"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRule:
    """The way from the text of a field to its value."""

    kind: str
    args: Mapping[str, Any]
    transform: Any
    is_each: bool
    """The transform is applied to each item of a list."""


@dataclass(frozen=True, slots=True)
class TemplateCall:
    """One call."""

    name: str
    arguments: str
    """JSON text."""
    id: str | None


def check_rule(rule: ValueRule) -> None:
    """Raises ValueError for a type or an argument that is not read."""
    _check_parser(rule.kind, rule.args, depth=0)


def _check_parser(kind: Any, args: Any, *, depth: int) -> None:
    known = _NAMES_OF_ARGS.get(kind) if isinstance(kind, str) else None
    if known is None or depth > _MAX_DEPTH:
        raise ValueError(f"its content is {str(kind)[:50]!r}; there is: {', '.join(_NAMES_OF_ARGS)}")
    if not isinstance(args, dict) or set(args) - known:
        raise ValueError(f"content_args of {kind} has more than {', '.join(sorted(known))}")
    pairs = args.get("string_delims", [])
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise ValueError("string_delims is no list of pairs of texts")
    if not all(isinstance(args.get(key, "-"), str) and args.get(key, "-") for key in ("line_sep", "kv_sep")):
        raise ValueError("line_sep and kv_sep are texts")
    if kind == "xml-inline":
        pattern = args.get("tag_pattern")
        if not isinstance(pattern, str) or not {"key", "value"} <= set(of_expression(pattern).names):
            raise ValueError("xml-inline needs a tag_pattern with the groups key and value")
    parser = args.get("value_parser")
    if parser is not None:
        is_known = isinstance(parser, dict) and not set(parser) - {"name", "args"}
        if not is_known or parser.get("name") == "xml-inline":
            raise ValueError("value_parser has a name, other than xml-inline, and args")
        _check_parser(parser.get("name", "text"), parser.get("args", {}), depth=depth + 1)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) and text for text in pair)


def check_transform(transform: Any) -> None:
    """Raises ValueError for a placeholder beside other text."""
    if isinstance(transform, dict | list):
        for value in transform.values() if isinstance(transform, dict) else transform:
            check_transform(value)
    elif isinstance(transform, str):
        found = _PLACEHOLDER.search(transform)
        if found is not None and found.group() != transform:
            raise ValueError("a placeholder in transform stands beside other text")


class FieldText:
    """The text of one field of calls, collected. Its tags are looked for meanwhile."""

    def __init__(self, rule: ValueRule, steps: SearchSteps) -> None:
        self._rule = rule
        self._pieces: list[str] = []
        self.num_chars = 0
        self._tags: MatchCollector | None = None
        if rule.kind == "xml-inline":
            self._tags = MatchCollector(of_expression(rule.args["tag_pattern"]), steps)

    @property
    def takes_steps(self) -> bool:
        """Each character costs steps, for tags may begin with it."""
        return self._tags is not None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Raises TooManySteps."""
        self._pieces.append(text)
        self.num_chars += len(text)
        if self._tags is not None:
            self._tags.add(text)

    def calls(self, groups: Mapping[str, str], schemas: ToolSchemas) -> list[TemplateCall]:
        """Return the calls. Raises ValueError if the text has none; TooManySteps."""
        try:
            value = self._transformed(self._value(), groups)
            values = value if isinstance(value, list) else [value]
            return [_call(each, schemas) for each in values]
        except (RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error

    def _value(self) -> Any:
        args = self._rule.args
        if self._tags is None:
            return _parsed(self.text, self._rule.kind, args)
        found: dict[str, Any] = {}
        merged: dict[str, list[Any]] = {}
        for match in self._tags.finish():
            key = self._tags.text_of(match, "key")
            value = _sub_parsed(self._tags.text_of(match, "value"), args.get("value_parser"))
            if key not in found or not args.get("merge_duplicates"):
                found[key] = value
                continue
            if key not in merged:
                first = found[key]
                found[key] = merged[key] = list(first) if isinstance(first, list) else [first]
            merged[key].append(value)
        return found

    def _transformed(self, value: Any, groups: Mapping[str, str]) -> Any:
        transform = self._rule.transform
        if transform is None:
            return value
        if not self._rule.is_each:
            return _filled(transform, {**groups, "content": value})
        return [_filled(transform, {**groups, **each}) for each in value]


def _parsed(text: str, kind: str, args: Mapping[str, Any]) -> Any:
    """Raises ValueError for a text that is not of this kind."""
    return _PARSERS[kind](text, args)


def _sub_parsed(text: str, parser: Mapping[str, Any] | None) -> Any:
    if parser is None:
        return text
    return _parsed(text, parser.get("name", "text"), parser.get("args", {}))


def _plain(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any]) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if args.get("unquoted_keys") or args.get("string_delims"):
            quotes = tuple((opening, closing) for opening, closing in args.get("string_delims", []))
            return json.loads(read_braces(text, quotes))
        if args.get("allow_non_json"):
            return _plain(text, args)
        raise


def _lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, separator, value = line.partition(args.get("kv_sep", ":"))
        if separator:
            found[_plain(key, args)] = _sub_parsed(_plain(value, args), args.get("value_parser"))
    return found


_PARSERS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _plain,
    "int": lambda text, args: int(_plain(text, args)),
    "float": lambda text, args: float(_plain(text, args)),
    "bool": lambda text, args: _plain(text, args).lower() in ("true", "1"),
    "json": _json,
    "kv-lines": _lines,
}


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Put values in the place of placeholders."""
    if isinstance(transform, dict):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if found is None:
        return transform
    value: Any = scope
    for key in found.group(1).split("."):
        value = value[key]
    return value


def _call(value: Any, schemas: ToolSchemas) -> TemplateCall:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call without a name")
    name, call_id = name.strip(), value.get("id")
    call = TemplateCall(
        name=name,
        arguments=arguments if isinstance(arguments, str) else _typed(arguments, schemas.get(name, {})),
        id=call_id if isinstance(call_id, str) and call_id else None,
    )
    # Half a character, which JSON can escape, has no UTF-8: this raises the ValueError that it needs.
    (call.name + call.arguments + (call.id or "")).encode()
    return call


def _typed(arguments: Any, schema: Mapping[str, Any]) -> str:
    """Write arguments as JSON. Texts take the types of the schema, as far as they fit."""
    properties = schema.get("properties")
    if not isinstance(arguments, dict) or not isinstance(properties, dict):
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    pairs = (
        f"{json.dumps(key, ensure_ascii=False)}: {_typed_value(value, types_of(properties.get(key)))}"
        for key, value in arguments.items()
    )
    return "{" + ", ".join(pairs) + "}"


def _typed_value(value: Any, types: frozenset[str]) -> str:
    if isinstance(value, str) and types:
        return as_json(value, types)
    if isinstance(value, list) and types and "array" not in types:
        return "[" + ", ".join(_typed_value(each, types) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
