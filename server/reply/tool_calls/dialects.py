"""Dialects in which models write calls, by name or by chat template: a row of the table for each.

Owns: the names of --tool-call-parser, the marks that each needs in the text, and the guess of `auto`.
Never: how a dialect is read (the other modules of this folder).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from server.reply.tool_calls import mistral
from server.reply.tool_calls.argument_values import ToolSchemas
from server.reply.tool_calls.brace_calls import BraceCallParser, BraceSyntax
from server.reply.tool_calls.events import ToolCallParser
from server.reply.tool_calls.named_calls import (
    DEEPSEEK_SEPARATOR,
    KIMI_SEPARATOR,
    NamedCallParser,
    NamedSyntax,
    deepseek_header,
    harmony_header,
    kimi_header,
)
from server.reply.tool_calls.object_calls import ObjectCallParser, ObjectSyntax
from server.reply.tool_calls.pythonic import PythonicParser, PythonicSyntax
from server.reply.tool_calls.tagged_calls import TaggedCallParser, TaggedSyntax

JSON = ObjectSyntax(may_begin_bare=True)
"""Text that a grammar for several tools produces."""
HERMES = ObjectSyntax(opening="<tool_call>", closing="</tool_call>")
_LLAMA3 = ObjectSyntax(opening="<|python_tag|>", may_begin_bare=True)
_LLAMA4 = ObjectSyntax(opening="<|python_start|>", closing="<|python_end|>", may_begin_bare=True)
_GRANITE = ObjectSyntax(opening="<|tool_call|>")
_PHI4 = ObjectSyntax(opening="functools", other_opening="<|tool_call|>", closing="<|/tool_call|>")
_DEEPSEEK = NamedSyntax(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separators=(DEEPSEEK_SEPARATOR,),
    read_header=deepseek_header,
)
_KIMI = NamedSyntax(
    opening="<|tool_call_begin|>",
    closing="<|tool_call_end|>",
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    separators=(KIMI_SEPARATOR,),
    read_header=kimi_header,
)
_HARMONY = NamedSyntax(opening="<|channel|>", closing="<|call|>", read_header=harmony_header)
_QWEN3_CODER = TaggedSyntax(
    opening="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    closing="</function>",
    wrappers=("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
)
_GLM45 = TaggedSyntax(
    opening="<tool_call>",
    name_end="\n",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    closing="</tool_call>",
)
_MINIMAX = TaggedSyntax(
    opening='<invoke name="',
    name_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    closing="</invoke>",
    wrappers=("<minimax:tool_call>", "</minimax:tool_call>"),
)
_LLAMA_PYTHONIC = PythonicSyntax(opening="<|python_start|>", closing="<|python_end|>", may_begin_bare=True)
_LFM2 = PythonicSyntax(opening="<|tool_call_start|>", closing="<|tool_call_end|>")
_OLMO3 = PythonicSyntax(opening="<function_calls>", closing="</function_calls>")
_FUNCTION_GEMMA = BraceSyntax(
    opening="<start_function_call>", closing="<end_function_call>", quote="<escape>"
)
_GEMMA4 = BraceSyntax(opening="<|tool_call>", closing="<tool_call|>", quote='<|"|>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing calls."""

    name: str
    marks: tuple[str, ...] = ()
    """Must be in the text, even where they are special tokens."""
    found_by: tuple[str, ...] = ()
    """Texts of chat templates, one of which is enough for `auto`."""
    new_parser: Callable[[ToolSchemas], ToolCallParser]
    """Takes the tools' schemas by name."""
    system_field: str = ""
    """Field of the system message where the template looks for the tools, if it does not have them itself."""
    is_trained: bool = True
    """False: the model is shown the form in the prompt, and a grammar keeps to it."""


def _objects(name: str, syntax: ObjectSyntax, *found_by: str) -> Dialect:
    return Dialect(
        name=name,
        marks=syntax.marks,
        found_by=found_by,
        new_parser=lambda schemas: ObjectCallParser(syntax, frozenset(schemas)),
    )


def _named(name: str, syntax: NamedSyntax, *found_by: str) -> Dialect:
    return Dialect(
        name=name, marks=syntax.marks, found_by=found_by, new_parser=lambda _: NamedCallParser(syntax)
    )


def _tagged(name: str, syntax: TaggedSyntax, *found_by: str) -> Dialect:
    return Dialect(
        name=name,
        marks=syntax.marks,
        found_by=found_by,
        new_parser=lambda schemas: TaggedCallParser(syntax, schemas),
    )


def _pythonic(name: str, syntax: PythonicSyntax, *found_by: str) -> Dialect:
    return Dialect(
        name=name,
        marks=(syntax.opening, syntax.closing),
        found_by=found_by,
        new_parser=lambda schemas: PythonicParser(syntax, frozenset(schemas)),
    )


def _braces(name: str, syntax: BraceSyntax, *found_by: str) -> Dialect:
    return Dialect(
        name=name, marks=syntax.marks, found_by=found_by, new_parser=lambda _: BraceCallParser(syntax)
    )


_MISTRAL_MARKS = (mistral.OPENING, mistral.CALL_ID, mistral.ARGUMENTS)
# In the order of `auto`: dialects that use another one's marks stand before it.
DIALECTS = (
    _tagged("minimax_m2", _MINIMAX, "<minimax:tool_call>"),
    _tagged("glm45", _GLM45, "<arg_key>"),
    _tagged("qwen3_coder", _QWEN3_CODER, "<function="),
    _objects("hermes", HERMES, HERMES.opening),
    Dialect(
        name="mistral",
        marks=_MISTRAL_MARKS,
        found_by=(mistral.OPENING,),
        new_parser=lambda _: mistral.MistralParser(),
    ),
    _named("deepseek", _DEEPSEEK, "<｜tool▁calls▁begin｜>"),
    _named("kimi_k2", _KIMI, "<|tool_calls_section_begin|>"),
    _named("harmony", _HARMONY, "<|channel|>"),
    _braces("gemma4", _GEMMA4, "<|tool_call>"),
    _braces("functiongemma", _FUNCTION_GEMMA, "<start_function_call>"),
    _pythonic("lfm2", _LFM2, "<|tool_call_start|>"),
    _pythonic("olmo3", _OLMO3, "<function_calls>"),
    _pythonic("pythonic", _LLAMA_PYTHONIC, "[func_name1(params_name1="),
    _objects("llama4_json", _LLAMA4, "<|python_start|>"),
    # Llama 3.2's template names the form, but not the mark.
    _objects("llama3_json", _LLAMA3, _LLAMA3.opening, '"parameters": dictionary of argument name'),
    replace(_objects("phi4", _PHI4, "functools[", "<|/tool|>"), system_field="tools"),
    _objects("granite", _GRANITE, "<|tool_call|>"),
    _objects("json", JSON),
)
GENERIC = replace(_objects("generic", HERMES), is_trained=False)
"""The dialect of models that have none."""
_BY_NAME = {dialect.name: dialect for dialect in (*DIALECTS, GENERIC)}


def find_dialect(option: str, template: str) -> Dialect | None:
    """Resolve --tool-call-parser for a model with this chat template. None: calls are not read."""
    if option != "auto":
        return _BY_NAME.get(option)
    return next((row for row in DIALECTS if any(text in template for text in row.found_by)), GENERIC)
