"""The GPU's kernels as the surgery uses them: a Toolkit.

Owns: what they can take.
Never: decides what is replaced (surgery.py).
"""

from typing import Any

import torch
from torch import nn

from worker.attention.kv_cache import KVCache
from worker.devices.device import Device
from worker.gpu.triton_attention import TritonAttention
from worker.gpu.triton_experts import TritonExperts
from worker.gpu.triton_layer import FusedLayer
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts, TakenWeights
from worker.model.mixture import ReplacedExperts, replace_experts


class GpuToolkit:
    """See Toolkit."""

    name = "Triton"
    fused = "fused"
    weights = TakenWeights(dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}), size_multiple=1)

    def __init__(self, device: Device) -> None:
        self._device = device

    def attention_over(self, cache: KVCache) -> TritonAttention:
        return TritonAttention(cache, self._device)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return FusedLayer(parts, call)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return FusedLayer(parts, call)

    def replace_others(self, model: Any) -> ReplacedExperts:
        """Replace mixtures of experts. The output layer is one product of cuBLAS as it is."""
        return replace_experts(model, TritonExperts)
