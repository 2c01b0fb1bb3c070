"""A checkpoint's own response template, as a row: thoughts, answer and calls with the marks around them.

Owns: the checks of a template, and the row that says the same.
Never: reads a reply (machine.py), or knows a family.
Source: the `response_template` of tokenizers that Hugging Face transformers 5.23 documents. What differs
there is in docs/decisions/response-templates.md.
"""

import json
import logging
import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from server.reply.reading.argument_values import ArgumentTypes, as_json
from server.reply.reading.dialects import braces, plain_head
from server.reply.reading.events import Parts
from server.reply.reading.json_text import JsonArguments
from server.reply.reading.object_calls import ObjectCalls
from server.reply.reading.row import (
    AnswerMarks,
    BodySpec,
    Call,
    CallHead,
    CallName,
    Row,
    Thoughts,
    ToolSchemas,
)
from server.reply.reading.tagged_calls import TaggedArguments
from server.reply.reading.whole_calls import WholeCalls

log = logging.getLogger(__name__)

_PART = re.compile(
    r"""(?P<space>(?:\\s|\\n|\n)[*+?]\??)
    |\(\?P<(?P<name>\w+)>(?P<run>(?:\\.|\[(?:\\.|[^\]])*\]|[^()\[\]\\])*)\)
    |\(\?:(?P<choice>(?:\\.|[^()\\])*)\)(?P<optional>\?)?
    |(?P<any>(?:\.|\[\^(?:\\.|[^\]])*\])[*+]\??)
    |(?P<start>\^)
    |\\(?P<escaped>[^a-zA-Z0-9])
    |(?P<newline>\\n)
    |(?P<plain>[^\\()\[\]{}*+?.|^$])""",
    re.VERBOSE | re.DOTALL,
)
_SPACES = re.compile(r"(?:\\s|\\n|\n)[*+?]\??")

_MAX_TEMPLATE_CHARS = 64 * 1024
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"


class TemplateError(ValueError):
    """A template that is not read. Its text says why."""


Part = tuple[str, ...] | str
"""One of several texts, an empty one if it may be missing; or the name of a text that is needed."""


@cache
def find_template_row(text: str) -> Row | None:
    """Read a template; None, with a warning, if it says what no row can."""
    try:
        if len(text) > _MAX_TEMPLATE_CHARS:
            raise TemplateError(f"it has {len(text)} characters; at most {_MAX_TEMPLATE_CHARS} are read")
        return template_row(json.loads(text))
    except ValueError as error:
        log.warning("response_template of tokenizer_config.json is not used, but the tables: %s", error)
        return None


def template_row(spec: Any) -> Row:
    """Make the row of a template as it stands in tokenizer_config.json. Raises TemplateError."""
    _require(isinstance(spec, dict), "it is no object")
    _require(spec.get("version", 1) == 1, f"its version is {str(spec.get('version'))[:50]}; 1 is read")
    _known_keys(spec, _KEYS, "the template")
    fields = spec.get("fields")
    _require(isinstance(fields, dict) and bool(fields), "it has no fields")
    thoughts = [name for name in fields if name in _THOUGHTS]
    _require(len(thoughts) <= 1, "two fields are thoughts")
    for name, field in fields.items():
        scope = f"the field {name[:50]!r}"
        _require(name in ("content", _CALLS, *_THOUGHTS), f"{scope} has no place in a reply")
        _require(isinstance(field, dict), f"{scope} is no object")
        _known_keys(field, _FIELD_KEYS, scope)
        is_plain = field.get("content", "text") == "text" and "transform" not in field
        _require(name == _CALLS or is_plain, f"{scope} is shown as text, and has another type")
    anchors = _literals(spec, "start_anchor", "the template")
    _require(bool(anchors), "it has neither start_anchor nor start_anchor_pattern")
    content = fields.get("content", {})
    read_thoughts = _thoughts(fields[thoughts[0]]) if thoughts else (None, ())
    openings, frames = _opening(content, "content")
    call, wraps, unwraps, call_frames = _calls(fields[_CALLS]) if _CALLS in fields else (None, (), (), ())
    return Row(
        thoughts=read_thoughts[0],
        call=call,
        wraps=wraps,
        unwraps=unwraps,
        answer=AnswerMarks(
            openings=openings,
            closings=_stripped(_literals(content, "close", "content")),
            frames=tuple(dict.fromkeys((*frames, *read_thoughts[1], *call_frames))),
            parts=_parts(content),
            opened="".join(openings[:1]),
        ),
        anchors=anchors,
    )


def _thoughts(field: Mapping[str, Any]) -> tuple[Thoughts, tuple[str, ...]]:
    openings, frames = _opening(field, "thoughts")
    _require(len(openings) == 1, "thoughts begin with one text")
    ends = _stripped(_literals(field, "close", "thoughts"))
    _require(bool(ends), "thoughts have no end")
    begins_open = "" in _mark(field, "open", "thoughts")[-1]
    thoughts = Thoughts(
        begin=openings[0], ends=ends, parts=_parts(field), may_return=True, begins_open=begins_open
    )
    return thoughts, frames


