"""A decoder layer of few kernels, in the place of transformers' own: nine launches for most families.

Owns: a layer's merged weights, and the order of its products and kernels.
Never: decides whether that computes what the layer did (surgery.py), or waits for the device: a graph can
capture it.

The hidden state is the residual, changed in place. Where nothing stands between a product and the addition to
the residual, no bias and no norm, cuBLAS adds it as it writes the product's sums.

Shapes: T tokens, H numbers of a hidden state, I gates, M numbers of a merged query, key and value row.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from worker.attention.interface import active_executor
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.norm import LARGEST_ROW, add, add_and_norm, norm
from worker.gpu.triton_attention import TritonAttention
from worker.model.layer_call import AngleOrder, LayerCall, Rotation, head_shape, in_halves, norms_all_heads
from worker.model.layer_parts import GatedMlp, LayerParts, Projection, RmsNorm, Unrecognised


class FusedLayer(nn.Module):
    """Runs only while a TritonAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall) -> None:
        super().__init__()
        hidden_size = len(parts.attention_output.weight_NK)
        if hidden_size > LARGEST_ROW:
            raise Unrecognised(f"its hidden state has {hidden_size} numbers")
        self._heads = head_shape(parts, call)
        if any(norms_all_heads(norm, self._heads) for norm in (parts.query_norm, parts.key_norm)):
            raise Unrecognised("it norms all heads of a token as one")
        if parts.mlp_is_parallel:
            raise Unrecognised("its MLP is given what attention is given")
        if call.turning is not None and call.turning.order is not AngleOrder.TWICE:
            raise Unrecognised("it is given the angles of its heads in pairs")
        self._parts = in_halves(parts, call)
        self._call = call
        if isinstance(parts.mlp, nn.Module):
            self.mlp = parts.mlp  # under its name: experts in it are looked for, and replaced

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: nothing else of the model reads what a layer was given."""
        executor = active_executor()
        assert isinstance(executor, TritonAttention), "a fused layer has no other attention than the kernels'"
        hidden_states = hidden_states.contiguous()
        parts, hidden_TH = self._parts, hidden_states[0]
        rotation = None if self._call.turning is None else position_embeddings
        to_attend_TH = hidden_TH if parts.attention_norm is None else norm(hidden_TH, parts.attention_norm)
        attended_TM = self._attend(executor, to_attend_TH, rotation)
        mlp_input_TH = self._add_attended(hidden_TH, attended_TM)
        if isinstance(parts.mlp, GatedMlp):
            gated_TI = multiply_by_gates(linear(mlp_input_TH, parts.mlp.gate_up_NK), parts.mlp.activation)
            self._add_product(hidden_TH, gated_TI, parts.mlp.down, parts.after_mlp_norm)
        else:
            delta_TH = self.mlp(mlp_input_TH.unsqueeze(0))[0].contiguous()
            add(hidden_TH, self._weighed(delta_TH, parts.after_mlp_norm), parts.after_mlp_norm)
        return hidden_states

    def _attend(self, executor: TritonAttention, normed_TH: Tensor, rotation: Rotation | None) -> Tensor:
        """Return what all query heads of each token attended to, side by side."""
        merged_TM = linear(normed_TH, *self._parts.query_key_value)
        norms = self._parts.query_norm, self._parts.key_norm
        queries_THD = executor.turn_and_write(self._call.layer_idx, merged_TM, self._heads, norms, rotation)
        attended_THV = executor.attend_written(self._call.layer_idx, queries_THD, self._call.options)
        return attended_THV.flatten(1)

    def _add_attended(self, hidden_TH: Tensor, attended_TM: Tensor) -> Tensor:
        """Add attention's output in place, and return what the MLP is to be given."""
        parts = self._parts
        by, after_norm, mlp_norm = parts.attention_output, parts.after_attention_norm, parts.mlp_norm
        if mlp_norm is None or (by.bias_N is None and after_norm is None):
            self._add_product(hidden_TH, attended_TM, by, after_norm)
            return hidden_TH if mlp_norm is None else norm(hidden_TH, mlp_norm)
        delta_TH = self._weighed(linear(attended_TM, *by), after_norm)
        return add_and_norm(hidden_TH, delta_TH, after_norm, mlp_norm)

    def _add_product(
        self, hidden_TH: Tensor, x_TK: Tensor, by: Projection, after_norm: RmsNorm | None
    ) -> None:
        """Multiply, norm if there is a norm for it, and add to hidden_TH in place."""
        if by.bias_N is None and after_norm is None:
            hidden_TH.addmm_(x_TK, by.weight_NK.t(), alpha=self._parts.residual_multiplier)
        else:
            add(hidden_TH, self._weighed(linear(x_TK, *by), after_norm), after_norm)

    def _weighed(self, delta_TH: Tensor, after_norm: RmsNorm | None) -> Tensor:
        """By the residual's multiplier, which a norm would undo."""
        if after_norm is not None or self._parts.residual_multiplier == 1.0:
            return delta_TH
        return delta_TH * self._parts.residual_multiplier
