"""A checkpoint's chat template, as the API process has it: found there, rendered elsewhere.

Owns: finding the template, and the fault where its rendering ends without an answer.
Never: runs anything of a template (template_language.py), or tokenizes; knows a model family.
"""

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineUnavailable, NoChatTemplate, RequestRejected
from engine.text.renderers import CannotRender, RendererEnded, Renderers
from engine.text.template_messages import (
    CODE_OUT_OF_MEMORY,
    MAX_MEMORY_BYTES,
    MAX_RENDERING_S,
    Chat,
    FinalMessage,
    Program,
    Rendering,
)
from engine.text.tokenizer import NAMED_SPECIAL_TOKENS, TokenizerError, read_json

MAX_TEMPLATE_BYTES = 256 * 1024


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
        """Read `file`; without it chat_template.jinja, or tokenizer_config.json.

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

    @property
    def renderer_pids(self) -> list[int]:
        """The ids of the processes that render, for tests."""
        return self._renderers.pids

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

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        final: FinalMessage = FinalMessage.ANSWER,
        template_kwargs: Mapping[str, Any] | None = None,
        template_hints: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. See Templates.render.

        Raises NoChatTemplate, or RequestRejected with the parameter at fault: `messages`,
        `chat_template_kwargs` or `continue_final_message`; EngineUnavailable.
        """
        if not self._templates:
            raise NoChatTemplate
        chat = Chat(
            messages=list(map(dict, messages)),
            tools=list(map(dict, tools or ())),
            final=final,
            kwargs=dict(template_kwargs or {}),
            hints=dict(template_hints or {}),
        )
        rendering = self._ask(chat)
        if rendering.refusal:
            raise RequestRejected(rendering.refusal, param=rendering.param)
        return rendering.text.decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """End the processes that render. Calls of `render` under way raise EngineUnavailable."""
        self._renderers.close()

    def _compile(self) -> str:
        """Return why it cannot be compiled, or nothing. Raises NoRenderer."""
        try:
            return self._renderers.try_program()
        except TimeoutError:
            raise NoRenderer("it has not answered in time") from None
        except RendererEnded as error:
            if error.exit_code == -signal.SIGKILL:  # from outside
                raise NoRenderer("it was killed, as the kernel does where memory is short") from None
            return "compiling the chat template takes too much memory, or fails"
        except CannotRender as error:
            raise NoRenderer(str(error)) from None

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
