"""The CPU's kernels as surgery uses them: a Toolkit.

Owns: the table of attention backends, and the output layer with the embedding tied to it, in packed form.
Never: decides which layers are replaced (surgery.py).
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn, randn

from worker.attention.kv_cache import KVCache
from worker.cpu.attention import CpuAttention, LayerAttention
from worker.cpu.body import join_body
from worker.cpu.experts import PackedExperts
from worker.cpu.layer import CpuLayer
from worker.cpu.native import WIDEST_VECTOR, Kernels, PackedWeight
from worker.cpu.packing.grouped_packing import Inputs, grouped_rows
from worker.cpu.products import TAKEN, pack_linear
from worker.cpu.proof import prove_product, prove_products
from worker.devices.device import Device
from worker.machine import trim_heaps
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import LayerParts, Unrecognised
from worker.model.linear import Linear, PlainWeight, linear_of
from worker.model.mixture import ReplacedExperts, replace_experts
from worker.model.quantization import NO_ROUNDING, Rounding
from worker.model.quantized_layers import QuantizedEmbedding, QuantizedLinear
from worker.model.vocabulary_shards import divide_ends
from worker.quantized.grouped_weight import GroupedWeight
from worker.ranks.ranks import ALONE, Ranks
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

ATTENTION_BACKENDS: dict[str, Callable[[KVCache, Device, Kernels], LayerAttention]] = {
    "native": CpuAttention,
}
"""The first serves unless another is named."""
_EXAMPLE_INPUTS = 256
_DEFAULT_BACKEND = next(iter(ATTENTION_BACKENDS))


class PackedLinear(nn.Module):
    """A linear layer outside of fused ones."""

    def __init__(self, weight: PackedWeight, kernels: Kernels) -> None:
        super().__init__()
        self._weight, self._kernels = weight, kernels

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        if x.dim() == 2 and x.is_contiguous():
            return self._multiply(x)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._multiply(flat).view(*x.shape[:-1], self._weight.num_outputs)

    def _multiply(self, x_TK: Tensor) -> Tensor:
        return self._kernels.multiply(x_TK, self._weight)


class PackedOutput(PackedLinear):
    """The model's output layer. Its logits are float32: sums that were never rounded."""

    def _multiply(self, x_TK: Tensor) -> Tensor:
        return self._kernels.multiply_to_float(x_TK, self._weight)


class PackedEmbedding(nn.Module):
    """An embedding that shares its weight with the output layer."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] to [..., H]."""
        return self._weight.rows(token_ids)


class CpuToolkit:
    """See Toolkit. Quantization is of the layers that are fused, and of the output layer by itself."""

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
        self._quantization, self._head_quantization = rounding.layers, rounding.head
        self._inputs = Inputs.INT8 if rounding.of_inputs else Inputs.AS_THEY_ARE
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
        return parts if self._quantization is None else parts.with_linears(self._quantization.quantize)

    def fuse(self, parts: LayerParts, call: LayerCall) -> nn.Module:
        return CpuLayer(parts, call, self._inputs)

    def prove(self, model: Any, *, must_round_inputs: bool) -> None:
        """See Toolkit."""
        is_rounded_so = False
        if self._quantization is not None:
            plain = Linear.of(PlainWeight(randn(WIDEST_VECTOR, _EXAMPLE_INPUTS)))
            example = self._quantization.quantize(plain).weight
            is_rounded_so = isinstance(example, GroupedWeight)
            if isinstance(example, GroupedWeight):
                name = f"--quantization {self._quantization.word}"
                prove_product(name, example, self._kernels, self._inputs)
        has_codes = prove_products(model, self._kernels, self._inputs)
        has_effect = has_codes or is_rounded_so
        if must_round_inputs and self._inputs is Inputs.INT8 and not has_effect:
            raise StartupError(
                "--activations int8 has no effect on weights that are not codes in groups",
                fix="leave it out, or add --quantization int4",
            )

    def replace_others(self, model: Any, max_model_len: int) -> ReplacedExperts:
        """Pack experts, the output layer, and codes of layers that were not fused; join the layers."""
        trim_heaps()  # of the layers: the output layer takes most beside it while it is packed
        self._pack_output(model)
        done = replace_experts(
            model,
            lambda experts: PackedExperts(experts, self._kernels, self._inputs, self._ranks),
            self._device.torch_device,
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantizedLinear) and TAKEN.include(linear := module.as_linear()):
                weight = pack_linear(linear, self._inputs)
                model.set_submodule(name, PackedLinear(weight, self._kernels))
        self._join_layers(model, max_model_len)
        return done

    def refusing_kernels(self) -> AbstractContextManager[None]:
        """Refuse nothing: the kernels were compiled before the toolkit was made."""
        return nullcontext()

    def _join_layers(self, model: Any, max_model_len: int) -> None:
        """Let one call compute all layers and the last norm, where nothing else stands between them."""
        try:
            join_body(model, TAKEN, self.attention_over, self._device, max_model_len)
        except Unrecognised as unusual:
            log.info("layers are called one by one: %s", unusual)

    def _pack_output(self, model: Any) -> None:
        """Pack the output layer. An embedding that is tied to it then reads the same memory."""
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # None: an embedder
        linear = linear_of(output)
        if linear is None or not TAKEN.include(linear):
            return
        if isinstance(embedding, QuantizedEmbedding):
            self._pack_quantized(model, linear, embedding)
            return
        is_tied = embedding.weight is not None and embedding.weight is getattr(output, "weight", None)
        if self._ranks.size > 1:
            self._divide_output(model, linear)
            return
        if is_tied and type(embedding) is not nn.Embedding:
            return  # one that does more than look up; a second copy would be the larger loss
        if self._head_quantization is not None:
            # The embedding looks up numbers as they were, so that a tied one is kept beside the codes.
            linear, is_tied = self._head_quantization.quantize(linear), False
        weight = pack_linear(linear, self._inputs)
        model.set_output_embeddings(PackedOutput(weight, self._kernels))
        if is_tied:
            model.set_input_embeddings(PackedEmbedding(weight))

    def _pack_quantized(self, model: Any, linear: Linear, embedding: QuantizedEmbedding) -> None:
        """Pack the output layer, and let an embedding of the same codes look up in what was packed."""
        is_tied = linear.weight is embedding.weight_codes
        if self._head_quantization is not None:
            linear = self._head_quantization.quantize(linear)  # codes stay as they are
        weight = pack_linear(linear, self._inputs)
        model.set_output_embeddings(PackedOutput(weight, self._kernels))
        if is_tied:
            embedding.look_up_in(lambda indices_U: grouped_rows(weight, indices_U))

    def _divide_output(self, model: Any, linear: Linear) -> None:
        """Pack a rank's part of the output layer, and divide an embedding that only looks up."""
        if self._head_quantization is not None:
            linear = self._head_quantization.quantize(linear)

        def pack(own: Linear) -> nn.Module:
            return PackedOutput(pack_linear(own, self._inputs), self._kernels)

        divide_ends(model, linear, pack, self._ranks)
