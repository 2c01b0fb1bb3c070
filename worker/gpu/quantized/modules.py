"""Modules of a model that have codes outside of fused layers, as a GPU computes them.

Owns: linear layers by their product, and embeddings that look rows of codes up without asking the host.
Never: touches layers that are fused (worker/gpu), or mixtures of experts (experts.py).
"""

from typing import Any

import torch
from torch import Tensor, nn

from worker.gpu.quantized.products import CodeProduct, find_hindrance, without_codes
from worker.model.linear import Linear, linear_of
from worker.model.quantization import Quantization
from worker.model.quantized_layers import QuantizedEmbedding, QuantizedLinear


class CodeLinear(nn.Module):
    """A linear layer of codes."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.product, self._sizes = CodeProduct(linear), without_codes(linear)

    def as_linear(self) -> Linear:
        """Return the layer's sizes, for adapters; its codes are the product's."""
        return self._sizes

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        return self.product.multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class CodeEmbedding(nn.Module):
    """An embedding of codes; each token's row becomes numbers by itself."""

    def __init__(self, replaced: QuantizedEmbedding) -> None:
        super().__init__()
        self._codes, self._dtype = replaced.weight_codes, replaced.dtype
        # Rounded as the model's own module rounds it.
        scale = replaced.scale
        self._scale = None if scale is None else float(torch.tensor(scale, dtype=self._dtype))
        self.num_embeddings = replaced.num_embeddings

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] to [..., H]."""
        rows = self._codes.outputs(token_ids.reshape(-1)).dequantized(self._dtype)
        if self._scale is not None:
            rows = rows * self._scale
        return rows.view(*token_ids.shape, -1)


def replace_code_modules(model: Any, head: Quantization | None) -> None:
    """Replace linear layers and embeddings of codes, and the output layer once it is rounded."""
    output = linear_of(model.get_output_embeddings()) if head is not None else None
    if head is not None and output is not None:
        # The embedding looks up numbers as they were, so that a tied one is kept beside the codes.
        rounded = head.quantize(output)
        if find_hindrance(rounded.weight) is None:
            model.set_output_embeddings(CodeLinear(rounded))
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear) and find_hindrance(module.weight_codes) is None:
            model.set_submodule(name, CodeLinear(module.as_linear()))
        elif isinstance(module, QuantizedEmbedding):
            model.set_submodule(name, CodeEmbedding(module))
