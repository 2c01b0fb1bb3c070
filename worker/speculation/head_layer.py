"""A head that drafts tokens: its inputs, and its layer as a model without an output layer.

Shapes: T tokens, H numbers of a hidden state.
"""

from typing import Any

import torch
from torch import Tensor, nn

from worker.model.mixture import find_experts
from worker.model.quantized_layers import find_codes


class DraftHead(nn.Module):
    """Inputs of a head, and its layer as a model without an output layer."""

    linears: tuple[str, ...] = ("joint",)
    """Linear layers outside of layers that kernels fuse."""
    tapped: tuple[int, ...] = ()
    """Layers of the model before which hidden states are read; none: those behind its last norm are."""
    has_embedding = False
    """Whether the embedding is its own, and not the model's."""

    def __init__(self, body: Any, token_norm: nn.Module, hidden_norm: nn.Module, joint: nn.Module) -> None:
        super().__init__()
        self.body, self.token_norm, self.hidden_norm, self.joint = body, token_norm, hidden_norm, joint
        self.dtype: torch.dtype = body.dtype

    def inputs(self, embeds_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """Join embeddings of tokens with the hidden states before them, [1, T, H]."""
        joined_TH: Tensor = self.joint(
            torch.cat([self.token_norm(embeds_TH), self.hidden_norm(hidden_TH)], -1)
        )
        return joined_TH.unsqueeze(0)

    def kept(self, states_TH: Tensor) -> Tensor:
        """Turn the model's hidden states into those that are kept for `inputs`."""
        return states_TH

    @property
    def own_parameters(self) -> list[Tensor]:
        """List its plain weights but for an embedding that is the model's."""
        found = self.named_parameters()
        return [each for name, each in found if self.has_embedding or "embed_tokens" not in name]

    @property
    def has_experts(self) -> bool:
        return any(find_experts(self))

    @property
    def num_bytes(self) -> int:
        """Size its weights, plain ones and codes."""
        codes = sum(each.num_bytes for each in find_codes(self).values())
        return codes + sum(each.nbytes for each in self.own_parameters)

    def logits(self, hidden_NH: Tensor) -> Tensor | None:  # noqa: ARG002
        """Compute logits [N, V]; None where the model's output layer makes them."""
        return None
