"""A decoder layer of few kernels, in the place of transformers' own: nine launches for most families, or six.

Owns: a layer's merged weights, and the order of its products and kernels.
Never: decides whether that computes the same as the layer (layer_replacement.py), or waits for the device: a
graph can capture it.

The hidden state is the residual, changed in place. Where neither a bias nor a norm stands between a product
and the addition to the residual, the product adds as it writes its sums; but not the shard of a layer, whose
sums are first added over all ranks.

Shapes: T tokens, H numbers of a hidden state, I gates, M numbers of a merged query, key and value row.
"""

from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from worker.adapters.product_plan import plan_layer
from worker.attention.interface import executor_of_step
from worker.devices.dependent_launch import reading_next
from worker.gpu.attention import PagedAttention
from worker.gpu.kernels.norm import LARGEST_ROW, add, add_and_norm, norm
from worker.gpu.kernels.skinny_products import Folds
from worker.gpu.quantized.products import without_codes
from worker.gpu.trials.skinny import FoldedProduct
from worker.gpu.triton_adapters import AdaptedGpuProduct, GpuStepAdapters, TritonUpdates
from worker.model.layer_call import (
    AngleOrder,
    LayerCall,
    Rotation,
    head_shape,
    in_kernel_order,
    norms_all_heads,
)
from worker.model.layer_parts import GatedMlp, LayerParts, RmsNorm, Unrecognised
from worker.model.linear import Linear
from worker.ranks.ranks import ALONE, Ranks


