"""Messages to prompt text, by the checkpoint's own chat template.

Owns: finding the template, the sandbox it runs in, and the fault of a failure, the
checkpoint's or the request's.
Never: tokenizes; knows a model family; lets a request set the template's own variables.
Source: the template language that `apply_chat_template` of Hugging Face transformers defines; its
results are matched text for text (tests/engine/text/test_chat_template.py).
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from engine.errors import NoChatTemplate, RequestRejected
from engine.text.tokenizer import NAMED_SPECIAL_TOKENS, TokenizerError, read_json

MAX_TEMPLATE_BYTES = 256 * 1024
MAX_RENDERED_CHARS = 16 * 1024 * 1024
MAX_RENDERING_S = 10.0
"""Limit, checked in every turn of a loop and in every call of a macro."""
_MAX_REASON_CHARS = 500

_OUR_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

# Ends the content of the message to continue, so that the place can be found again in the rendered text.
# Private-use characters: no tokenizer's special token, no whitespace that a template would trim. The
# space at its end is there to be trimmed: whether it survived tells whether the template trims content.
_CONTINUE_MARK = "\ue000continue here\ue001 "

_TICK = "__tick"
"""The function that every loop and macro calls; a template names it by no chance."""
_CONCAT = "__concat"
"""The function that stands for the operator ~."""
_WIDE_FORMAT = re.compile(r"[%:{][^A-Za-z]{0,40}(?:\d{6}|\*)|\{[^{}]{0,40}:[^{}]{0,40}\{")
"""A width of six digits or more in a format, or one that is an argument."""
_MAX_BASE = 2**64
_MAX_EXPONENT = 64

# A template is a program over data from the request; these are its errors on unfit data.
_RENDERING_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class FinalMessage(StrEnum):
    """The end of the prompt, which decides how the model goes on."""

    ANSWER = "answer"  # a new assistant message
    CONTINUE = "continue"  # the rest of the last message, which is left open
    NOTHING = "nothing"  # no generation prompt: the messages as they are


class ChatTemplate:
    """A checkpoint's chat template, compiled. `render` may be called from several threads at once."""

    def __init__(self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """Compile templates by name: `default`, and possibly `tool_use` for requests with tools, or none."""
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _Compiled(name, source) for name, source in templates.items()}

    @classmethod
    def load(
        cls, folder: Path, *, special_tokens: Mapping[str, str], file: Path | None = None
    ) -> "ChatTemplate":
        """Read `file`, else chat_template.jinja, else tokenizer_config.json.

        Raises TokenizerError for one that is unusable.
        """
        return cls(_read_templates(folder, file), special_tokens=special_tokens)

    @property
    def is_present(self) -> bool:
        return bool(self._templates)

    @property
    def source_with_tools(self) -> str:
        """Source of the template for requests with tools; empty if there is none."""
        found = self._templates.get("tool_use") or self._templates.get("default")
        return found.source if found else ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        final: FinalMessage = FinalMessage.ANSWER,
        template_kwargs: Mapping[str, Any] | None = None,
        template_hints: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. Messages and tools are plain JSON data; keys that are None count as absent.

        The arguments of calls are JSON texts, as on the wire; the template gets objects. A hint need not be
        read by the template; `template_kwargs` override it.

        Raises NoChatTemplate, or RequestRejected with the parameter at fault: `messages`,
        `chat_template_kwargs` or `continue_final_message`.
        """
        template = self._choose(tools)
        extra = dict(template_kwargs or {})
        template.check_kwargs(extra)
        plain = [_plain(message) for message in messages]
        if final is FinalMessage.CONTINUE:
            plain = _mark_final_message(plain)
        text = template.render(
            {
                **self._special_tokens,
                "documents": None,
                **(template_hints or {}),
                **extra,
                "messages": plain,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": final is FinalMessage.ANSWER,
            }
        )
        return _cut_at_mark(text) if final is FinalMessage.CONTINUE else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Compiled":
        if not self._templates:
            raise NoChatTemplate
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if value is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_plain_call(call) for call in kept["tool_calls"]]
    return kept


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _as_arguments(function["arguments"])}}


def _as_arguments(text: str) -> Any:
    """Parse arguments into an object; other texts stay as the model wrote them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return _Arguments(value, text or "{}") if isinstance(value, dict) else text


class _Arguments(dict[str, Any]):
    """The arguments of a call: an object for most templates, its JSON text for some.

    Printed, or added to a text, it is the text that the model wrote.
    """

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, text: str) -> str:
        return self._text + text

    def __radd__(self, text: str) -> str:
        return text + self._text


