"""The response template of a model, where it has one and the options leave the choice to it.

Owns: the choice between a checkpoint's template and the rows of our tables, and the check at the start.
Never: reads a reply (template_reader.py).
"""

import json
from functools import cache
from pathlib import Path
from typing import Protocol

from engine.options.engine_config import ServerConfig
from engine.text.checkpoint_texts import read_response_template, refusing
from engine.text.tokenizer import TokenizerError
from engine.types import ModelInfo
from server.reply.response_templates.template import (
    MAX_TEMPLATE_CHARS,
    ResponseTemplate,
    TemplateError,
    compile_template,
)


class _Parsers(Protocol):
    """Both options, as --tool-call-parser and --reasoning-parser name them."""

    @property
    def tool_calls(self) -> str: ...
    @property
    def reasoning(self) -> str: ...


def find_template(parsers: _Parsers, info: ModelInfo) -> ResponseTemplate | None:
    """Return the checkpoint's template; None without one, or if an option names a parser."""
    is_ours = parsers.tool_calls == parsers.reasoning == "auto"
    return _compiled(info.response_template) if is_ours and info.response_template else None


def check_template(folder: Path, options: ServerConfig) -> None:
    """Compile the template that would be used, before anything is loaded. Raises TokenizerError."""
    with refusing(folder):
        _check_template(folder, options)


def _check_template(folder: Path, options: ServerConfig) -> None:
    text = read_response_template(folder)
    if not text or not options.tool_call_parser == options.reasoning_parser == "auto":
        return
    try:
        _compiled(text)
    except TemplateError as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: its response_template cannot be used: {error}",
            "name the parsers with --tool-call-parser and --reasoning-parser, which set it aside,"
            " or remove response_template from the file",
        ) from error


@cache
def _compiled(text: str) -> ResponseTemplate:
    if len(text) > MAX_TEMPLATE_CHARS:
        raise TemplateError(f"it has {len(text)} characters; at most {MAX_TEMPLATE_CHARS} are read")
    return compile_template(json.loads(text))