class TritonLayer(nn.Module):
    """A layer that runs only while a PagedAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall, ranks: Ranks = ALONE) -> None:
        """Take a layer, or the shard of one of several ranks."""
        super().__init__()
        hidden_size = parts.mixer.output.num_outputs
        if hidden_size > LARGEST_ROW:
            raise Unrecognised(f"its hidden state has {hidden_size} numbers")
        if call.state is not None:
            raise Unrecognised("it recurs")
        self._heads = head_shape(parts, call)
        if self._heads.is_gated:
            raise Unrecognised("it weighs what it attends to by gates")
        if any(norms_all_heads(norm, self._heads) for norm in (parts.mixer.query_norm, parts.mixer.key_norm)):
            raise Unrecognised("it norms all heads of a token as one")
        if parts.mlp_is_parallel:
            raise Unrecognised("its MLP is given what attention is given")
        if call.rotary is not None and call.rotary.order is not AngleOrder.TWICE:
            raise Unrecognised("it is given the angles of its heads in pairs")
        parts, self._ranks = in_kernel_order(parts, call), ranks
        self._parts, self._call = parts.with_linears(without_codes), call
        self._query_key_value = FoldedProduct(parts.mixer.query_key_value, Folds(norm=parts.attention_norm))
        self._attention_output = self._added(parts.mixer.output, parts.after_attention_norm)
        self.products = [self._query_key_value, self._attention_output]
        if isinstance(parts.mlp, GatedMlp):
            # An addition that needs a kernel of its own brings the norm with it.
            mlp_norm = parts.mlp_norm if self._attention_output.is_added else None
            self._gate_up = FoldedProduct(parts.mlp.gate_up, Folds(mlp_norm, parts.mlp.activation))
            self._down = self._added(parts.mlp.down, parts.after_mlp_norm)
            self.products += [self._gate_up, self._down]
        else:
            self.mlp = parts.mlp  # under its name: experts in it are looked for, and replaced

    def adapt(self, name: str, step: GpuStepAdapters, num_slots: int) -> list[TritonUpdates]:
        """Make the layer's products compute updates of the modules that they were made of."""
        updates: list[TritonUpdates] = []
        plans = plan_layer(self._parts, self._call)[: len(self.products)]
        for product, plan in zip(self.products, plans, strict=True):
            if plan is not None:
                updates.append(TritonUpdates(name, plan, product.linear, step, num_slots))
                product.wrap(partial(AdaptedGpuProduct, updates=updates[-1]))
        return updates

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: no other part of the model reads a layer's input."""
        # The toolkit that made this layer made the backend.
        executor = cast("PagedAttention", executor_of_step())
        hidden_states = hidden_states.contiguous()
        parts, hidden_TH = self._parts, hidden_states[0]
        rotation = None if self._call.rotary is None else position_embeddings
        attended_TM = self._attend(executor, hidden_TH, rotation)
        mlp_input_TH = self._add_attended(hidden_TH, attended_TM)
        if isinstance(parts.mlp, GatedMlp):
            with reading_next(self._mlp_memory):
                gated_TI = self._gate_up.multiply(mlp_input_TH)
            self._add_product(hidden_TH, gated_TI, self._down, parts.after_mlp_norm)
        else:
            delta_TH = self.mlp(mlp_input_TH.unsqueeze(0))[0].contiguous()
            add(hidden_TH, self._weighed(delta_TH, parts.after_mlp_norm), parts.after_mlp_norm)
        return hidden_states

    @property
    def _mlp_memory(self) -> Tensor | None:
        return self._gate_up.memory if isinstance(self._parts.mlp, GatedMlp) else None

    def _added(self, linear: Linear, after_norm: RmsNorm | None) -> FoldedProduct:
        """Fold in the addition to the residual where neither ranks, a bias nor a norm stand before it."""
        is_added = self._ranks.size == 1 and not linear.has_bias and after_norm is None
        multiplier = self._parts.residual_multiplier if is_added else 1.0
        return FoldedProduct(linear, Folds(is_added=is_added, multiplier=multiplier))

    def _attend(self, executor: PagedAttention, hidden_TH: Tensor, rotation: Rotation | None) -> Tensor:
        """Return the attention outputs of all query heads of each token, side by side."""
        with reading_next(self._query_key_value.memory):
            merged_TM = self._query_key_value.multiply(hidden_TH)
        norms = self._parts.mixer.query_norm, self._parts.mixer.key_norm
        layer = self._call.layer_idx
        with reading_next(self._attention_output.memory):
            queries_THD = executor.rotate_and_write(layer, merged_TM, self._heads, norms, rotation)
        with reading_next(self._mlp_memory):
            attended_THV = executor.attend_written(layer, queries_THD, self._call.options)
        return attended_THV.flatten(1)

    def _add_attended(self, hidden_TH: Tensor, attended_TM: Tensor) -> Tensor:
        """Add attention's output in place, and return the MLP's input; gates norm it by themselves."""
        parts, by = self._parts, self._attention_output
        after_norm, mlp_norm = parts.after_attention_norm, parts.mlp_norm
        if mlp_norm is not None and not by.is_added:
            delta_TH = self._weighed(self._summed(attended_TM, by), after_norm)
            return add_and_norm(hidden_TH, delta_TH, after_norm, mlp_norm)
        self._add_product(hidden_TH, attended_TM, by, after_norm)
        if mlp_norm is None or isinstance(parts.mlp, GatedMlp):
            return hidden_TH
        return norm(hidden_TH, mlp_norm)

    def _add_product(
        self, hidden_TH: Tensor, x_TK: Tensor, by: FoldedProduct, after_norm: RmsNorm | None
    ) -> None:
        """Multiply, norm if there is a norm for it, and add to hidden_TH in place."""
        if by.is_added:
            by.add_to(hidden_TH, x_TK)
        else:
            add(hidden_TH, self._weighed(self._summed(x_TK, by), after_norm), after_norm)

    def _summed(self, x_TK: Tensor, by: FoldedProduct) -> Tensor:
        """Multiply, over the inputs of all ranks."""
        sums_TH = by.multiply(x_TK)
        self._ranks.reduce(sums_TH)
        return sums_TH

    def _weighed(self, delta_TH: Tensor, after_norm: RmsNorm | None) -> Tensor:
        """Multiply by the residual's multiplier, unless a norm follows, which would undo it."""
        if after_norm is not None or self._parts.residual_multiplier == 1.0:
            return delta_TH
        return delta_TH * self._parts.residual_multiplier
