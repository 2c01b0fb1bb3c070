"""Dialects in which models write calls, and styles in which they write thoughts: a row for each.

Owns: the names of --tool-call-parser and --reasoning-parser, the guess of `auto`, and the heads of calls.
Never: how a row is read (the other modules of this folder).
Source: the chat templates of the models that are named, which ask them to write so; the instruct tokenizers
of mistral-common; the description of harmony that OpenAI published with gpt-oss.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from server.reply.reading.braces import read_brace_call
from server.reply.reading.element_calls import NAMESPACE, read_elements
from server.reply.reading.json_text import JsonArguments
from server.reply.reading.object_calls import ObjectCalls
from server.reply.reading.python_calls import read_calls
from server.reply.reading.row import AnswerMarks, Call, CallHead, CallName, Phase, Row, Thoughts, ToolSchemas
from server.reply.reading.tagged_calls import TaggedArguments, unquoted
from server.reply.reading.whole_calls import WholeCalls

_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_CALL_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_CHANNEL, _MESSAGE = "<|channel|>", "<|message|>"
_NAME = re.compile(r"[\w.-]+")


def _named(name: str) -> CallName | None:
    return CallName(name=name) if _NAME.fullmatch(name) else None


def plain_head(text: str) -> CallName | None:
    """The name alone, in quotes or not."""
    name = unquoted(text)
    return CallName(name=name) if name and " " not in name else None


def _deepseek_head(text: str) -> CallName | None:
    """V3 writes `function`, the mark and the name on a line; V3.1 the name and the mark."""
    before, mark, after = text.partition(_DEEPSEEK_SEPARATOR)
    lines = after.split()
    if not mark:
        return None
    return _named(lines[0] if lines and not lines[0].startswith("`") else before.strip())


def _kimi_head(text: str) -> CallName | None:
    """The id holds the name; Kimi's template shows it to the model again."""
    before, _, behind = text.partition(_KIMI_SEPARATOR)
    found = _named(before.strip().removeprefix("functions.").partition(":")[0])
    return None if found is None or behind.strip() else replace(found, id=before.strip())


def _mistral_head(text: str) -> CallName | None:
    """Up to the id or the arguments, which are an object."""
    before, _, behind = text.partition(_ARGUMENTS)
    return None if behind else _named(before.partition(_CALL_ID)[0])


def _harmony_head(text: str) -> tuple[Phase, CallName | None]:
    """Read the channel and the recipient, which is the function."""
    recipient = text.partition(" to=")[2].partition("<")[0].split()
    if recipient:
        return Phase.CALL, _named(recipient[0].removeprefix("functions."))
    channel = text.rpartition(_CHANNEL)[2].partition("<")[0].split()
    return Phase.THOUGHT if channel[:1] == ["analysis"] else Phase.ANSWER, None


def _harmony_lost_head(text: str) -> tuple[Phase, str]:
    """Return the text behind the word of a known channel, which is said there."""
    _, mark, rest = text.rpartition(_CHANNEL)
    word, _, said = rest.lstrip().partition(" ")
    is_known = bool(mark) and word in ("final", "commentary", "analysis") and " to=" not in text
    return Phase.THOUGHT if word == "analysis" else Phase.ANSWER, said.strip() if is_known else ""


def braces(quote: str) -> WholeCalls:
    """Calls with strings between marks of their own."""
    return WholeCalls(read=partial(read_brace_call, quote), quote=quote)


def _python(text: str, _: ToolSchemas) -> list[tuple[str, str]]:
    return read_calls(text)


def _tag_head(*ends: str) -> CallHead:
    """A name in a tag."""
    return CallHead(ends=ends, read=plain_head, forbidden=_TAG_NAMES, max_chars=256)


_TAG_NAMES = re.compile(r"[{}<>(),;\[\]]")
_OBJECTS = ObjectCalls()
_PYTHON = WholeCalls(read=_python)


def _objects(opening: str, closing: str, *, may_begin_bare: bool = False) -> Row:
    """Objects, or lists of them, between two marks."""
    call = Call(openings=(opening,), closings=(closing,), body=_OBJECTS)
    return Row(call=call, may_begin_bare=may_begin_bare)


