"""The GPU's kernels as surgery uses them: a Toolkit.

Owns: the formats that they take, and the error for a kernel that Triton cannot compile.
Never: decides which layers are replaced (surgery.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from triton import TritonError

from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.devices.weight_life import lent_to
from worker.gpu.attention import DEFAULT_BACKEND, PagedAttention, choose_attention
from worker.gpu.kernels.expert_products import route
from worker.gpu.products import TAKEN, product_of
from worker.gpu.quantized.experts import CodeExperts
from worker.gpu.quantized.float8_products import with_float8_rows
from worker.gpu.quantized.modules import CodeLinear, replace_code_modules
from worker.gpu.quantized.proof import prove_products
from worker.gpu.trials.many_rows import choose_many_rows
from worker.gpu.trials.skinny import choose_products
from worker.gpu.trials.triton_frame import replace_frame
from worker.gpu.triton_experts import TritonExperts
from worker.gpu.triton_layer import TritonLayer
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts
from worker.model.linear import Linear, linear_of
from worker.model.mixture import (
    ExpertLinears,
    Experts,
    ExpertShards,
    ReplacedExperts,
    SummedExperts,
    replace_experts,
    shard_experts,
)
from worker.model.quantization import NO_ROUNDING, Quantization, Rounding
from worker.model.quantized_layers import QuantizedEmbedding
from worker.model.vocabulary_shards import divide_ends
from worker.ranks.ranks import ALONE, Ranks, is_divided
from worker.worker_errors import StartupError


class GpuToolkit:
    """See Toolkit."""

    name, device_kind, option = "Triton", "GPU", "--gpu-kernels"
    runs_ahead = True
    weights = TAKEN

    def __init__(
        self,
        device: Device,
        attention_backend: str = DEFAULT_BACKEND,
        *,
        dtype: torch.dtype = torch.float32,
        rounding: Rounding = NO_ROUNDING,
        max_adapters: int = 0,
    ) -> None:
        """Take the dtype of the rows that the model computes with."""
        self._dtype = dtype
        self._device, self._rounding, self._max_adapters = device, rounding, max_adapters
        self.fused = "fused" if rounding.layers is None else f"fused, their weights {rounding.layers.word}"
        self._open_attention = choose_attention(attention_backend)
        self._ranks: Ranks = ALONE

    def divide_among(self, ranks: Ranks) -> None:
        ranks.join(None)
        self._ranks = ranks

    def attention_over(self, cache: KVCache) -> PagedAttention:
        return self._open_attention(cache, self._device)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return TritonLayer(parts, call)

    def round_weights(self, parts: LayerParts) -> LayerParts:
        return parts.with_linears(self._as_asked)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return TritonLayer(parts, call, self._ranks)

    def _as_asked(self, linear: Linear) -> Linear:
        linear = _rounded_by(self._rounding.layers, linear)
        return linear if self._rounding.of_inputs is None else with_float8_rows(linear)

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        """See Toolkit."""
        prove_products(model, self._rounding, must_round_inputs=must_round_inputs)

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Replace mixtures of experts, the frame and codes elsewhere, and choose products by their time.

        An output layer of plain numbers is one product of cuBLAS as it is.
        """
        replaced = replace_experts(model, self._own_experts, self._device.torch_device)
        if self._ranks.size > 1:
            self._divide_ends(model)
        if is_divided(self._ranks):
            model.to(self._device.torch_device)  # the rest, which each rank has whole
        replace_code_modules(model, self._rounding.head)
        replace_frame(model, TAKEN, max_model_len)
        layers = [module for module in model.modules() if isinstance(module, TritonLayer)]
        products = [product for layer in layers for product in layer.products]
        of_codes = [product.by_codes for product in products]
        if self._ranks.size == 1:  # else ranks that chose differently might send a token to other experts
            of_codes += [module.product for module in model.modules() if isinstance(module, CodeLinear)]
        choose_many_rows((each for each in of_codes if each is not None), self._device, self._dtype)
        if not self._max_adapters:  # products with updates fold nothing
            choose_products(products, self._device)
        return replaced

    def _own_experts(self, experts: ExpertLinears) -> nn.Module:
        """Make a mixture of plain numbers or of codes, or a shard of each expert. Raises Unrecognised."""
        if self._ranks.size == 1:
            return TritonExperts(experts) if isinstance(experts, Experts) else CodeExperts(experts, route)
        if isinstance(experts, Experts):
            return SummedExperts(TritonExperts(shard_experts(experts, self._ranks)), self._ranks)
        shards = ExpertShards(experts, self._ranks, size_multiple=TAKEN.size_multiple)
        return SummedExperts(CodeExperts(shards, route), self._ranks)

    def _divide_ends(self, model: Any) -> None:
        """Divide the output layer, and an embedding that only looks up."""
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        linear = linear_of(output)
        if linear is None or not TAKEN.include(linear) or isinstance(embedding, QuantizedEmbedding):
            return
        device = self._device.torch_device
        with lent_to(device, output), lent_to(device, embedding):
            linear = linear_of(output)
            assert linear is not None
            divide_ends(model, _rounded_by(self._rounding.head, linear), _OwnOutput, self._ranks)

    @contextmanager
    def refusing_kernels(self) -> Iterator[None]:
        """Raise a StartupError for a kernel that Triton cannot compile for this GPU."""
        try:
            yield
        except TritonError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise StartupError(
                f"Triton refuses a kernel on this GPU: {reason}",
                fix=f"start with {self.option} off, and report it",
            ) from error


def _rounded_by(quantization: Quantization | None, linear: Linear) -> Linear:
    """Round weights, unless there is no product by the result."""
    rounded = linear if quantization is None else quantization.quantize(linear)
    return rounded if TAKEN.include(rounded) else linear


class _OwnOutput(nn.Module):
    """A rank's part of the output layer."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._product = product_of(linear)

    def forward(self, x_TK: Tensor) -> Tensor:
        return self._product.multiply(x_TK)