class _Refusal(jinja2.TemplateError):
    """A refusal by the template itself, through raise_exception."""


class _Compiled:
    def __init__(self, name: str, source: str) -> None:
        num_bytes = len(source.encode(errors="replace"))
        if num_bytes > MAX_TEMPLATE_BYTES:
            raise TokenizerError(
                f"the chat template {name!r} has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are read",
                "remove it from the checkpoint, or check where the checkpoint comes from",
            )
        self.source = source
        try:
            tree = _ENVIRONMENT.parse(source)
            read = jinja2.meta.find_undeclared_variables(tree)
            _insert_ticks(tree)
            _ConcatCalls().visit(tree)
            code = _ENVIRONMENT.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template {name!r} is broken at line {error.lineno}: {error.message}",
                "correct or remove it in the checkpoint folder",
            ) from error
        self._template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        ours = {*_OUR_VARIABLES, *NAMED_SPECIAL_TOKENS, *_ENVIRONMENT.globals}
        self._free_variables = frozenset(read) - ours

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse variables that the template does not read, or that the server sets."""
        for name in kwargs:
            if name not in self._free_variables:
                known = ", ".join(sorted(self._free_variables)) or "nothing"
                raise RequestRejected(
                    f"chat_template_kwargs cannot set {name[:100]!r}; it can set, for this model: {known}",
                    param="chat_template_kwargs",
                )

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, _TICK: _clock(), _CONCAT: _concat}):
                num_chars += len(piece)
                if num_chars > MAX_RENDERED_CHARS:
                    raise RequestRejected(
                        f"the rendered chat has more than {MAX_RENDERED_CHARS} characters",
                        param="messages",
                    )
                pieces.append(piece)
        except _Refusal as refusal:
            reason = str(refusal)[:_MAX_REASON_CHARS]
            raise RequestRejected(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from refusal
        except _RENDERING_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            raise RequestRejected(
                f"the chat template cannot render these messages ({reason})", param="messages"
            ) from error
        return "".join(pieces)


def _mark_final_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the end of the last text of the last message, in a copy."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        marked: Any = content + _CONTINUE_MARK
    elif isinstance(content, list):
        marked = _mark_last_text_part(content)
    else:
        raise _cannot_continue("the last message has no text content")
    return [*messages[:-1], {**messages[-1], "content": marked}]


def _mark_last_text_part(parts: list[Any]) -> list[Any]:
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return [*parts[:place], {**part, "text": part["text"] + _CONTINUE_MARK}, *parts[place + 1 :]]
    raise _cannot_continue("the last message has no text content")


def _cut_at_mark(rendered: str) -> str:
    at = rendered.rfind(_CONTINUE_MARK.rstrip())
    if at == -1:
        raise _cannot_continue("the chat template leaves the end of the last message out")
    is_trimmed = not rendered.startswith(_CONTINUE_MARK, at)
    return rendered[:at].rstrip() if is_trimmed else rendered[:at]


def _cannot_continue(reason: str) -> RequestRejected:
    return RequestRejected(
        f"continue_final_message cannot be honoured: {reason}", param="continue_final_message"
    )


class _GenerationTag(jinja2.ext.Extension):
    """The tag {% generation %}, which marks text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared as an instance attribute by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _clock() -> Callable[[], str]:
    """Make a function that ends a rendering that takes too long: a thread cannot be stopped from outside."""
    deadline = time.monotonic() + MAX_RENDERING_S

    def tick() -> str:
        if time.monotonic() > deadline:
            raise _Unbounded(f"it takes longer than {MAX_RENDERING_S:g} seconds")
        return ""

    return tick


def _insert_ticks(tree: jinja2.nodes.Template) -> None:
    """Check the time in every turn of a loop and every call of a macro."""
    for loop in tree.find_all(jinja2.nodes.For):
        loop.body.insert(0, _tick_statement(loop.lineno))
    for macro in tree.find_all(jinja2.nodes.Macro):
        macro.body.insert(0, _tick_statement(macro.lineno))


def _tick_statement(lineno: int) -> jinja2.nodes.Node:
    call = jinja2.nodes.Call(jinja2.nodes.Name(_TICK, "load"), [], [], None, None)
    return jinja2.nodes.ExprStmt(call).set_lineno(lineno)


