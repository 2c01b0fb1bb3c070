"""Modules outside of fused layers in the form in which the CPU's kernels compute them.

Owns: the output layer with the embedding tied to it, experts, and linear layers of codes, in packed form.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.adapters.adapted_linear import AdaptablePart, StepAdapters, adapt_linear
from worker.attention.latents import LatentExpansion
from worker.cpu.experts import PackedExperts
from worker.cpu.native import DTYPES, Kernels, PackedWeight
from worker.cpu.packing.grouped_packing import Inputs, grouped_rows
from worker.cpu.products import TAKEN, pack_linear
from worker.machine import trim_heaps
from worker.model.linear import CUT, Linear, linear_of
from worker.model.mixture import ReplacedExperts, replace_experts
from worker.model.quantization import Quantization
from worker.model.quantized_layers import QuantizedEmbedding, QuantizedLinear
from worker.model.vocabulary_shards import divide_ends
from worker.ranks.ranks import Ranks


class PackedLinear(nn.Module):
    """A linear layer outside of fused ones."""

    def __init__(self, weight: PackedWeight, kernels: Kernels, dtype: torch.dtype) -> None:
        """Take in the dtype that the model computes in, for weights of codes."""
        super().__init__()
        self._weight, self._kernels = weight, kernels
        self._dtype = weight.data.dtype if weight.data.dtype in DTYPES else dtype

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        if x.dim() == 2 and x.is_contiguous():
            return self._multiply(x)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        return self._multiply(flat).view(*x.shape[:-1], self._weight.num_outputs)

    @property
    def weight(self) -> Tensor:
        """Return a tensor without content: some models ask for the dtype."""
        shape = self._weight.num_outputs, int(self._weight.c.num_inputs)
        return torch.empty(shape, dtype=self._dtype, device="meta")

    def _multiply(self, x_TK: Tensor) -> Tensor:
        return self._kernels.multiply(x_TK, self._weight)


class PackedOutput(PackedLinear):
    """The model's output layer. Its logits are float32: sums that were never rounded."""

    def _multiply(self, x_TK: Tensor) -> Tensor:
        return self._kernels.multiply_to_float(x_TK, self._weight)


class SummedLinear(nn.Module):
    """A product of which each rank has some inputs. Its sums, float32, become those of all ranks."""

    def __init__(self, own: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.own, self._ranks = own, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        sums = self.own(x).contiguous()
        self._ranks.reduce(sums)
        summed: Tensor = sums.to(x.dtype)
        return summed

    def adapt(self, name: str, step: StepAdapters, num_slots: int) -> list[AdaptablePart]:
        """Add updates of the rank's own inputs, before the sum."""
        setattr(self.own, CUT, getattr(self, CUT))
        self.own = adapted = adapt_linear(name, self.own, step, num_slots)
        return [adapted]


class PackedEmbedding(nn.Module):
    """An embedding that shares its weight with the output layer."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up [...] to [..., H]."""
        return self._weight.rows(token_ids)


class UnfusedPacking(NamedTuple):
    """The packing of the modules outside of fused layers."""

    kernels: Kernels
    inputs: Inputs
    head: Quantization | None
    """Rounding of the output layer."""
    ranks: Ranks

    def pack(self, model: Any, device: torch.device) -> ReplacedExperts:
        """Pack the output layer, experts, and the codes of layers that were not fused."""
        trim_heaps()  # of the layers: while it is packed, the output layer takes the most memory
        self._pack_output(model)
        done = replace_experts(
            model, lambda experts: PackedExperts(experts, self.kernels, self.inputs, self.ranks), device
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, LatentExpansion):
                module.arrange()
            if isinstance(module, QuantizedLinear) and TAKEN.include(linear := module.as_linear()):
                packed = PackedLinear(pack_linear(linear, self.inputs), self.kernels, module.dtype)
                packed._forward_hooks = module._forward_hooks  # those that correct queries
                model.set_submodule(name, packed)
        return done

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
        if self.ranks.size > 1:
            self._divide_output(model, linear)
            return
        if is_tied and type(embedding) is not nn.Embedding:
            return  # one that does more than look up; a second copy would be the larger loss
        if self.head is not None:
            # The embedding looks up numbers as they were: a tied one is kept in addition to the codes.
            linear, is_tied = self.head.quantize(linear), False
        weight = pack_linear(linear, self.inputs)
        model.set_output_embeddings(PackedOutput(weight, self.kernels, model.dtype))
        if is_tied:
            model.set_input_embeddings(PackedEmbedding(weight))

    def _pack_quantized(self, model: Any, linear: Linear, embedding: QuantizedEmbedding) -> None:
        """Pack the output layer, and let an embedding of the same codes look up in the packed weight."""
        is_tied = linear.weight is embedding.weight_codes
        if self.head is not None:
            linear = self.head.quantize(linear)  # codes stay as they are
        weight = pack_linear(linear, self.inputs)
        model.set_output_embeddings(PackedOutput(weight, self.kernels, model.dtype))
        if is_tied:
            embedding.look_up_in(lambda indices_U: grouped_rows(weight, indices_U))

    def _divide_output(self, model: Any, linear: Linear) -> None:
        """Pack a rank's part of the output layer, and divide an embedding that only looks up."""
        if self.head is not None:
            linear = self.head.quantize(linear)

        def pack(own: Linear) -> nn.Module:
            return PackedOutput(pack_linear(own, self.inputs), self.kernels, model.dtype)

        divide_ends(model, linear, pack, self.ranks)
