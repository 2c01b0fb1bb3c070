"""A decoder layer as one call of the kernels, in the place of transformers' own.

Owns: a layer's packed weights and the struct that points to them.
Never: decides whether the kernels compute what the layer did (surgery.py).

Shapes: T tokens, H numbers of a hidden state.
"""

from typing import Any

from torch import Tensor, nn

from worker.attention.interface import active_executor
from worker.cpu.attention import CpuAttention, attention_options
from worker.cpu.native import (
    CHeadShape,
    CLayer,
    CNorm,
    CRotation,
    Numbers,
    pack,
    pack_gate_up,
    pointer,
)
from worker.layer_call import LayerCall, Rotation, head_shape, in_halves
from worker.layer_parts import GatedMlp, LayerParts, RmsNorm


class FusedLayer(nn.Module):
    """Runs only while a CpuAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall, *, numbers: Numbers = Numbers.AS_THEY_ARE) -> None:
        super().__init__()
        heads = head_shape(parts, call)
        parts = in_halves(parts, call)
        self._layer_idx = call.layer_idx
        self._turns = call.turning is not None
        self._kept: list[Any] = []  # what the struct points to
        sinks = None if call.options.sinks is None else call.options.sinks.float().contiguous()
        query_key_value = pack(*parts.query_key_value, numbers=numbers)
        attention_output = pack(*parts.attention_output, numbers=numbers)
        mlp = parts.mlp
        assert isinstance(mlp, GatedMlp), "the kernels take no other, and say so"
        gate_NK, up_NK = mlp.gate_up_NK.chunk(2)
        gate_up = pack_gate_up(gate_NK, up_NK, mlp.activation, numbers=numbers)
        down = pack(*mlp.down, numbers=numbers)
        self._kept += [sinks, query_key_value, attention_output, gate_up, down]
        self._c = CLayer(
            hidden_size=len(mlp.down.weight_NK),
            attention_norm=self._norm(parts.attention_norm),
            query_key_value=query_key_value.c,
            heads=CHeadShape(*heads),
            rotation=CRotation(
                query_norm=self._norm(parts.query_norm),
                key_norm=self._norm(parts.key_norm),
                rotated_dim=call.rotated_dim,
            ),
            attention=attention_options(call.options, sinks),
            attention_output=attention_output.c,
            after_attention_norm=self._norm(parts.after_attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            gate_up=gate_up.c,
            down=down.c,
            after_mlp_norm=self._norm(parts.after_mlp_norm),
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: nothing else of the model reads what a layer was given."""
        executor = active_executor()
        assert isinstance(executor, CpuAttention), "a fused layer has no other attention than the kernels'"
        rotation = position_embeddings if self._turns else None
        executor.run_layer(self._c, self._layer_idx, hidden_states[0], rotation)
        return hidden_states

    def _norm(self, norm: RmsNorm | None) -> CNorm:
        if norm is None:
            return CNorm(None, 0.0)
        self._kept.append(norm.weight_H)
        return CNorm(pointer(norm.weight_H), norm.epsilon)
