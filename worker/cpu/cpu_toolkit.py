"""The CPU's kernels as the surgery uses them: a Toolkit.

Owns: the output layer and the embedding tied to it, in packed form.
Never: decides what is replaced (surgery.py).
"""

from typing import Any

from torch import Tensor, nn

from worker.attention.kv_cache import KVCache
from worker.cpu.cpu_attention import CpuAttention
from worker.cpu.cpu_experts import PackedExperts
from worker.cpu.cpu_layer import FusedLayer
from worker.cpu.native import TAKEN, Kernels, Numbers, PackedWeight, pack
from worker.devices.device import Device
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts
from worker.model.mixture import ReplacedExperts, replace_experts


class PackedLinear(nn.Module):
    """The model's output layer. Its logits are float32: sums that were never rounded."""

    def __init__(self, weight: PackedWeight, kernels: Kernels) -> None:
        super().__init__()
        self._weight, self._kernels = weight, kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.multiply_to_float(flat, self._weight).view(
            *x.shape[:-1], self._weight.num_outputs
        )


class PackedEmbedding(nn.Module):
    """An embedding that shares its weight with the output layer."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] to [..., H]."""
        return self._weight.rows(token_ids)


class CpuToolkit:
    """See Toolkit. `numbers` holds for the layers that are fused; the output layer keeps its own."""

    weights = TAKEN

    def __init__(self, kernels: Kernels, device: Device, numbers: Numbers = Numbers.AS_THEY_ARE) -> None:
        self._kernels, self._device, self._numbers = kernels, device, numbers
        self.name = kernels.instruction_set
        self.fused = "fused" if numbers is Numbers.AS_THEY_ARE else f"fused, their weights {numbers.value}"

    def attention_over(self, cache: KVCache) -> CpuAttention:
        return CpuAttention(cache, self._device, self._kernels)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return FusedLayer(parts, call)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return FusedLayer(parts, call, numbers=self._numbers)

    def replace_others(self, model: Any) -> ReplacedExperts:
        """Pack mixtures of experts and the output layer."""
        self._pack_output(model)
        return replace_experts(model, lambda experts: PackedExperts(experts, self._kernels))

    def _pack_output(self, model: Any) -> None:
        """An embedding that is tied to the output layer then reads the same memory."""
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # None: an embedder
        if type(output) is not nn.Linear or not TAKEN.include(output.weight):
            return
        is_tied = embedding.weight is output.weight
        if is_tied and type(embedding) is not nn.Embedding:
            return  # one that does more than look up; a second copy would be the larger loss
        weight = pack(output.weight, output.bias)
        model.set_output_embeddings(PackedLinear(weight, self._kernels))
        if is_tied:
            model.set_input_embeddings(PackedEmbedding(weight))
