"""A response template: the fields of a reply and the marks around them, compiled.

Owns: the checks of a checkpoint's template, and its bounds.
Never: reads a reply (template_reader.py), or knows a family.
Source: the `response_template` of tokenizers that Hugging Face transformers 5.23 documents and reads; every
key of it has the same meaning here, but for what docs/decisions/response-templates.md lists.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from server.reply.response_templates.expressions import (
    ExpressionError,
    SearchProgram,
    of_expression,
    of_literals,
)
from server.reply.response_templates.field_values import ValueRule, check_rule, check_transform
from server.reply.response_templates.searches import SearchSteps, TooManySteps, all_matches

MAX_TEMPLATE_CHARS = 64 * 1024
_MAX_LITERALS = 50
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each"),
}


class TemplateError(ValueError):
    """A template that cannot be had. Its text says why."""


class Role(Enum):
    """The place in a reply that a field has."""

    CONTENT = auto()
    REASONING = auto()
    CALLS = auto()


_ROLES = {
    "content": Role.CONTENT,
    "reasoning_content": Role.REASONING,
    "reasoning": Role.REASONING,
    "thinking": Role.REASONING,
    "tool_calls": Role.CALLS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The text at which a field begins or ends."""

    program: SearchProgram
    literals: tuple[str, ...] = ()
    """All texts that it may be; empty if an expression says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One part of a reply."""

    name: str
    role: Role
    opening: Mark | None
    """Mark before it. Without one, it takes all text that no other field takes."""
    closing: Mark | None
    """Mark behind it. Without one, it ends with the reply."""
    rule: ValueRule
    join: str | None
    """Text between two parts of this field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTemplate:
    """A template, ready to read replies with."""

    fields: tuple[Field, ...]
    anchor: Mark
    """The end of everything before a reply, in the prompt."""
    texts: tuple[str, ...]
    """Literals, and expressions without their backslashes: where special tokens are looked for."""

    def field_of(self, role: Role) -> Field | None:
        """Return the first field of a role; None if there is none."""
        return next((field for field in self.fields if field.role is role), None)

    @property
    def implicit(self) -> Field | None:
        """The field of all text that no other takes."""
        return next((field for field in self.fields if field.opening is None), None)

    def behind_anchor(self, prompt: str, steps: SearchSteps) -> str | None:
        """Return the text behind the last anchor; None if there is none, or too many steps would find it."""
        ends = [prompt.rfind(text) + len(text) for text in self.anchor.literals if text in prompt]
        if not self.anchor.literals:
            with contextlib.suppress(TooManySteps):
                ends = [match.end for match in all_matches(self.anchor.program, prompt, steps)]
        return prompt[max(ends) :] if ends else None

    def names(self, token: str) -> bool:
        """Whether the template looks for this token, so that it must be in the text."""
        return any(token in text for text in self.texts)


def compile_template(spec: Any) -> ResponseTemplate:
    """Check and compile a template as it stands in tokenizer_config.json. Raises TemplateError."""
    try:
        return _compiled(spec)
    except ExpressionError as error:
        raise TemplateError(str(error)) from error


def _compiled(spec: Any) -> ResponseTemplate:
    _require(isinstance(spec, dict), "it is no object")
    _require(spec.get("version", 1) == 1, f"its version is {str(spec.get('version'))[:50]}; 1 is read")
    _known_keys(spec, _KEYS, "the template")
    fields = spec.get("fields")
    _require(isinstance(fields, dict) and bool(fields), "it has no fields")
    anchor = _mark("the template", spec, "start_anchor")
    if anchor is None:
        raise TemplateError("it has neither start_anchor nor start_anchor_pattern")
    read = tuple(_field(name, content) for name, content in fields.items())
    _require(sum(field.opening is None for field in read) <= 1, "more than one field has no beginning")
    for role in Role:
        _require(sum(field.role is role for field in read) <= 1, f"two fields are {role.name.lower()}")
    return ResponseTemplate(fields=read, anchor=anchor, texts=tuple(_texts(spec)))


def _field(name: str, spec: Any) -> Field:
    scope = f"the field {name[:50]!r}"
    role = _ROLES.get(name)
    if role is None:
        raise TemplateError(f"{scope} has no place in a reply; there is: {', '.join(_ROLES)}")
    _require(isinstance(spec, dict), f"{scope} is no object")
    _known_keys(spec, _FIELD_KEYS, scope)
    rule = ValueRule(
        kind=spec.get("content", "text"),
        args=spec.get("content_args", {}),
        transform=spec.get("transform"),
        is_each=spec.get("transform_each", False) is True,
    )
    join = spec.get("join")
    _require(join is None or isinstance(join, str), f"{scope}: join is no text")
    _require(join is None or spec.get("repeats") is True, f"{scope}: join needs repeats")
    _require(not rule.is_each or rule.transform is not None, f"{scope}: transform_each needs transform")
    try:
        check_rule(rule)
        check_transform(rule.transform)
    except ValueError as error:
        raise TemplateError(f"{scope}: {error}") from error
    is_plain = rule.kind == "text" and rule.transform is None
    _require(role is Role.CALLS or is_plain, f"{scope} is shown as text, and has another type")
    opening = _mark(scope, spec, "open")
    _require(role is not Role.CALLS or opening is not None, f"{scope} has no beginning")
    return Field(
        name=name,
        role=role,
        opening=opening,
        closing=_mark(scope, spec, "close"),
        rule=rule,
        join=join,
    )


def _mark(scope: str, spec: Mapping[str, Any], key: str) -> Mark | None:
    pattern = spec.get(f"{key}_pattern")
    given = spec.get(key)
    _require(pattern is None or given is None, f"{scope} has both {key} and {key}_pattern")
    if given is not None:
        literals = tuple(given) if isinstance(given, list) else (given,)
        are_texts = all(isinstance(text, str) and text for text in literals)
        is_short = 0 < len(literals) <= _MAX_LITERALS
        _require(are_texts and is_short, f"{scope}: {key} is no text and no list of texts")
        try:
            return Mark(program=of_literals(literals), literals=literals)
        except ExpressionError as error:
            raise TemplateError(f"{scope}: {key} is too long") from error
    if pattern is None:
        return None
    _require(isinstance(pattern, str), f"{scope}: {key}_pattern is no text")
    try:
        return Mark(program=of_expression(pattern))
    except ExpressionError as error:
        raise TemplateError(f"{scope}: {key}_pattern: {error}") from error


def _texts(spec: Any) -> Iterator[str]:
    if isinstance(spec, str):
        yield spec.replace("\\", "")
    elif isinstance(spec, dict):
        for value in spec.values():
            yield from _texts(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _texts(value)


def _known_keys(spec: Mapping[str, Any], known: set[str], scope: str) -> None:
    unknown = sorted(set(spec) - known)
    _require(not unknown, f"{scope} has unknown keys: {', '.join(map(str, unknown))[:200]}")


def _require(is_so: bool, reason: str) -> None:  # noqa: FBT001 (as an assert that is never left out)
    if not is_so:
        raise TemplateError(reason)
