"""The text files of a checkpoint: its tokenizer and its chat template.

Owns: the comparison with the operator's list of checksums, if there is one, before they are parsed.
Never: parses them (tokenizer.py, chat_template.py), or reads weights (worker/startup/loader.py).
"""

from pathlib import Path
from typing import NamedTuple

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer, TokenizerError
from worker.checkpoint.checksums import Checksums
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


class CheckpointTexts(NamedTuple):
    """The tokenizer and the chat template of a checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate


def load_texts(config: WorkerConfig) -> CheckpointTexts:
    """Check and load both. Raises TokenizerError."""
    folder = Path(config.model_path)
    if config.checksums_file is not None:
        try:
            Checksums.read(Path(config.checksums_file)).check_texts(folder)
        except StartupError as error:
            raise TokenizerError(error.what, error.fix) from error
    tokenizer = Tokenizer.load(folder)
    file = None if config.chat_template_file is None else Path(config.chat_template_file)
    template = ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens, file=file)
    return CheckpointTexts(tokenizer, template)
