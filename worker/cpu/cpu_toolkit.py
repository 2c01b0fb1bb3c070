"""The CPU's kernels as surgery uses them: a Toolkit.

Owns: the table of attention backends, and the output layer with the embedding tied to it, in packed form.
Never: decides which layers are replaced (surgery.py).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from worker.attention.kv_cache import KVCache
from worker.cpu.cpu_attention import CpuAttention, LayerAttention
from worker.cpu.cpu_experts import PackedExperts
from worker.cpu.cpu_layer import CpuLayer
from worker.cpu.cpu_products import TAKEN, pack_linear
from worker.cpu.native import Kernels, PackedWeight
from worker.devices.device import Device
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts
from worker.model.linear import linear_of
from worker.model.mixture import ReplacedExperts, replace_experts
from worker.model.quantization import Quantization

ATTENTION_BACKENDS: dict[str, Callable[[KVCache, Device, Kernels], LayerAttention]] = {
    "native": CpuAttention,
}
"""The first serves unless another is named."""
_DEFAULT_BACKEND = next(iter(ATTENTION_BACKENDS))


class PackedLinear(nn.Module):
    """The model's output layer. Its logits are float32: sums that were never rounded."""

    def __init__(self, weight: PackedWeight, kernels: Kernels) -> None:
        super().__init__()
        self._weight, self._kernels = weight, kernels

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
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
        """Look up [...] to [..., H]."""
        return self._weight.rows(token_ids)


class CpuToolkit:
    """See Toolkit. Quantization is of the layers that are fused; the output layer stays in its format."""

    device_kind, option = "CPU", "--cpu-kernels"
    runs_ahead = False
    weights = TAKEN

    def __init__(
        self,
        kernels: Kernels,
        device: Device,
        quantization: Quantization | None = None,
        attention_backend: str = _DEFAULT_BACKEND,
    ) -> None:
        self._kernels, self._device, self._quantization = kernels, device, quantization
        self._open_attention = ATTENTION_BACKENDS[attention_backend]
        self.name = kernels.instruction_set
        self.fused = "fused" if quantization is None else f"fused, their weights {quantization.word}"

    def attention_over(self, cache: KVCache) -> LayerAttention:
        return self._open_attention(cache, self._device, self._kernels)

    def fuse_exactly(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return CpuLayer(parts, call)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        if self._quantization is not None:
            parts = parts.with_linears(self._quantization.quantize)
        return CpuLayer(parts, call)

    def replace_others(self, model: Any) -> ReplacedExperts:
        """Pack mixtures of experts and the output layer."""
        self._pack_output(model)
        return replace_experts(model, lambda experts: PackedExperts(experts, self._kernels))

    def refusing_kernels(self) -> AbstractContextManager[None]:
        """Refuse nothing: the kernels were compiled before the toolkit was made."""
        return nullcontext()

    def _pack_output(self, model: Any) -> None:
        """Pack the output layer. An embedding that is tied to it then reads the same memory."""
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # None: an embedder
        linear = linear_of(output)
        if linear is None or not TAKEN.include(linear):
            return
        is_tied = embedding.weight is getattr(output, "weight", None)
        if is_tied and type(embedding) is not nn.Embedding:
            return  # one that does more than look up; a second copy would be the larger loss
        weight = pack_linear(linear)
        model.set_output_embeddings(PackedLinear(weight, self._kernels))
        if is_tied:
            model.set_input_embeddings(PackedEmbedding(weight))