class _Unbounded(jinja2.TemplateError):
    """The template takes too much time or memory."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses operations whose result would fill the memory."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            is_too_much = abs(left) > _MAX_BASE or abs(right) > _MAX_EXPONENT
        elif operator == "+":
            is_too_much = _num_items(left) + _num_items(right) > MAX_RENDERED_CHARS
        elif operator == "%":
            is_too_much = isinstance(left, str) and _WIDE_FORMAT.search(left) is not None
        else:
            is_too_much = _num_chars(left, right) > MAX_RENDERED_CHARS
        if is_too_much:
            raise _Unbounded(f"{operator} makes too large a value")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template, unless it is a method that makes a huge text of small ones."""
        method = getattr(function, "__wrapped__", function)  # the sandbox's own stands before `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str) and name in _BOUND_OF_METHOD:
            if name == "join" and args:
                args = (list(args[0]), *args[1:])  # counted, then joined: an iterator is read once
            named = (value for key, value in kwargs.items() if not key.startswith("_"))  # Jinja's own
            if _BOUND_OF_METHOD[name](text, *args, *named) > MAX_RENDERED_CHARS:
                raise _Unbounded(f"{name} makes too large a value")
        return super().call(context, function, *args, **kwargs)


def _num_items(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _joined_chars(separator: str, items: Sequence[Any]) -> int:
    return sum(len(str(item)) for item in items) + len(separator) * len(items)


def _replaced_chars(text: str, old: str = "", new: str = "", *_: Any) -> int:
    return len(text) + text.count(old) * len(new)


def _padded_chars(text: str, width: int = 0, *_: Any) -> int:
    return max(len(text), width)


def _formatted_chars(text: str, *_: Any) -> int:
    return MAX_RENDERED_CHARS + 1 if _WIDE_FORMAT.search(text) else len(text)


_BOUND_OF_METHOD: dict[str, Callable[..., int]] = {
    "join": _joined_chars,
    "replace": _replaced_chars,
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_chars),
    "expandtabs": lambda text, size=8: len(text) + text.count("\t") * size,
    **dict.fromkeys(("format", "format_map"), _formatted_chars),
}
"""Upper limits of the lengths of results, by methods of texts."""


class _ConcatCalls(jinja2.visitor.NodeTransformer):
    """Puts a call of ours in the place of the operator ~, which the sandbox does not see."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        name = jinja2.nodes.Name(_CONCAT, "load")
        return jinja2.nodes.Call(name, node.nodes, [], None, None).set_lineno(node.lineno)


def _concat(*values: Any) -> str:
    texts = [str(value) for value in values]
    if sum(map(len, texts)) > MAX_RENDERED_CHARS:
        raise _Unbounded("~ makes too large a value")
    return "".join(texts)


@jinja2.pass_eval_context
def _join(eval_ctx: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = list(map(jinja2.filters.make_attrgetter(eval_ctx.environment, attribute), items))
    if _joined_chars(d, items) > MAX_RENDERED_CHARS:
        raise _Unbounded("join makes too large a value")
    return jinja2.filters.sync_do_join(eval_ctx, items, d)


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    if _replaced_chars(text, old, new) > MAX_RENDERED_CHARS:
        raise _Unbounded("replace makes too large a value")
    return text.replace(old, new, -1 if count is None else count)


def _center(value: Any, width: int = 80) -> str:
    text = str(value)
    if _padded_chars(text, width) > MAX_RENDERED_CHARS:
        raise _Unbounded("center makes too large a value")
    return text.center(width)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FORMAT.search(str(value)):
        raise _Unbounded("format makes too large a value")
    return jinja2.filters.do_format(str(value), *args, **kwargs)


def _num_chars(left: Any, right: Any) -> int:
    """Compute the length of a product of a number and a text or a list."""
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int) and hasattr(value, "__len__"):
            return len(value) * times
    return 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (the template language's own signature)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 (the same)
) -> str:
    # Not Jinja's own tojson, which escapes <, > and & for HTML: models were trained on plain JSON.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> _Sandbox:
    # Templates come with checkpoints from strangers: the sandbox confines them to text.
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.filters.update(join=_join, replace=_replace, center=_center, format=_format)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def _read_templates(folder: Path, file: Path | None) -> dict[str, str]:
    path = file or folder / "chat_template.jinja"
    try:
        with path.open(encoding="utf-8") as opened:
            return {"default": opened.read(MAX_TEMPLATE_BYTES + 1)}
    except (OSError, ValueError) as error:
        if file is not None or not isinstance(error, FileNotFoundError):
            raise TokenizerError(f"{path} cannot be read: {error}", "correct or replace it") from error
    found = read_json(folder / "tokenizer_config.json").get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        templates = {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts",
            "correct or remove it",
        ) from error
    if "default" not in templates:
        raise TokenizerError(
            f"the checkpoint has the chat templates {', '.join(sorted(templates))}, and none named default",
            "rename one of them in tokenizer_config.json",
        )
    return templates
