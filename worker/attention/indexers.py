"""Sparse attention: the model's own indexers choose the keys that a token attends to, per sequence of a step.

Owns: the seam: an indexer scores a sequence's index keys, one for each token, and chooses the best. It keeps
its keys by a call of a cache of transformers; here they are rows of one more layer of the KV cache.
Source: DeepSeek sparse attention, arXiv:2512.02556.

A sequence that is no longer than the choice sees all of its keys: its index keys are written, and no more.

Shapes: T tokens of the step, N of a sequence's share of it, S of the sequence, D numbers of an index key, C
groups of query heads that choose alike, K chosen tokens or blocks of tokens.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.attention.interface import KeyChoice, StepSpan, Unmasked, is_executing, present_executor
from worker.worker_errors import FamilyRefused, UnsupportedAttention

INDEXER = "indexer"
"""Name of an attention module's indexer, in every family."""
INDEXED_LAYERS = ("indexed_attention", "minimax_m3_sparse")
"""Names of layers with a choice in transformers' `layer_types`."""
_CACHE, _MASK = "cache", "attention_mask"
_MOST_SCORES = 2**26
"""Scores that an indexer computes at once, in float32 and some copies of it."""
_COMMON = {"hidden_states", "position_embeddings", "position_ids", _CACHE}
_KNOWN_ARGUMENTS = (_COMMON | {_MASK, "q_resid"}, _COMMON)
"""Arguments of indexers that choose tokens, and of those that choose blocks of tokens."""


class _KeysWritten(Exception):
    """End of an indexer's call, of which its keys were all that was wanted."""


class _TransformersCache:
    """A cache of transformers, as far as indexers know it. They call it in one of two ways."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        self._update = update

    @property
    def layers(self) -> "_TransformersCache":
        return self

    def __getitem__(self, _layer_idx: int) -> "_TransformersCache":
        return self

    def update_indexer(self, keys_1ND: Tensor, _layer_idx: int) -> Tensor:
        """Take keys of a share and return those of its sequence [1, S, D]."""
        return self._update(keys_1ND)

    def update_index(self, keys_11ND: Tensor) -> Tensor:
        """Take keys of a share and return those of its sequence [1, 1, S, D]."""
        return self._update(keys_11ND[0]).unsqueeze(0)


def keep_index_keys(model: nn.Module) -> None:
    """Let indexers choose for each sequence of a step. Raises FamilyRefused for one of another form."""
    attentions = list(_find_attentions(model))
    first = 1 + max(map(_layer_idx, model.modules()))
    for number, module in enumerate(attentions, first):
        indexer = getattr(module, INDEXER)
        names = set(inspect.signature(type(indexer).forward).parameters) - {"self"}
        if names not in _KNOWN_ARGUMENTS:
            raise FamilyRefused(f"{type(indexer).__name__} chooses keys in a way of its own")
        indexer.index_layer, indexer.place = number, (0, 1)
        indexer.forward = MethodType(_choose, indexer)
    if attentions:
        for module in model.modules():
            if hasattr(module, INDEXER):  # of some layers it is None: they take another's choice
                module.register_forward_pre_hook(_without_mask, with_kwargs=True)


def choose_for_rank(indexer: Any, rank: int, num_ranks: int) -> None:
    """Let a choice be that of a rank's own query heads; the indexer itself is whole on each rank."""
    indexer.place = (rank, num_ranks)


def _find_attentions(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(getattr(module, INDEXER, None), nn.Module))


def _layer_idx(module: Any) -> int:
    found = getattr(module, "layer_idx", None)
    return found if isinstance(found, int) else -1


