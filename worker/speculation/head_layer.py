"""A head that drafts tokens: its inputs, and its layer as a model without an output layer.

Never: reads its weights (load/draft_head.py), or runs it (steps/head_steps.py).

Shapes: T tokens, H numbers of a hidden state.
"""

from typing import Any

import torch
from torch import Tensor, nn


class DraftHead(nn.Module):
    """Inputs of a head, and its layer as a model without an output layer."""

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
