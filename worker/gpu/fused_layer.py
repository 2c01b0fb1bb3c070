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
from worker.gpu.attention import TritonAttention
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.norm import LARGEST_ROW, add, add_and_norm, norm
from worker.layer_call import LayerCall, Rotation, head_shape, in_halves
from worker.layer_parts import GatedMlp, LayerParts, Projection, RmsNorm, Unrecognised


class FusedLayer(nn.Module):
    """Runs only while a TritonAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall) -> None:
        super().__init__()
        hidden_size = len(parts.attention_output.weight_NK)
        if hidden_size > LARGEST_ROW:
            raise Unrecognised(f"its hidden state has {hidden_size} numbers")
        self._heads = head_shape(parts, call)
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
        attended_TM = self._attend(executor, norm(hidden_TH, parts.attention_norm), rotation)
        normed_TH = _add_product_and_norm(
            hidden_TH, attended_TM, parts.attention_output, parts.after_attention_norm, parts.mlp_norm
        )
        if isinstance(parts.mlp, GatedMlp):
            gated_TI = multiply_by_gates(linear(normed_TH, parts.mlp.gate_up_NK), parts.mlp.activation)
            _add_product(hidden_TH, gated_TI, parts.mlp.down, parts.after_mlp_norm)
        else:
            add(hidden_TH, self.mlp(normed_TH.unsqueeze(0))[0].contiguous(), parts.after_mlp_norm)
        return hidden_states

    def _attend(self, executor: TritonAttention, normed_TH: Tensor, rotation: Rotation | None) -> Tensor:
        """Return what all query heads of each token attended to, side by side."""
        merged_TM = linear(normed_TH, *self._parts.query_key_value)
        norms = self._parts.query_norm, self._parts.key_norm
        queries_THD = executor.turn_and_write(self._call.layer_idx, merged_TM, self._heads, norms, rotation)
        attended_THV = executor.attend_written(self._call.layer_idx, queries_THD, self._call.options)
        return attended_THV.flatten(1)


def _add_product(hidden_TH: Tensor, x_TK: Tensor, by: Projection, after_norm: RmsNorm | None) -> None:
    """Multiply, norm if there is a norm for it, and add to hidden_TH in place."""
    if by.bias_N is None and after_norm is None:
        hidden_TH.addmm_(x_TK, by.weight_NK.t())
    else:
        add(hidden_TH, linear(x_TK, *by), after_norm)


def _add_product_and_norm(
    hidden_TH: Tensor, x_TK: Tensor, by: Projection, after_norm: RmsNorm | None, sum_norm: RmsNorm
) -> Tensor:
    """Do as `_add_product`, and return the sum normed by `sum_norm`."""
    if by.bias_N is None and after_norm is None:
        hidden_TH.addmm_(x_TK, by.weight_NK.t())
        return norm(hidden_TH, sum_norm)
    return add_and_norm(hidden_TH, linear(x_TK, *by), after_norm, sum_norm)