def _without_mask(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the layer something to take a part of: it does so before it calls its indexer."""
    return args, kwargs | {_MASK: Unmasked()} if is_executing() else kwargs


def _choose(indexer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand in for an indexer's `forward`, whose result goes to attention in this layer and maybe others."""
    forward = type(indexer).forward
    if not is_executing():
        return forward(indexer, *args, **kwargs)
    index_keys = present_executor().index_keys
    if index_keys is None:
        raise UnsupportedAttention("a choice of keys by an indexer")
    given = inspect.signature(forward).bind(indexer, *args, **kwargs).arguments
    del given["self"]

    def write(keys_1TD: Tensor) -> Tensor:
        index_keys.write_index(indexer.index_layer, keys_1TD[0])
        raise _KeysWritten

    with suppress(_KeysWritten):
        forward(indexer, **given | {_CACHE: _TransformersCache(write)})
    spans, most = index_keys.spans(), _most_that_see_all(indexer)
    if all(span.seq_len <= most for span in spans):
        return KeyChoice(())
    seen: list[Tensor | None] = []
    for index, span in enumerate(spans):
        if span.seq_len <= most:
            seen.append(None)
            continue
        keys_1SD = index_keys.read_index(indexer.index_layer, index).unsqueeze(0)
        parts = []
        for part in _parts_of(span, indexer):
            cache = _TransformersCache(partial(_again, keys_1SD[:, : part.seq_len]))
            chosen = forward(indexer, **_share_of(given, part) | {_CACHE: cache})
            seen_CNS = _seen(indexer, chosen, part.seq_len)
            parts.append(functional.pad(seen_CNS, (0, span.seq_len - part.seq_len)))
        seen.append(torch.cat(parts, dim=1))
    return KeyChoice(tuple(seen))


def _parts_of(span: StepSpan, indexer: Any) -> Iterator[StepSpan]:
    """Divide a share so that the scores of a part, of all heads, take a bounded memory."""
    num_heads: int = getattr(indexer, "n_heads", 0) or indexer.num_heads
    most = max(1, _MOST_SCORES // (num_heads * span.seq_len))
    for start in range(span.start, span.end, most):
        end = min(start + most, span.end)
        yield StepSpan(start, end, span.seq_len - (span.end - end))


def _again(keys_1SD: Tensor, _written_1ND: Tensor) -> Tensor:
    return keys_1SD


def _share_of(given: dict[str, Any], span: StepSpan) -> dict[str, Any]:
    """Take a sequence's part of the arguments of a step, with a mask of its own."""
    share = {name: _cut(value, span.start, span.end) for name, value in given.items()}
    if _MASK in given:
        device = given["hidden_states"].device
        positions_N = torch.arange(span.seq_len - (span.end - span.start), span.seq_len, device=device)
        keys_S = torch.arange(span.seq_len, device=device)
        share[_MASK] = (keys_S <= positions_N.unsqueeze(1)).unsqueeze(0)
    return share


def _most_that_see_all(indexer: Any) -> int:
    """Count the tokens of the longest sequence of which all are chosen."""
    most: int = indexer.index_topk if _chooses_tokens(indexer) else indexer.topk_blocks * indexer.block_size
    return most


def _chooses_tokens(indexer: Any) -> bool:
    return hasattr(indexer, "index_topk")


def _seen(indexer: Any, chosen: Tensor, seq_len: int) -> Tensor:
    """Mark what was chosen: tokens [1, N, K], or blocks [1, C, N, K], of which -1 stands for none."""
    size = 1 if _chooses_tokens(indexer) else indexer.block_size
    chosen_CNK = chosen.long() if size == 1 else chosen[0].long()
    (rank, num_ranks), num_groups = indexer.place, len(chosen_CNK)
    first = rank * num_groups // num_ranks  # groups are those of KV heads, of which ranks may share one
    chosen_CNK = chosen_CNK[first : first + max(1, num_groups // num_ranks)]
    num_blocks = -(-seq_len // size)
    shape = (*chosen_CNK.shape[:2], num_blocks + 1)
    seen_CNB = torch.zeros(shape, dtype=torch.bool, device=chosen.device)
    seen_CNB.scatter_(-1, chosen_CNK.masked_fill(chosen_CNK < 0, num_blocks), value=True)
    return seen_CNB[..., :-1].repeat_interleave(size, dim=-1)[..., :seq_len]


def _cut(value: Any, start: int, end: int) -> Any:
    """Take some tokens of [1, T, ...], or of several such; whatever has no tokens stays."""
    if isinstance(value, tuple):
        return tuple(_cut(each, start, end) for each in value)
    return value[:, start:end] if isinstance(value, Tensor) else value