def _opening(field: Mapping[str, Any], scope: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the marks before a field, and those before what may stand before these."""
    parts = _mark(field, "open", scope)
    literals = [part for part in parts if not isinstance(part, str)]
    _require(len(literals) == len(parts), f"{scope}: it has a named part")
    *before, last = literals or [()]
    return _stripped(last), tuple(text for part in before for text in part if text)


def _parts(field: Mapping[str, Any]) -> Parts:
    args = field.get("content_args") or {}
    _require(isinstance(args, dict) and not set(args) - {"strip"}, "content_args of text has more than strip")
    join = field.get("join")
    _require(join is None or isinstance(join, str), "join is no text")
    _require(join is None or field.get("repeats") is True, "join needs repeats")
    return Parts(keeps_spaces=args.get("strip", True) is False, join="\n" if join is None else join)


# Calls.

_CallMarks = tuple[Call, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _calls(field: Mapping[str, Any]) -> _CallMarks:
    """Return the form of calls, the marks before and behind several, and the frames before one."""
    parts = _mark(field, "open", _CALLS)
    _require(bool(parts), "tool_calls has no beginning")
    ends = [_stripped(part) for part in _mark(field, "close", _CALLS) if not isinstance(part, str)]
    closings, unwraps = (ends[0], tuple(text for each in ends[1:] for text in each)) if ends else ((), ())
    place = next((place for place, part in enumerate(parts) if isinstance(part, str)), len(parts))
    before = [part for part in parts[:place] if not isinstance(part, str)]
    behind = [part for part in parts[place + 1 :] if not isinstance(part, str)]
    _require(bool(before), "tool_calls begins with no fixed text")
    _require(len(behind) == len(parts[place + 1 :]), "tool_calls has two named parts")
    opening, around = _stripped(before[-1]), tuple(text for part in before[:-1] for text in part if text)
    is_named = place < len(parts)
    body = _body(field, has_name=is_named)
    if is_named and isinstance(body, WholeCalls) and body.quote:  # the name is read with the rest of it
        opening, is_named = tuple(text.removesuffix("call:") for text in opening), False
    if not is_named:
        return Call(openings=opening, closings=closings, body=body), (), unwraps, around
    head_ends = tuple(text or "{" for text in behind[-1]) if behind else ("{",)  # "": the body comes at once
    head = CallHead(ends=head_ends, read=_name_of(field))
    return Call(openings=opening, closings=closings, head=head, body=body), around, unwraps, ()


def _name_of(field: Mapping[str, Any]) -> Any:
    """Reader of a head: a name alone, or a word with other text behind it."""
    return plain_head if field.get("content") == "xml-inline" else _first_word


def _first_word(text: str) -> CallName | None:
    words = text.split()
    return plain_head(words[0]) if words else None


def _body(field: Mapping[str, Any], *, has_name: bool) -> BodySpec:
    kind, args = field.get("content", "text"), field.get("content_args") or {}
    _require(isinstance(args, dict), "content_args is no object")
    if kind == "xml-inline":
        _require(has_name, "xml-inline needs the name of the function before it")
        return _tags(args)
    if kind == "kv-lines":
        _require(has_name, "kv-lines needs the name of the function before it")
        separators = (args.get("line_sep", "\n"), args.get("kv_sep", ":"))
        _require(all(isinstance(text, str) and text for text in separators), "line_sep and kv_sep are texts")
        return WholeCalls(read=partial(_read_lines, *separators))
    _require(kind == "json", f"its content is {str(kind)[:50]!r}; calls are json, xml-inline or kv-lines")
    quotes = args.get("string_delims") or []
    if quotes or args.get("unquoted_keys"):
        is_pair = len(quotes) == 1 and len(quotes[0]) == 2 and quotes[0][0] == quotes[0][1]
        _require(is_pair and has_name, "string_delims is one text at both ends of a string, behind a name")
        return braces(quotes[0][0])
    return JsonArguments() if has_name else _objects(field)


def _objects(field: Mapping[str, Any]) -> ObjectCalls:
    """Keys of the objects, by the placeholders of the transform."""
    transform = field.get("transform")
    if transform is None:
        return ObjectCalls()
    _require(isinstance(transform, dict), "transform is no object")
    function = transform.get("function", transform)
    if function == "{content}":
        return ObjectCalls()
    _require(isinstance(function, dict), "transform has no function")
    names, arguments = _key(function.get("name")), _key(function.get("arguments"))
    _require(bool(names and arguments), "transform has no name and arguments")
    ids = _key(transform.get("id"))
    return ObjectCalls(names=(names,), arguments=(arguments,), ids=(ids,) if ids else ())


def _key(placeholder: Any) -> str:
    """The key of an object that a placeholder names, such as {content.name}."""
    if not isinstance(placeholder, str) or not (placeholder.startswith("{") and placeholder.endswith("}")):
        _require(placeholder is None, "a placeholder in transform stands next to other text")
        return ""
    return placeholder[1:-1].removeprefix("content.")


def _tags(args: Mapping[str, Any]) -> TaggedArguments:
    pattern = args.get("tag_pattern")
    _require(isinstance(pattern, str), "xml-inline needs a tag_pattern")
    parts = [part for part in parts_of(str(pattern)) if part != ("",)]
    names = [part for part in parts if isinstance(part, str)]
    marks = [text for part in parts if not isinstance(part, str) for text in part if text]
    is_read = names == ["key", "value"] and len(marks) in (3, 4) and len(parts) == len(marks) + 2
    _require(is_read, "xml-inline needs a tag_pattern with a key and a value, each between fixed texts")
    key, key_end, *value, value_end = marks
    return TaggedArguments(
        key=key,
        key_end=key_end,
        value="".join(value),
        value_end=value_end,
        merges=args.get("merge_duplicates") is True,
    )


def _read_lines(line_sep: str, kv_sep: str, text: str, schemas: ToolSchemas) -> list[tuple[str, str]]:
    """Read the arguments of the one tool in `schemas`, one a line."""
    ((_, schema),) = schemas.items()
    types, found = ArgumentTypes(schema), {}
    for line in text.split(line_sep):
        key, separator, value = line.partition(kv_sep)
        if separator:
            found[key.strip()] = as_json(value.strip(), types.of(key.strip()))
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items())
    return [("", "{" + ", ".join(pairs) + "}")]


# Parts of a template. An expression is not searched for: what stands for no marks is refused.


def _mark(field: Mapping[str, Any], key: str, scope: str) -> tuple[Part, ...]:
    """Return the mark under a key, whether it is a text, a list or an expression. Empty without one."""
    given, pattern = field.get(key), field.get(f"{key}_pattern")
    _require(given is None or pattern is None, f"{scope} has both {key} and {key}_pattern")
    if given is not None:
        texts = tuple(given) if isinstance(given, list) else (given,)
        are_texts = all(isinstance(text, str) and text.strip() for text in texts)
        _require(are_texts and bool(texts), f"{scope}: {key} is no text and no list of texts")
        return (texts,)
    _require(pattern is None or isinstance(pattern, str), f"{scope}: {key}_pattern is no text")
    try:
        return () if pattern is None else parts_of(pattern)
    except TemplateError as error:
        raise TemplateError(f"{scope}: {key}_pattern: {error}") from error


def _literals(field: Mapping[str, Any], key: str, scope: str) -> tuple[str, ...]:
    parts = _mark(field, key, scope)
    literals = [part for part in parts if not isinstance(part, str)]
    _require(len(literals) == len(parts), f"{scope}: {key} is no fixed text")
    return tuple(text for part in literals for text in part if text)


def _stripped(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Strip the texts of marks: white space around them belongs to nothing in any case."""
    return tuple(text.strip() for text in texts if text)


def _known_keys(spec: Mapping[str, Any], known: set[str], scope: str) -> None:
    unknown = sorted(set(spec) - known)
    _require(not unknown, f"{scope} has unknown keys: {', '.join(map(str, unknown))[:200]}")


def _require(is_so: bool, reason: str) -> None:  # noqa: FBT001 (as an assert that is never left out)
    if not is_so:
        raise TemplateError(reason)


def parts_of(pattern: str) -> tuple[Part, ...]:
    """Return the literals and named parts of an expression, in order. Raises TemplateError.

    White space and anything else between them is left out.
    """
    parts: list[Part] = []
    at, literal = 0, ""
    while at < len(pattern):
        found = _PART.match(pattern, at)
        if found is None:
            raise TemplateError(
                f"what stands at character {at} is no part of a mark: {pattern[at : at + 20]!r}"
            )
        at = found.end()
        char = found["escaped"] or found["plain"] or ("\n" if found["newline"] else "")
        literal += char
        if char and at < len(pattern):
            continue
        if literal:
            parts.append((literal,))
            literal = ""
        if found["name"]:
            parts.append(found["name"])
        elif found["choice"] is not None:
            parts.append(_choice(found["choice"], is_optional=bool(found["optional"])))
    return tuple(parts)


def _choice(written: str, *, is_optional: bool) -> tuple[str, ...]:
    texts = [""] if is_optional else []
    for one in re.split(r"(?<!\\)\|", written):
        plain = _SPACES.sub("", one).removeprefix("^")
        texts.append(re.sub(r"\\(.)", r"\1", plain))
        if re.search(r"(?<!\\)[\[\]{}*+?.$]|\\[a-zA-Z0-9]", plain):
            raise TemplateError(f"{one[:40]!r} is no literal")
    return tuple(dict.fromkeys(texts))
