"""A decoder layer as one call of the kernels, in the place of transformers' own.

Owns: a layer's packed weights and the struct that points to them. An MLP of another make stays in it.
Never: decides whether the kernels compute what the layer did (surgery.py).

Shapes: T tokens, H numbers of a hidden state.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from worker.attention.interface import active_executor
from worker.cpu.cpu_attention import CpuAttention, HandedAngles, attention_options
from worker.cpu.native import (
    CHeadShape,
    CLayer,
    CNorm,
    CPackedWeight,
    CRotation,
    Numbers,
    PackedWeight,
    pack,
    pack_gate_up,
    pointer,
)
from worker.model.layer_call import HeadShape, LayerCall, Rotation, head_shape, in_halves, norms_all_heads
from worker.model.layer_parts import GatedMlp, LayerNorm, LayerParts, RmsNorm


class FusedLayer(nn.Module):
    """Runs only while a CpuAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall, *, numbers: Numbers = Numbers.AS_THEY_ARE) -> None:
        super().__init__()
        heads = head_shape(parts, call)
        parts = in_halves(parts, call)
        self._layer_idx = call.layer_idx
        self._turning = call.turning
        self._kept: list[Any] = []  # what the struct points to
        sinks = None if call.options.sinks is None else call.options.sinks.float().contiguous()
        self._kept.append(sinks)
        self._after_mlp_norm = parts.after_mlp_norm
        self._residual_multiplier = parts.residual_multiplier
        gate_up, down = self._take_mlp(parts.mlp, numbers)
        query_norm, all_queries_norm = self._head_norms(parts.query_norm, heads)
        key_norm, all_keys_norm = self._head_norms(parts.key_norm, heads)
        self._c = CLayer(
            hidden_size=len(parts.attention_output.weight_NK),
            attention_norm=self._norm(parts.attention_norm),
            query_key_value=self._packed(pack(*parts.query_key_value, numbers=numbers)),
            heads=CHeadShape(*heads),
            all_queries_norm=all_queries_norm,
            all_keys_norm=all_keys_norm,
            rotation=CRotation(query_norm, key_norm, rotated_dim=call.rotated_dim),
            attention=attention_options(call.options, sinks),
            attention_output=self._packed(pack(*parts.attention_output, numbers=numbers)),
            after_attention_norm=self._norm(parts.after_attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            gate_up=gate_up,
            down=down,
            after_mlp_norm=self._norm(parts.after_mlp_norm),
            residual_multiplier=parts.residual_multiplier,
            mlp_is_parallel=parts.mlp_is_parallel,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: nothing else of the model reads what a layer was given."""
        executor = active_executor()
        assert isinstance(executor, CpuAttention), "a fused layer has no other attention than the kernels'"
        handed = None
        if self._turning is not None and position_embeddings is not None:
            handed = HandedAngles(position_embeddings, self._turning.order)
        hidden_TH = hidden_states[0]
        if not hasattr(self, "mlp"):
            executor.run_layer(self._c, self._layer_idx, hidden_TH, handed)
        else:
            mlp_input_TH = executor.run_attention_part(self._c, self._layer_idx, hidden_TH, handed)
            self._add(hidden_TH, self.mlp(mlp_input_TH.unsqueeze(0))[0])
        return hidden_states

    def _add(self, hidden_TH: Tensor, delta_TH: Tensor) -> None:
        """As the kernels add what an MLP gives."""
        norm = self._after_mlp_norm
        if norm is None:
            hidden_TH.add_(delta_TH, alpha=self._residual_multiplier)
        elif isinstance(norm, LayerNorm):
            hidden_TH.add_(
                layer_norm(delta_TH.float(), norm.weight_H.shape, norm.weight_H, norm.bias_H, norm.epsilon)
            )
        else:
            hidden_TH.add_(rms_norm(delta_TH.float(), norm.weight_H.shape, norm.weight_H, norm.epsilon))

    def _take_mlp(self, mlp: GatedMlp | nn.Module, numbers: Numbers) -> tuple[CPackedWeight, CPackedWeight]:
        """Pack it; of a module that stays, the kernels get weights without outputs."""
        if not isinstance(mlp, GatedMlp):
            self.mlp = mlp  # under its name: experts in it are looked for, and replaced
            return CPackedWeight(), CPackedWeight()
        gate_NK, up_NK = mlp.gate_up_NK.chunk(2)
        gate_up = pack_gate_up(gate_NK, up_NK, mlp.activation, numbers=numbers)
        return self._packed(gate_up), self._packed(pack(*mlp.down, numbers=numbers))

    def _packed(self, weight: PackedWeight) -> CPackedWeight:
        self._kept.append(weight)
        return weight.c

    def _head_norms(self, norm: RmsNorm | None, heads: HeadShape) -> tuple[CNorm, CNorm]:
        """The norm of each head, and that of all heads of a token as one: a layer has at most one of them."""
        found, none = self._norm(norm), self._norm(None)
        return (none, found) if norms_all_heads(norm, heads) else (found, none)

    def _norm(self, norm: RmsNorm | None) -> CNorm:
        if norm is None:
            return CNorm()
        self._kept.append(norm)
        bias_H = norm.bias_H if isinstance(norm, LayerNorm) else None
        return CNorm(pointer(norm.weight_H), norm.epsilon, pointer(bias_H))
