"""Sizes of a model that its configuration or its layers show: vocabulary, context window, output layer."""

from contextlib import suppress
from typing import Any

from worker.load.model_kind import ModelKind
from worker.load.recurrent_functions import knows_recurrence
from worker.model.quantized_layers import QuantizedEmbedding
from worker.worker_config import WorkerConfig
from worker.worker_errors import FamilyRefused

# Names that families have for the length of their context window.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_LEN_WITHOUT_LIMIT = 8192
"""Context window of a model whose configuration gives none, unless one is asked for."""


def vocab_size_of(model: Any) -> int:
    """Count the tokens that can be both read and sampled: some families read more than they sample."""
    embedding = model.get_input_embeddings()
    num_read = (
        embedding.num_embeddings
        if isinstance(embedding, QuantizedEmbedding)
        else int(embedding.weight.shape[0])
    )
    output = model.get_output_embeddings()
    return num_read if output is None else min(num_read, int(output.out_features))


def head_layers(text_config: Any, vocab_size: int, num_parameters: int, num_layers: int) -> float:
    """Count the output layer's weights in layers; the embedding is looked up, which costs nothing."""
    num_head = vocab_size * int(text_config.hidden_size)
    is_tied = getattr(text_config, "tie_word_embeddings", False)  # few families say it of the whole alone
    num_ends = num_head if is_tied else 2 * num_head
    return num_head * num_layers / max(num_head, num_parameters - num_ends)


def context_window(text_config: Any) -> int:
    """Read the context window from a configuration. Raises FamilyRefused where it gives none."""
    lengths = [getattr(text_config, key, None) for key in _LENGTH_KEYS]
    length = next((int(length) for length in lengths if isinstance(length, int) and length > 0), None)
    if length is None:
        raise FamilyRefused(f"the configuration of {text_config.model_type} gives no context window")
    rope = getattr(text_config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type") == "yarn" and original and factor:
        # Yarn is often added to a configuration whose max_position_embeddings is still the old length.
        length = max(length, int(original * factor))
    return length


def checkpoint_len(config: WorkerConfig, kind: ModelKind, text_config: Any) -> int:
    """Find the longest sequence that a model computes right. Raises FamilyRefused where it gives none."""
    if kind.keeps_own_cache:
        with suppress(FamilyRefused):
            return context_window(text_config)
        return config.max_model_len or _LEN_WITHOUT_LIMIT
    return longest_len(text_config, config.max_model_len)


def longest_len(text_config: Any, asked_len: int | None) -> int:
    """Read the context window, or choose one for a recurrent model without. Raises FamilyRefused."""
    try:
        return context_window(text_config)
    except FamilyRefused:
        if not knows_recurrence(text_config):
            raise
        return asked_len or _LEN_WITHOUT_LIMIT
