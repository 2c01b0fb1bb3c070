"""Checks of a request against the served model: its vocabulary and its context window."""

from collections.abc import Sequence

from engine.errors import ContextLengthExceeded, RequestRejected
from engine.types import ModelInfo

_MAX_CHARS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens, so that a text of more characters than this allows cannot fit."""


def check_token_ids(token_ids: Sequence[int], info: ModelInfo, *, param: str) -> None:
    """Refuse ids that the model has no embedding for; a tokenizer may know more tokens than the model."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= info.vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < info.vocab_size)
        reason = f"token ids must be from 0 to {info.vocab_size - 1}, not {wrong} (out of vocabulary)"
        raise RequestRejected(reason, param=param)


def check_num_chars(num_chars: int, info: ModelInfo, *, param: str) -> None:
    """Refuse a text that can never fit, before the tokenizer spends seconds on it."""
    limit = info.max_model_len * _MAX_CHARS_PER_TOKEN
    if num_chars > limit:
        raise ContextLengthExceeded(
            f"the prompt has {num_chars} characters; no text of more than {limit} fits the context window"
            f" of {info.max_model_len} tokens",
            param=param,
        )
