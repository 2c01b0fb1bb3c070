"""Dialects in which models write calls, by name or by chat template.

Owns: the names of --tool-call-parser, the marks that each needs in the text, and the guess of `auto`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.tool_calls import mistral
from server.tool_calls.events import ToolCallParser
from server.tool_calls.object_calls import ObjectCallParser, ObjectSyntax

_HERMES = ObjectSyntax(opening="<tool_call>", closing="</tool_call>")
_LLAMA3 = ObjectSyntax(opening="<|python_tag|>", may_begin_bare=True)
JSON = ObjectSyntax(may_begin_bare=True)
"""Text that a grammar for several tools produces."""
# Models that put something else than a JSON object between Hermes' marks: Qwen3-Coder, GLM-4.5.
_OTHER_BODIES = ("<function=", "<arg_key>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing calls."""

    name: str
    marks: tuple[str, ...]
    """Must be in the text, even where they are special tokens."""
    new_parser: Callable[[frozenset[str]], ToolCallParser]
    """Takes the names of the tools."""


_DIALECTS = (
    Dialect(
        name="hermes",
        marks=(_HERMES.opening, _HERMES.closing),
        new_parser=lambda names: ObjectCallParser(_HERMES, names),
    ),
    Dialect(
        name="llama3_json",
        marks=(_LLAMA3.opening,),
        new_parser=lambda names: ObjectCallParser(_LLAMA3, names),
    ),
    Dialect(
        name="mistral",
        marks=(mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS),
        new_parser=lambda _: mistral.MistralParser(),
    ),
    Dialect(name="json", marks=(), new_parser=lambda names: ObjectCallParser(JSON, names)),
)
_BY_NAME = {dialect.name: dialect for dialect in _DIALECTS}


def find_dialect(option: str, template: str) -> Dialect | None:
    """Resolve --tool-call-parser for a model with this chat template. None: calls are not read."""
    return _BY_NAME.get(_guess(template) if option == "auto" else option)


def _guess(template: str) -> str:
    if _HERMES.opening in template:
        return "none" if any(body in template for body in _OTHER_BODIES) else "hermes"
    if mistral.OPENING in template:
        return "mistral"
    # Llama 3.2's template names the form, but not the mark.
    if _LLAMA3.opening in template or '"parameters": dictionary of argument name' in template:
        return "llama3_json"
    return "none"
