"""The output layer and the embedding, divided by tokens of the vocabulary.

Shapes: T tokens, V tokens of the vocabulary, P of them on one rank, H numbers of a hidden state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.model.linear import Linear, Segment
from worker.ranks.ranks import Ranks


class VocabularyShard(NamedTuple):
    """The tokens of one rank; the last ranks may have fewer than the others, or none."""

    num_tokens: int
    """Tokens of all ranks."""
    first: int
    num_own: int
    num_padded: int
    """Tokens of the rank with most."""


def shard_vocabulary(num_tokens: int, ranks: Ranks) -> VocabularyShard:
    """Divide the tokens, for each rank the same number as far as there are as many."""
    num_padded = -(-num_tokens // ranks.size)
    first = min(num_tokens, ranks.rank * num_padded)
    return VocabularyShard(num_tokens, first, min(num_padded, num_tokens - first), num_padded)


def shard_output(linear: Linear, shard: VocabularyShard) -> Linear:
    """Take a rank's outputs, padded with the first one's: their logits are dropped."""
    indices_P = torch.zeros(shard.num_padded, dtype=torch.int64, device=linear.weight.device)
    indices_P[: shard.num_own] = torch.arange(shard.first, shard.first + shard.num_own)
    bias_P = None if linear.bias_N is None else linear.bias_N[indices_P]
    return Linear(linear.weight.outputs(indices_P), bias_P, (Segment(shard.num_padded),))


def divide_ends(model: Any, output: Linear, make: Callable[[Linear], nn.Module], ranks: Ranks) -> None:
    """Keep a rank's part of the output layer, by `make`, and of an embedding that only looks up."""
    shard = shard_vocabulary(output.num_outputs, ranks)
    embedding = model.get_input_embeddings()
    model.set_output_embeddings(DividedOutput(make(shard_output(output, shard)), shard, ranks))
    if type(embedding) is not nn.Embedding:
        return  # one that does more than look up stays whole
    rows = shard_vocabulary(embedding.num_embeddings, ranks)
    first = min(rows.first, rows.num_tokens - 1)  # a rank without tokens looks up one that is not its own
    own_PH = embedding.weight.detach()[first : first + max(1, rows.num_own)].clone()
    model.set_input_embeddings(DividedEmbedding(lambda places: own_PH[places], rows, ranks))


class DividedOutput(nn.Module):
    """An output layer whose logits are computed by all ranks, for all of them."""

    def __init__(self, own: nn.Module, shard: VocabularyShard, ranks: Ranks) -> None:
        super().__init__()
        self.own = own
        self._shard, self._ranks = shard, ranks

    @property
    def weight(self) -> Tensor:
        """Return the weight of `own`: some models ask for the dtype."""
        own: Any = self.own
        weight: Tensor = own.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., H] to [..., V]."""
        part_TP = self.own(x.reshape(-1, x.shape[-1]))
        whole_TV = self._ranks.gather(part_TP)
        return whole_TV[:, : self._shard.num_tokens].reshape(*x.shape[:-1], self._shard.num_tokens)


class DividedEmbedding(nn.Module):
    """An embedding of which each rank has the rows of its tokens. `look_up` takes places among these."""

    def __init__(self, look_up: Callable[[Tensor], Tensor], shard: VocabularyShard, ranks: Ranks) -> None:
        super().__init__()
        self._look_up, self._shard, self._ranks = look_up, shard, ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] to [..., H]."""
        places = token_ids - self._shard.first
        is_own = (places >= 0) & (places < self._shard.num_own)
        rows = self._look_up(places.masked_fill(~is_own, 0))
        sums = rows.float().masked_fill(~is_own.unsqueeze(-1), 0).contiguous()
        self._ranks.reduce(sums)  # one rank alone adds anything but zeros
        return sums.to(rows.dtype)