HERMES = _objects("<tool_call>", "</tool_call>")
JSON = Row(call=Call(body=_OBJECTS), may_begin_bare=True)
"""Text that a grammar for several tools produces."""
FORCED_LIST = replace(JSON, is_forced=True)


def named_row(name: str) -> Row:
    """Row of a reply that is the arguments of one function, as a grammar sees to."""
    return Row(call=Call(body=JsonArguments()), named=name, is_forced=True)


_LLAMA3 = Row(call=Call(openings=("<|python_tag|>",), body=_OBJECTS), may_begin_bare=True)
_LLAMA4 = _objects("<|python_start|>", "<|python_end|>", may_begin_bare=True)
_GRANITE = Row(call=Call(openings=("<|tool_call|>",), body=_OBJECTS))
_PHI4 = Row(call=Call(openings=("functools", "<|tool_call|>"), closings=("<|/tool_call|>",), body=_OBJECTS))
_COHERE = Row(
    call=Call(
        openings=("<|START_ACTION|>",),
        closings=("<|END_ACTION|>",),
        body=ObjectCalls(names=("tool_name", "name")),
    )
)
_MISTRAL = Row(
    call=Call(
        openings=("[TOOL_CALLS]",),
        head=CallHead(
            inner=(_CALL_ID, _ARGUMENTS),
            read=_mistral_head,
            forbidden=re.compile(r"""[}"'<>(),;:\s]"""),
            max_chars=256,
        ),
        body=JsonArguments(),
        headless=_OBJECTS,
    )
)
_DEEPSEEK = Row(
    wraps=("<｜tool▁calls▁begin｜>",),
    unwraps=("<｜tool▁calls▁end｜>",),
    call=Call(
        openings=("<｜tool▁call▁begin｜>",),
        closings=("<｜tool▁call▁end｜>",),
        head=CallHead(inner=(_DEEPSEEK_SEPARATOR,), read=_deepseek_head),
        body=JsonArguments(),
    ),
)
_KIMI = Row(
    wraps=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    unwraps=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call=Call(
        openings=("<|tool_call_begin|>",),
        closings=("<|tool_call_end|>",),
        head=CallHead(inner=(_KIMI_SEPARATOR,), read=_kimi_head),
        body=JsonArguments(),
    ),
)
_HARMONY = Row(
    call=Call(closings=("<|call|>",), body=JsonArguments()),
    answer=AnswerMarks(
        closings=("<|end|>", "<|return|>", "<|call|>"),
        frames=("<|start|>", _CHANNEL, "<|constrain|>"),
        head_end=_MESSAGE,
        read_head=_harmony_head,
        read_lost_head=_harmony_lost_head,
        opened=f"{_CHANNEL}final{_MESSAGE}",
    ),
)
_QWEN3_CODER = Row(
    wraps=("<tool_call>", "<seed:tool_call>"),
    unwraps=("</tool_call>", "</seed:tool_call>"),
    call=Call(
        openings=("<function=",),
        closings=("</function>",),
        head=_tag_head(">"),
        body=TaggedArguments(key="<parameter=", key_end=">", value_end="</parameter>"),
    ),
)
_GLM45 = Row(
    wraps=("<tool_calls>",),
    unwraps=("</tool_calls>",),
    call=Call(
        openings=("<tool_call>",),
        closings=("</tool_call>",),
        head=_tag_head("\n", "<tool_sep>"),
        body=TaggedArguments(
            key="<arg_key>", key_end="</arg_key>", value="<arg_value>", value_end="</arg_value>"
        ),
    ),
)
_MINIMAX = Row(
    wraps=("<minimax:tool_call>",),
    unwraps=("</minimax:tool_call>",),
    call=Call(
        openings=("<invoke name=",),
        closings=("</invoke>",),
        head=_tag_head(">"),
        body=TaggedArguments(key="<parameter name=", key_end=">", value_end="</parameter>"),
    ),
)
_MINIMAX_M3 = Row(
    wraps=(f"{NAMESPACE}<tool_call>",),
    unwraps=(f"{NAMESPACE}</tool_call>",),
    call=Call(
        openings=(f'{NAMESPACE}<invoke name="', f"{NAMESPACE}<invoke name='"),
        closings=(f"{NAMESPACE}</invoke>",),
        head=_tag_head('">', "'>"),
        body=WholeCalls(read=read_elements),
    ),
)
_MINICPM5 = Row(
    call=Call(
        openings=("<function name=",),
        closings=("</function>",),
        head=_tag_head(">"),
        body=TaggedArguments(
            key="<param name=", key_end=">", value_end="</param>", wrap=("<![CDATA[", "]]>")
        ),
    ),
)
_DEEPSEEK_V32 = Row(
    wraps=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    unwraps=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    call=Call(
        openings=("<｜DSML｜invoke name=",),
        closings=("</｜DSML｜invoke>",),
        head=_tag_head(">"),
        body=TaggedArguments(
            key="<｜DSML｜parameter name=",
            key_end=">",
            value_end="</｜DSML｜parameter>",
            text_flag=" string=",
        ),
    ),
)
_PYTHONIC = Row(
    call=Call(openings=("<|python_start|>",), closings=("<|python_end|>",), body=_PYTHON),
    may_begin_bare=True,
)
_LFM2 = Row(call=Call(openings=("<|tool_call_start|>",), closings=("<|tool_call_end|>",), body=_PYTHON))
_OLMO3 = Row(call=Call(openings=("<function_calls>",), closings=("</function_calls>",), body=_PYTHON))
_GEMMA4 = Row(call=Call(openings=("<|tool_call>",), closings=("<tool_call|>",), body=braces('<|"|>')))
_FUNCTION_GEMMA = Row(
    call=Call(openings=("<start_function_call>",), closings=("<end_function_call>",), body=braces("<escape>"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One way of writing calls."""

    name: str
    row: Row
    found_by: tuple[str, ...] = ()
    """Texts of chat templates, one of which is enough for `auto`."""
    system_field: str = ""
    """Field of the system message where the template looks for the tools, if it does not have them itself."""
    is_trained: bool = True
    """False: the model is shown the form in the prompt, and a grammar keeps to it."""


# In the order of `auto`: dialects that use another one's marks stand before it.
DIALECTS = (
    Dialect(name="deepseek_v32", row=_DEEPSEEK_V32, found_by=("｜DSML｜",)),
    Dialect(name="minimax_m3", row=_MINIMAX_M3, found_by=(NAMESPACE,)),
    Dialect(name="minimax_m2", row=_MINIMAX, found_by=("<minimax:tool_call>",)),
    Dialect(name="glm45", row=_GLM45, found_by=("<arg_key>",)),
    Dialect(name="qwen3_coder", row=_QWEN3_CODER, found_by=("<function=",)),
    Dialect(name="hermes", row=HERMES, found_by=("<tool_call>",)),
    Dialect(name="minicpm5", row=_MINICPM5, found_by=('<function name="',)),
    Dialect(name="hunyuan", row=_objects("<tool_calls>", "</tool_calls>"), found_by=("<tool_calls>",)),
    Dialect(name="nemotron", row=_objects("<TOOLCALL>", "</TOOLCALL>"), found_by=("<TOOLCALL>",)),
    Dialect(
        name="longcat",
        row=_objects("<longcat_tool_call>", "</longcat_tool_call>"),
        found_by=("<longcat_tool_call>",),
    ),
    Dialect(
        name="internlm",
        row=_objects("<|action_start|><|plugin|>", "<|action_end|>"),
        found_by=("<|action_start|>",),
    ),
    Dialect(name="cohere", row=_COHERE, found_by=("<|START_ACTION|>",)),
    Dialect(name="mistral", row=_MISTRAL, found_by=("[TOOL_CALLS]",)),
    Dialect(name="deepseek", row=_DEEPSEEK, found_by=("<｜tool▁calls▁begin｜>",)),
    Dialect(name="kimi_k2", row=_KIMI, found_by=("<|tool_calls_section_begin|>",)),
    Dialect(name="harmony", row=_HARMONY, found_by=(_CHANNEL,)),
    Dialect(name="gemma4", row=_GEMMA4, found_by=("<|tool_call>",)),
    Dialect(name="functiongemma", row=_FUNCTION_GEMMA, found_by=("<start_function_call>",)),
    Dialect(name="lfm2", row=_LFM2, found_by=("<|tool_call_start|>",)),
    Dialect(name="olmo3", row=_OLMO3, found_by=("<function_calls>",)),
    Dialect(name="pythonic", row=_PYTHONIC, found_by=("[func_name1(params_name1=",)),
    Dialect(name="llama4_json", row=_LLAMA4, found_by=("<|python_start|>",)),
    # Llama 3.2's template names the form, but not the mark.
    Dialect(
        name="llama3_json",
        row=_LLAMA3,
        found_by=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
    Dialect(name="phi4", row=_PHI4, found_by=("functools[", "<|/tool|>"), system_field="tools"),
    Dialect(name="granite", row=_GRANITE, found_by=("<|tool_call|>",)),
    Dialect(name="json", row=JSON),
)
GENERIC = Dialect(name="generic", row=HERMES, is_trained=False)
"""The dialect of models that have none."""
_BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (*DIALECTS, GENERIC)}


@lru_cache(maxsize=64)
def find_dialect(option: str, template: str) -> Dialect | None:
    """Resolve --tool-call-parser for a model with this chat template. None: calls are not read."""
    if option != "auto":
        return _BY_NAME.get(option)
    return next((row for row in DIALECTS if any(text in template for text in row.found_by)), GENERIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningStyle:
    """One way to tell thoughts and answer apart."""

    name: str
    thoughts: Thoughts
    sign: str
    """Text of chat templates or added token by which `auto` finds it."""
    answer: AnswerMarks | None = None
    """Marks of the answer; None: the dialect's."""


def _block(name: str, begin: str, end: str) -> ReasoningStyle:
    """A block at the beginning of the reply. Its first mark may be a token and a word."""
    return ReasoningStyle(name=name, thoughts=Thoughts(begin=begin, ends=(end,)), sign=end)


THINK = _block("think", "<think>", "</think>")


def _cohere(name: str, word: str) -> ReasoningStyle:
    """Thoughts of Cohere's models, and an answer between marks with this word."""
    begin, end = f"<|START_{word}|>", f"<|END_{word}|>"
    return ReasoningStyle(
        name=name,
        thoughts=Thoughts(begin="<|START_THINKING|>", ends=("<|END_THINKING|>",), may_return=True),
        sign=begin,
        answer=AnswerMarks(openings=(begin,), closings=(end,), opened=begin),
    )


STYLES = (
    THINK,
    _cohere("cohere", "RESPONSE"),
    _cohere("cohere_text", "TEXT"),
    _block("mistral", "[THINK]", "[/THINK]"),
    _block("minimax_m3", "<mm:think>", "</mm:think>"),
    _block("seed_oss", "<seed:think>", "</seed:think>"),
    _block("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningStyle(
        name="harmony",
        thoughts=Thoughts(begin=f"{_CHANNEL}analysis{_MESSAGE}", ends=("<|end|>",)),
        sign=_CHANNEL,
        answer=_HARMONY.answer,
    ),
)
_STYLE_BY_NAME = {style.name: style for style in STYLES}


def find_style(option: str, template: str, added_tokens: Mapping[str, int]) -> ReasoningStyle | None:
    """Resolve --reasoning-parser. None: all that this model writes is the answer."""
    if option != "auto":
        return _STYLE_BY_NAME.get(option)
    for style in STYLES:
        # A family's tokenizers have its marks of answers, whether a model was trained to write them or not.
        is_framed = style.answer is not None and bool(style.answer.openings)
        if style.sign in template or (style.sign in added_tokens and not is_framed):
            return style
    return None
