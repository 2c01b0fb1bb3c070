"""Facts that a worker reports of a tiny model."""

from typing import Any

from worker.worker_config import ModelFacts


def facts(**found: Any) -> ModelFacts:
    """With what a test is about."""
    return ModelFacts(
        model_type="llama",
        num_parameters=1,
        weight_bytes=1,
        dtype="float32",
        device="any",
        vocab_size=97,
        max_model_len=64,
        block_size=4,
        num_blocks=8,
        kv_cache_bytes=1,
        eos_token_ids=(),
        **found,
    )
