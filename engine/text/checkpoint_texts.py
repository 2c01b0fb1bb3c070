"""What the API process reads of a checkpoint: its tokenizer and its chat template.

Owns: that they are compared with the operator's list of checksums, if there is one, before they are parsed.
Never: the formats (tokenizer.py, chat_template.py), or what the engine process reads
(worker/startup/loader.py).
"""

from pathlib import Path
from typing import NamedTuple

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer, TokenizerError
from worker.checkpoint.checksums import Checksums
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


class CheckpointTexts(NamedTuple):
    """See the module."""

    tokenizer: Tokenizer
    template: ChatTemplate


def load_texts(config: WorkerConfig) -> CheckpointTexts:
    """Raises TokenizerError."""
    folder = Path(config.model_path)
    if config.checksums_file is not None:
        try:
            Checksums.read(Path(config.checksums_file)).check_texts(folder)
        except StartupError as error:
            raise TokenizerError(error.what, error.fix) from error
    tokenizer = Tokenizer.load(folder)
    return CheckpointTexts(tokenizer, ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens))
