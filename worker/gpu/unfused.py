"""Modules outside of fused layers as a GPU computes them, and the choices that need all layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.devices.device import Device
from worker.devices.weight_life import lent_to
from worker.gpu.products import TAKEN, product_of, round_weight
from worker.gpu.quantized.products import CodeProduct, find_hindrance, without_codes
from worker.gpu.trials.many_rows import choose_by_rows
from worker.gpu.trials.skinny import FoldedProduct, choose_products
from worker.gpu.trials.triton_frame import replace_frame
from worker.gpu.triton_experts import experts_of_rank
from worker.gpu.triton_layer import TritonLayer
from worker.model.linear import Linear, linear_of
from worker.model.mixture import ReplacedExperts, replace_experts
from worker.model.quantization import Quantization, Rounding
from worker.model.quantized_layers import QuantizedEmbedding, QuantizedLinear
from worker.model.vocabulary_shards import divide_ends
from worker.ranks.ranks import Ranks, is_divided


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
    """An embedding of codes; each token's row is decoded alone."""

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


class RankOutput(nn.Module):
    """A rank's part of the output layer."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._product = product_of(linear)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self._product.multiply(x_TK)


class UnfusedModules(NamedTuple):
    """The replacement of the modules outside of fused layers."""

    device: Device
    dtype: torch.dtype
    rounding: Rounding
    ranks: Ranks

    def replace(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Replace mixtures of experts, the frame, and codes outside of layers.

        An output layer of plain numbers is one product of cuBLAS as it is.
        """
        device = self.device.torch_device
        replaced = replace_experts(model, lambda experts: experts_of_rank(experts, self.ranks), device)
        if self.ranks.size > 1:
            self._divide_ends(model)
        if is_divided(self.ranks):
            model.to(device)  # the rest, which each rank has whole
        _replace_code_modules(model, self.rounding.head)
        replace_frame(model, TAKEN, max_model_len)
        return replaced

    def choose_many_rows(self, model: nn.Module) -> None:
        """Choose the products of many rows by their time."""
        products: list[object] = [each.product for each in _folded(model)]
        if self.ranks.size == 1:  # ranks that chose differently might send a token to other experts
            products += [module.product for module in model.modules() if isinstance(module, CodeLinear)]
        choose_by_rows(products, self.device, self.dtype)

    def choose_folded(self, model: nn.Module) -> None:
        """Choose the products of few rows by their time."""
        choose_products(_folded(model), self.device)

    def _divide_ends(self, model: Any) -> None:
        """Divide the output layer, and an embedding that only looks up."""
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        linear = linear_of(output)
        if linear is None or not TAKEN.include(linear) or isinstance(embedding, QuantizedEmbedding):
            return
        device = self.device.torch_device
        with lent_to(device, output), lent_to(device, embedding):
            linear = linear_of(output)
            assert linear is not None
            divide_ends(model, round_weight(self.rounding.head, linear), RankOutput, self.ranks)


def _replace_code_modules(model: Any, head: Quantization | None) -> None:
    """Replace linear layers and embeddings of codes, and the output layer once it is rounded."""
    output = linear_of(model.get_output_embeddings()) if head is not None else None
    if head is not None and output is not None:
        # The embedding looks up numbers as they were: a tied one is kept in addition to the codes.
        rounded = head.quantize(output)
        if find_hindrance(rounded.weight) is None:
            model.set_output_embeddings(CodeLinear(rounded))
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear) and find_hindrance(module.weight_codes) is None:
            product = CodeLinear(module.as_linear())
            product._forward_hooks = module._forward_hooks  # those that correct queries
            model.set_submodule(name, product)
        elif isinstance(module, QuantizedEmbedding):
            model.set_submodule(name, CodeEmbedding(module))


def _folded(model: nn.Module) -> list[FoldedProduct]:
    layers = [module for module in model.modules() if isinstance(module, TritonLayer)]
    return [product for layer in layers for product in layer.products]
