"""The GPU's kernels that replace a model's layers: a Toolkit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from triton import TritonError

from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.devices.trial import first_line
from worker.gpu.attention import DEFAULT_BACKEND, PagedAttention, choose_attention
from worker.gpu.products import TAKEN, round_layer
from worker.gpu.quantized.proof import prove_products
from worker.gpu.triton_layer import TritonLayer
from worker.gpu.unfused import UnfusedModules
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts, Unrecognised
from worker.model.linear import Axis, Linear
from worker.model.mixture import ReplacedExperts
from worker.model.quantization import NO_ROUNDING, Rounding
from worker.ranks.ranks import ALONE, Ranks
from worker.worker_errors import StartupError


class GpuToolkit:
    """Toolkit of GPUs: Triton kernels, cuBLAS and libraries of attention."""

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
        return parts.with_linears(lambda linear: round_layer(self._rounding, linear))

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return TritonLayer(parts, call, self._ranks)

    def pack_shard(self, _shard: Linear, _axis: Axis, _dtype: torch.dtype) -> nn.Module:
        """Refuse, as `replace_layers` does before."""
        raise Unrecognised("layers that stay are divided on CPUs only")

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        prove_products(model, self._rounding, must_round_inputs=must_round_inputs)

    def replace_linears(self, _model: Any, _names: Sequence[str], /) -> None:
        """Replace nothing: layers that stay are computed in other ways (startup/kernel_choice.py)."""

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Replace mixtures of experts, the frame and codes elsewhere, and choose products by their time."""
        unfused = UnfusedModules(self._device, self._dtype, self._rounding, self._ranks)
        replaced = unfused.replace(model, max_model_len)
        unfused.choose_many_rows(model)
        if not self._max_adapters:  # products with updates fold nothing
            unfused.choose_folded(model)
        return replaced

    @contextmanager
    def refusing_kernels(self) -> Iterator[None]:
        """Raise a StartupError for a kernel that Triton cannot compile for this GPU."""
        try:
            yield
        except TritonError as error:
            raise StartupError(
                f"Triton refuses a kernel on this GPU: {first_line(error)}",
                fix=f"start with {self.option} off, and report it",
            ) from error
