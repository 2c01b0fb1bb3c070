"""A model of transformers, called for one sequence at a time with the cache that the model itself makes.

Owns: the call of the model, and the cache kept between calls, where the family makes one that can be used.

Shapes: T tokens, V tokens of the vocabulary.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.interface import note_layer_begun

# Names of the output that a model takes back with the next token. The first came with transformers 5.24.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(slots=True)
class SequenceCache:
    """The model's cache of one sequence."""

    is_kept: bool
    """Whether the model gets it back. Otherwise it stays empty: all tokens are computed again for each."""
    num_tokens: int = 0
    content: Any = None


class OwnCacheModel:
    """Caller of the model, one sequence after the other."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self._model: Any = model
        self._vocab_size = vocab_size
        self._device: torch.device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._can_choose_logits = "logits_to_keep" in parameters
        for layer in _layers_of(model):
            layer.register_forward_pre_hook(lambda *_: note_layer_begun())

    @torch.inference_mode()
    def compute(self, token_ids: list[int], cache: SequenceCache, *, num_logits: int) -> Tensor:
        """Compute logits [num_logits, V] of the last of `token_ids`, all tokens of the sequence so far.

        Only tokens that the cache does not hold yet are computed; one that is kept then holds all.
        """
        start = cache.num_tokens
        ids_1T = torch.tensor(token_ids[start:], device=self._device).unsqueeze(0)
        arguments: dict[str, Any] = {"use_cache": cache.is_kept, "return_dict": True}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, len(token_ids), device=self._device).unsqueeze(0)
        if self._can_choose_logits:
            arguments["logits_to_keep"] = num_logits
        if cache.content is not None:
            name, content = cache.content
            arguments[name] = content
        outputs = self._model(input_ids=ids_1T, **arguments)
        if cache.is_kept:
            cache.content, cache.num_tokens = _content_of(outputs), len(token_ids)
        logits_TV: Tensor = outputs.logits[0, -num_logits:, : self._vocab_size]
        return logits_TV


def num_bytes(cache: SequenceCache) -> int:
    """Sum up the tensors of a cache."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors_in(cache.content, depth=6)}.values())


def _content_of(outputs: Any) -> tuple[str, Any]:
    for name in _CACHE_NAMES:
        content = getattr(outputs, name, None)
        if content is not None:
            return name, content
    raise LookupError("the model returns no cache")


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Find the layers, the longest list of modules: they begin several times in each call."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(longest):
            longest = list(module)
    return longest


def _tensors_in(content: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
        return
    if depth == 0 or content is None or isinstance(content, str | int | float | bool | nn.Module):
        return
    if isinstance(content, dict):
        parts = list(content.values())
    elif isinstance(content, list | tuple):
        parts = list(content)
    else:
        parts = list(vars(content).values()) if hasattr(content, "__dict__") else []
    for part in parts:
        yield from _tensors_in(part, depth - 1)
