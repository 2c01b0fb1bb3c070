"""The CPU's kernels that replace a model's layers: a Toolkit."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from worker.attention.kv_cache import KVCache
from worker.cpu.attention import CpuAttention, LayerAttention
from worker.cpu.body import join_body
from worker.cpu.layer import CpuLayer
from worker.cpu.native import Kernels
from worker.cpu.products import TAKEN, inputs_of, pack_linear
from worker.cpu.proof import prove_products
from worker.cpu.unfused import PackedLinear, PackedOutput, SummedLinear, UnfusedPacking
from worker.devices.device import Device
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts, Unrecognised
from worker.model.linear import Axis, Linear, linear_of
from worker.model.mixture import ReplacedExperts
from worker.model.quantization import NO_ROUNDING, Rounding
from worker.ranks.ranks import ALONE, Ranks

log = logging.getLogger(__name__)

ATTENTION_BACKENDS: dict[str, Callable[[KVCache, Device, Kernels], LayerAttention]] = {
    "native": CpuAttention,
}
"""The first serves unless another is named."""
_DEFAULT_BACKEND = next(iter(ATTENTION_BACKENDS))


class CpuToolkit:
    """Toolkit of CPUs. Quantization is of fused layers, and of the output layer by itself."""

    device_kind, option = "CPU", "--cpu-kernels"
    runs_ahead = False
    weights = TAKEN

    def __init__(
        self,
        kernels: Kernels,
        device: Device,
        rounding: Rounding = NO_ROUNDING,
        attention_backend: str = _DEFAULT_BACKEND,
    ) -> None:
        self._kernels, self._device = kernels, device
        self._rounding, self._inputs = rounding, inputs_of(rounding)
        self._open_attention = ATTENTION_BACKENDS[attention_backend]
        self._ranks: Ranks = ALONE
        self.name = kernels.instruction_set
        self.fused = "fused" if rounding.layers is None else f"fused, their weights {rounding.layers.word}"

    def divide_among(self, ranks: Ranks) -> None:
        ranks.join(self._kernels.library)
        self._kernels.divide(ranks.reducer)
        self._ranks = ranks

    def attention_over(self, cache: KVCache) -> LayerAttention:
        return self._open_attention(cache, self._device, self._kernels)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return CpuLayer(parts, call)

    def round_weights(self, parts: LayerParts) -> LayerParts:
        """See Toolkit. The steps of a recurrence are few, and what they err by adds up over all tokens."""
        layers = self._rounding.layers
        if layers is None:
            return parts
        rounded = parts.with_linears(layers.quantize)
        return replace(rounded, mixer=replace(rounded.mixer, recurrence=parts.mixer.recurrence))

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return CpuLayer(parts, call, self._inputs)

    def pack_shard(self, shard: Linear, axis: Axis, dtype: torch.dtype) -> nn.Module:
        if not TAKEN.include(shard):
            raise Unrecognised(f"a rank's part of its weights would be {TAKEN.explain(shard)}")
        packed = pack_linear(shard, self._inputs)
        if axis is Axis.OUTPUTS:
            return PackedLinear(packed, self._kernels, dtype)
        return SummedLinear(PackedOutput(packed, self._kernels, dtype), self._ranks)

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        prove_products(model, self._kernels, self._rounding, must_round_inputs=must_round_inputs)

    def replace_linears(self, model: Any, names: Sequence[str], /) -> None:
        """Pack them, since torch's products of a few rows are several times slower."""
        for name in dict.fromkeys(names):
            linear = linear_of(model.get_submodule(name))
            if linear is not None and TAKEN.include(linear):
                packed = pack_linear(linear, self._inputs)
                model.set_submodule(name, PackedLinear(packed, self._kernels, model.dtype))

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Pack experts, the output layer, and codes of layers that were not fused; join the layers."""
        unfused = UnfusedPacking(self._kernels, self._inputs, self._rounding.head, self._ranks)
        done = unfused.pack(model, self._device.torch_device)
        self._join_layers(model, max_model_len)
        return done

    def _join_layers(self, model: Any, max_model_len: int) -> None:
        """Let one call compute all layers and the last norm, where no other module stands between them."""
        try:
            join_body(model, TAKEN, self.attention_over, self._device, max_model_len)
        except Unrecognised as unusual:
            log.info("layers are called one by one: %s", unusual)

    def refusing_kernels(self) -> AbstractContextManager[None]:
        """Refuse nothing: the kernels were compiled before the toolkit was made."""
        return nullcontext()
