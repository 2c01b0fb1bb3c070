"""Refusals of requests that can never be served, however much is freed."""

from scheduler.config import SchedulerConfig
from scheduler.sequence import Sequence


class NeverFits(Exception):
    """A sequence needs more than there is, however much is freed. The text is for the caller."""


def refuse_beyond_limits(seq: Sequence, config: SchedulerConfig) -> None:
    """Raise NeverFits for a prompt longer than the context window, or than the step that must hold it."""
    num_tokens = seq.num_tokens
    if seq.pooling is None and num_tokens >= config.max_model_len:
        raise NeverFits(
            f"the prompt has {num_tokens} tokens; with at least one to generate, at most "
            f"{config.max_model_len - 1} fit the context window"
        )
    if num_tokens > config.max_model_len:
        raise NeverFits(
            f"the prompt has {num_tokens} tokens; at most {config.max_model_len} fit the context window"
        )
    if seq.is_indivisible and num_tokens > config.max_num_batched_tokens:
        raise NeverFits(
            f"the prompt has {num_tokens} tokens; this model computes a prompt in one step, and a step has "
            f"at most {config.max_num_batched_tokens}"
        )


def refuse_inputs_without_room(seq: Sequence, config: SchedulerConfig) -> None:
    """Raise NeverFits for an adapter where none is served, or inputs that no step can encode.

    Raises ValueError for inputs that overlap, or after which the prompt does not go on.
    """
    if seq.adapter and not config.max_adapters:
        raise NeverFits(f"adapter {seq.adapter!r}: no adapters are served")
    end, largest = 0, 0
    for item in seq.encoder_inputs:
        if item.offset < end or item.num_tokens < 1 or item.end >= seq.num_prompt_tokens:
            raise ValueError(f"{item} overlaps the one before it, or has no token of the prompt behind it")
        end, largest = item.end, max(largest, item.num_tokens)
    if seq.is_indivisible:  # all of them are needed at once
        largest = sum(item.num_tokens for item in seq.encoder_inputs)
    room = config.encoder_cache_tokens
    if config.inputs_at_once:
        room = min(room, config.max_num_batched_tokens)
    if largest > room:
        raise NeverFits(f"an input of the prompt has {largest} encoder tokens; at most {room} have room")
