"""The language of chat templates: messages to prompt text, in a sandbox.

Never: bounds memory or time, which the process around it does (template_process.py); lets a request set the
template's own variables.
Source: the template language that `apply_chat_template` of Hugging Face transformers defines; its
results are matched text for text (tests/engine/text/test_template_language.py).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from engine.errors import RequestRejected
from engine.text.merged_turns import has_later_system, left_out, merged
from engine.text.template_messages import Chat, FinalMessage, MergeReason, Program

MAX_RENDERED_CHARS = 16 * 1024 * 1024
_MAX_REASON_CHARS = 500

_OUR_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

# Ends the content of the message to continue, so that the place can be found again in the rendered text.
# Private-use characters: no tokenizer's special token, no whitespace that a template would trim. The
# space at its end is there to be trimmed: whether it survived tells whether the template trims content.
_CONTINUE_MARK = "\ue000continue here\ue001 "

# Chats that show whether the messages of a role may have several texts.
_TWO_TEXTS = [{"type": "text", "text": "\ue000first\ue001"}, {"type": "text", "text": "\ue000second\ue001"}]
_QUESTION = {"role": "user", "content": "question"}
_TRIALS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": _TWO_TEXTS}, _QUESTION],
    "user": [{"role": "user", "content": _TWO_TEXTS}],
    "assistant": [_QUESTION, {"role": "assistant", "content": _TWO_TEXTS}, _QUESTION],
}

# A chat that shows whether a later system message is a turn of its own, or glued to the text before it.
_WELDED = [
    {"role": "user", "content": "\ue000first\ue001"},
    {"role": "system", "content": "\ue000third\ue001"},
    _QUESTION,
]

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


class _LeftOut(RequestRejected):
    """A template that leaves the text of a message out."""


class BrokenTemplate(Exception):
    """A template that cannot be compiled; its text says where."""


class Templates:
    """A checkpoint's chat templates, compiled."""

    def __init__(self, program: Program) -> None:
        """Raises BrokenTemplate."""
        self._special_tokens = tokens = program.special_tokens
        ours = frozenset({*_OUR_VARIABLES, *tokens, *program.reserved_names, *_ENVIRONMENT.globals})
        self._templates = {name: _Compiled(name, source, ours) for name, source in program.templates.items()}
        self.merged_for: MergeReason | None = None
        """Reason for which turns of the last chat were merged; None if they were not."""

    @property
    def variables(self) -> frozenset[str]:
        """Names that requests may set with an effect: those that a template reads, but the server's own."""
        return frozenset().union(*(each.free_variables for each in self._templates.values()))

    def render(self, chat: Chat) -> str:
        """Render the prompt. Keys of messages and tools that are None count as absent.

        The arguments of calls are JSON texts, as on the wire; the template gets objects. Neither hints nor
        other variables need be read by the template: then they have no effect.

        Raises RequestRejected with the parameter at fault: `messages` or `continue_final_message`;
        MemoryError.
        """
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        template = self._templates[name]
        variables = {
            **self._special_tokens,
            "documents": None,
            **chat.hints,
            **template.read(chat.kwargs),
            "tools": list(chat.tools) if chat.tools else None,
            "add_generation_prompt": chat.final is FinalMessage.ANSWER,
        }
        plain = [_plain(message) for message in chat.messages]
        ways: Iterable[list[dict[str, Any]]] = chain([plain], merged(plain))
        reason = None
        if has_later_system(plain) and template.welds(self._special_tokens):
            ways, reason = sorted(ways, key=has_later_system), MergeReason.WELDED
        refusals = []
        for way in ways:
            text, refusal = self._try(template, way, chat.final, variables)
            if refusal is None:
                self.merged_for = None if way is plain else reason
                return text
            refusals.append(refusal)
            if way is plain:
                reason = MergeReason.LEFT_OUT if isinstance(refusal, _LeftOut) else MergeReason.REFUSED
        raise refusals[0]

    def _try(
        self,
        template: "_Compiled",
        messages: Sequence[dict[str, Any]],
        final: FinalMessage,
        variables: Mapping[str, Any],
    ) -> tuple[str, RequestRejected | None]:
        """Render messages, all texts of which are to be in the prompt; return what is wrong with that."""
        shown = [self._with_content(template, message) for message in messages]
        try:
            if final is FinalMessage.CONTINUE:
                shown = _mark_final_message(shown)
            text = template.render({**variables, "messages": shown})
            missing = left_out(messages, text)
            if missing is None:
                return _cut_at_mark(text) if final is FinalMessage.CONTINUE else text, None
        except RequestRejected as error:
            return "", error
        return "", _LeftOut(
            f"the chat template leaves messages[{missing}] out, and no merged turns make up for it",
            param="messages",
        )

    def _with_content(self, template: "_Compiled", message: dict[str, Any]) -> dict[str, Any]:
        """Leave a list of texts to a template that walks through such; join it for others."""
        content = message.get("content")
        if not isinstance(content, list) or template.takes_parts(message["role"], self._special_tokens):
            return message
        if any("text" not in part for part in content):  # a picture, which no text stands for
            return message
        return {**message, "content": "\n".join(part["text"] for part in content)}


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
    def __init__(self, name: str, source: str, ours: frozenset[str]) -> None:
        names = _NameFinder(_ENVIRONMENT)
        try:
            tree = _ENVIRONMENT.parse(source)
            names.visit(tree)
            code = _ENVIRONMENT.compile(tree)
        except RecursionError as error:
            raise BrokenTemplate(f"the chat template {name!r} is nested too deeply") from error
        except jinja2.TemplateSyntaxError as error:
            raise BrokenTemplate(
                f"the chat template {name!r} is broken at line {error.lineno}: {error.message}"
            ) from error
        self._template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
        self.free_variables = frozenset(names.undeclared_identifiers) - ours
        self._takes_parts: dict[str, bool] = {}
        """Answers of takes_parts, by role."""
        self._welds: bool | None = None

    def takes_parts(self, role: str, special_tokens: Mapping[str, str]) -> bool:
        """Tell whether messages of a role may have lists of texts as content: by a trial, once."""
        if role not in self._takes_parts:
            self._takes_parts[role] = role in _TRIALS and self._writes_parts(_TRIALS[role], special_tokens)
        return self._takes_parts[role]

    def _writes_parts(self, messages: list[dict[str, Any]], special_tokens: Mapping[str, str]) -> bool:
        """Render a chat of two texts; a template that knows no parts fails, or shows the list as such."""
        _, first, rest = self._tried(messages, special_tokens).partition(_TWO_TEXTS[0]["text"])
        between, second, _ = rest.partition(_TWO_TEXTS[1]["text"])
        return bool(first and second) and "text" not in between

    def welds(self, special_tokens: Mapping[str, str]) -> bool:
        """Tell whether a later system message is glued to the text before it: by a trial, once."""
        if self._welds is None:
            first, later = (message["content"] for message in _WELDED[:2])
            before, found, _ = self._tried(_WELDED, special_tokens).partition(later)
            # A template that writes texts and nothing else tells no turns apart.
            self._welds = bool(found) and before.strip() != first and before.rstrip().endswith(first)
        return self._welds

    def _tried(self, messages: list[dict[str, Any]], special_tokens: Mapping[str, str]) -> str:
        """The text of a chat that shows a habit of the template; empty if it refuses it."""
        variables = {**special_tokens, "documents": None, "tools": None, "add_generation_prompt": False}
        try:
            return self.render({**variables, "messages": messages})
        except RequestRejected:
            return ""

    def read(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of these that the template reads, and that are not the server's."""
        return {name: value for name, value in kwargs.items() if name in self.free_variables}

    def render(self, variables: Mapping[str, Any]) -> str:
        pieces = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
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


class _LazyCompiler(jinja2.compiler.CodeGenerator):
    """A compiler that computes nothing beforehand: constants can be as expensive as other expressions."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData | jinja2.nodes.Const):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _NameFinder(_LazyCompiler, jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads and does not set."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None  # the environment's setting does not reach this one


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _LazyCompiler


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
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
