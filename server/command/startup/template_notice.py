"""The warning about a checkpoint's response template that says what no row can."""

from pathlib import Path

from engine.models.entries import ModelSpec
from engine.options.engine_config import ServerConfig
from engine.text.checkpoint_texts import read_response_template, refusing
from server.reply.reading.template_rows import find_template_row


def note_template(folder: Path, options: ModelSpec | ServerConfig) -> None:
    """Read the template that would be used. Raises TokenizerError for a broken file."""
    with refusing(folder):
        text = read_response_template(folder)
    if text and options.tool_call_parser == options.reasoning_parser == "auto":
        find_template_row(text)
