"""The files of a checkpoint before any tensor library: its tokenizer, its chat template, its wholeness."""

import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.media.pictures import PicturePreparer
from engine.options.media_options import MediaConfig
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.tokenizer import read_json as read_tokenizer_json
from engine.text.tokenizer_trial import Trial
from worker.checkpoint.checkpoint_files import find_weights, read_json
from worker.checkpoint.checksums import Checksums
from worker.checkpoint.overrides import merged
from worker.checkpoint.plausible_sizes import check_sizes
from worker.checkpoint.tokenizer_files import tokenizer_path
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError, refused_as

_FIX = "download it again, or serve a checkpoint from a source that you trust"


class CheckpointTexts(NamedTuple):
    """The tokenizer and the templates of a checkpoint, and its way with pictures."""

    tokenizer: Tokenizer
    template: ChatTemplate
    trial: Trial
    """The trial of the tokenizer's patterns, which goes on. No client's text comes before its end."""
    response_template: str
    """JSON text; empty without one."""
    pictures: PicturePreparer


def refusing(folder: Path) -> AbstractContextManager[None]:
    """Turn any error of reading a folder's files into a TokenizerError."""
    return refused_as(partial(TokenizerError, fix=_FIX), folder, but=(TokenizerError,))


def check_files(config: WorkerConfig) -> None:
    """Find in a moment what the engine process would find after seconds of imports. Raises TokenizerError.

    A broken config.json, weights that are missing or cut off, and a context beyond the model's.
    """
    folder = Path(config.model_path)
    with refusing(folder):
        _check_files(config, folder)


def _check_files(config: WorkerConfig, folder: Path) -> None:
    try:
        content = merged(read_json(folder / "config.json"), config.config_overrides)
        check_sizes(content, find_weights(folder))
    except StartupError as error:
        raise TokenizerError(error.what, error.fix) from error
    longest = _plain_context(content)
    if longest and (config.max_model_len or 0) > longest:
        raise TokenizerError(
            f"--max-model-len {config.max_model_len} exceeds the model's context window of {longest} tokens",
            f"ask for {longest} or less",
        )


def _plain_context(content: dict[str, Any]) -> int:
    """Context window where config.json says it plainly; 0 where only the model's class knows."""
    scaled = content.get("rope_scaling") or content.get("rope_parameters")
    length = content.get("max_position_embeddings")
    return length if isinstance(length, int) and not scaled else 0


def load_texts(config: WorkerConfig, media: MediaConfig) -> CheckpointTexts:
    """Check and load all, and begin the trial. Raises TokenizerError."""
    folder = Path(config.model_path)
    if config.checksums_file is not None:
        try:
            Checksums.read(Path(config.checksums_file)).check_texts(folder)
        except StartupError as error:
            raise TokenizerError(error.what, error.fix) from error
    file = None if config.chat_template_file is None else Path(config.chat_template_file)
    try:
        trial = Trial(tokenizer_path(folder))
    except StartupError as error:
        raise TokenizerError(error.what, error.fix) from error
    try:
        with refusing(folder):
            tokenizer = Tokenizer.load(folder)
            template = ChatTemplate.load(folder, special_tokens=tokenizer.special_tokens, file=file)
            response_template = read_response_template(folder)
    except BaseException:
        trial.close()
        raise
    pictures = PicturePreparer(config.model_path, media, tokenizer.special_tokens, tokenizer.token_string)
    return CheckpointTexts(tokenizer, template, trial, response_template, pictures)


def tokenizer_config(config: WorkerConfig) -> dict[str, Any]:
    """Return tokenizer_config.json of the checkpoint; empty without one."""
    return read_tokenizer_json(Path(config.model_path) / "tokenizer_config.json")


def read_response_template(folder: Path) -> str:
    """Return the JSON text of the template by which replies are read; empty without one.

    Nothing of it is compiled here. Raises TokenizerError for a broken tokenizer_config.json.
    """
    found = read_tokenizer_json(folder / "tokenizer_config.json").get("response_template")
    return "" if found is None else json.dumps(found)
