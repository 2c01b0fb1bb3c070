"""A checkpoint's chat template, as the API process has it: found there, rendered elsewhere.

Owns: finding the template, and the fault where its rendering ends without an answer.
"""

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineUnavailable, NoChatTemplate, RequestRejected
from engine.text.renderers import CannotRender, RendererEnded, Renderers
from engine.text.template_messages import (
    CODE_OUT_OF_MEMORY,
    MAX_MEMORY_BYTES,
    MAX_RENDERING_S,
    Chat,
    MergeReason,
    Program,
    Rendering,
)
from engine.text.tokenizer import TokenizerError, read_json
from worker.checkpoint.tokenizer_files import NAMED_SPECIAL_TOKENS, SETTINGS

MAX_TEMPLATE_BYTES = 256 * 1024
_TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
"""The other templates that are saved there are for uses that no request can ask for."""


class NoRenderer(Exception):
    """No process could be started in which chats are rendered. The checkpoint is not at fault."""

    exit_code = 70
    """A server that ends with it may be started again."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.what = f"there is no process to render chats in: {why}"
        self.fix = "start the server again, where processes may be started and have memory and time"


class ChatTemplate:
    """A checkpoint's chat template. `render` may be called from several threads at once, until `close`."""

    def __init__(self, templates: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """Take templates by name: `default`, and possibly `tool_use` for requests with tools, or none.

        Raises TokenizerError for one that is too long.
        """
        self.variables: frozenset[str] = frozenset()
        """Names that requests may set with an effect; none before `judge`."""
        self.on_merged: Callable[[MergeReason], None] = lambda _: None
        """Called by any thread with the reason for which turns of a chat were merged."""
        for name, source in templates.items():
            _check_length(name, source)
        self._templates = dict(templates)
        self._renderers = Renderers(
            Program(
                templates=self._templates,
                special_tokens=dict(special_tokens),
                reserved_names=NAMED_SPECIAL_TOKENS,
            )
        )

    @classmethod
    def load(
        cls, folder: Path, *, special_tokens: Mapping[str, str], file: Path | None = None
    ) -> "ChatTemplate":
        """Read `file`; without it the checkpoint's template, and its template for tools.

        Raises TokenizerError for one that is unusable.
        """
        return cls(_read_templates(folder, file), special_tokens=special_tokens)

    @property
    def is_present(self) -> bool:
        return bool(self._templates)

    @property
    def source_with_tools(self) -> str:
        """Source of the template for requests with tools; empty if there is none."""
        return self._templates.get("tool_use") or self._templates.get("default", "")

    def judge(self) -> None:
        """Compile it in the process that will render with it; once more if that was killed or is late.

        Raises TokenizerError if it cannot be compiled, NoRenderer if there is no process for it.
        """
        if not self._templates:
            return
        try:
            refusal = self._compile()
        except NoRenderer:
            refusal = self._compile()
        if refusal:
            raise TokenizerError(refusal, "correct or remove it in the checkpoint folder")

    def render(self, chat: Chat) -> str:
        """Render the prompt. See Templates.render.

        Raises NoChatTemplate, or RequestRejected with the parameter at fault: `messages` or
        `continue_final_message`; EngineUnavailable.
        """
        if not self._templates:
            raise NoChatTemplate
        rendering = self._ask(chat)
        if rendering.refusal:
            raise RequestRejected(rendering.refusal, param=rendering.param)
        if rendering.merged_for is not None:
            self.on_merged(rendering.merged_for)
        return rendering.text.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """End the processes that render. Calls of `render` under way raise EngineUnavailable."""
        self._renderers.close()

    def _compile(self) -> str:
        """Return why it cannot be compiled, or nothing. Raises NoRenderer."""
        try:
            answer = self._renderers.try_program()
        except TimeoutError:
            raise NoRenderer("it has not answered in time") from None
        except RendererEnded as error:
            if error.exit_code == -signal.SIGKILL:  # from outside
                raise NoRenderer("it was killed, as the kernel does where memory is short") from None
            return "compiling the chat template takes too much memory, or fails"
        except CannotRender as error:
            raise NoRenderer(str(error)) from None
        self.variables = frozenset(answer.variables)
        return answer.refusal

    def _ask(self, chat: Chat) -> Rendering:
        try:
            return self._renderers.render(chat, timeout_s=MAX_RENDERING_S)
        except UnicodeEncodeError:
            reason = "they hold half of a surrogate pair, which is not text"
        except TimeoutError:
            reason = f"it takes longer than {MAX_RENDERING_S:g} seconds"
        except RendererEnded as error:
            if error.exit_code == -signal.SIGKILL:  # from outside; the chat may be fine
                raise EngineUnavailable(
                    "the process that renders chats was killed; the request may be sent again"
                ) from None
            if error.exit_code == CODE_OUT_OF_MEMORY:
                reason = f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory"
            else:
                reason = "it ends the process in which it is rendered"
        except CannotRender as error:
            raise EngineUnavailable(f"there is no process to render chats in: {error}") from None
        raise RequestRejected(f"the chat template cannot render these messages ({reason})", param="messages")


def _check_length(name: str, source: str) -> None:
    num_bytes = len(source.encode(errors="replace"))
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise TokenizerError(
            f"the chat template {name!r} has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are read",
            "remove it from the checkpoint, or check where the checkpoint comes from",
        )


def _read_templates(folder: Path, file: Path | None) -> dict[str, str]:
    """Find templates by name. Those in files come before those in settings."""
    default = _read_template(file or folder / "chat_template.jinja")
    if default is None and file is not None:
        raise TokenizerError(f"{file} cannot be read: there is no such file", "correct or replace it")
    found = {} if default is not None else _configured_templates(folder)
    named = {"default": default, "tool_use": None if file else _read_template(folder / _TOOL_USE_FILE)}
    return found | {name: source for name, source in named.items() if source is not None}


def _read_template(path: Path) -> str | None:
    """Read a file no further than its size is judged by; None without it. Raises TokenizerError."""
    try:
        with path.open(encoding="utf-8") as opened:
            return opened.read(MAX_TEMPLATE_BYTES + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}", "correct or replace it") from error


def _configured_templates(folder: Path) -> dict[str, str]:
    """Find the templates of tokenizer_config.json, or else of chat_template.json, the processor's file."""
    for name in (SETTINGS, "chat_template.json"):
        found = read_json(folder / name).get("chat_template")
        if isinstance(found, str):
            return {"default": found}
        if found is not None:
            return _templates_by_name(folder / name, found)
    return {}


def _templates_by_name(path: Path, found: Any) -> dict[str, str]:
    try:
        templates = found if isinstance(found, dict) else {each["name"]: each["template"] for each in found}
        if not all(isinstance(each, str) for named in templates.items() for each in named):
            raise TypeError
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            f"{path}: chat_template is neither a text nor texts by their names", "correct or remove it"
        ) from error
    if "default" not in templates:
        raise TokenizerError(
            f"the checkpoint has the chat templates {', '.join(sorted(templates))}, and none named default",
            f"rename one of them in {path.name}",
        )
    return templates
