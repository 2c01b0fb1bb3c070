"""Decoder layers as calls of the kernels, in the place of transformers' own.

Owns: a layer's packed weights and the struct that points to them; an MLP that kernels cannot compute stays.

Shapes: T tokens, H numbers of a hidden state.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from worker.adapters.adapted_linear import AdaptablePart, StepAdapters
from worker.adapters.product_plan import LayerPlan, plan_layer
from worker.attention.interface import (
    executor_of_step,
)
from worker.cpu.adapters import AdaptedProduct
from worker.cpu.attention import (
    FusedLayer,
    GivenAngles,
    LayerAttention,
    RecurrentInputs,
    attention_options,
)
from worker.cpu.native import (
    MOST_COLUMNS,
    WIDEST_VECTOR,
    CHeadShape,
    CLayer,
    CNorm,
    CPackedWeight,
    CRecurrentMixer,
    CRotation,
    PackedWeight,
    gate_up_order,
    pointer,
)
from worker.cpu.packing.grouped_packing import Inputs
from worker.cpu.products import pack_gate_up, pack_linear
from worker.model.layer_call import (
    HeadShape,
    LayerCall,
    Rotation,
    head_shape,
    in_kernel_order,
    norms_all_heads,
    num_groups_of,
)
from worker.model.layer_parts import (
    DeltaRule,
    GatedMlp,
    LayerNorm,
    LayerParts,
    Mixer,
    RmsNorm,
    Unrecognised,
)
from worker.states.interface import StateShape


class CpuLayer(nn.Module):
    """A layer that runs only while a LayerAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall, inputs: Inputs = Inputs.AS_THEY_ARE) -> None:
        super().__init__()
        self._inputs = inputs
        heads = None if call.state is not None else head_shape(parts, call)
        self.shape, self.state = call.shape, call.state
        self._plan = _plan(parts, call)
        parts = in_kernel_order(parts, call)
        mixer = parts.mixer
        self.layer_idx, self.rotary = call.layer_idx, call.rotary
        self._kept: list[Any] = []  # the struct points to it
        self._after_mlp_norm = parts.after_mlp_norm
        self._residual_multiplier = parts.residual_multiplier
        self.is_whole = isinstance(parts.mlp, GatedMlp)
        """Whether the kernels compute the MLP too."""
        gate_up, down = self._take_mlp(parts.mlp)
        self.c = CLayer(
            hidden_size=mixer.output.num_outputs,
            attention_norm=self._norm(parts.attention_norm),
            query_key_value=self._packed(pack_linear(mixer.query_key_value, inputs)),
            attention_output=self._packed(pack_linear(mixer.output, inputs)),
            after_attention_norm=self._norm(parts.after_attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            gate_up=gate_up,
            down=down,
            after_mlp_norm=self._norm(parts.after_mlp_norm),
            residual_multiplier=parts.residual_multiplier,
            mlp_is_parallel=parts.mlp_is_parallel,
            is_shard=call.is_shard,
        )
        recurrent = None
        if heads is not None:
            self._attend(mixer, heads, call)
        elif mixer.recurrence is not None and call.state is not None:
            recurrent = self._recur(mixer.recurrence, call.state)
        self.fused = FusedLayer(self.c, call.layer_idx, recurrent)

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: no other part of the model reads a layer's input."""
        # The toolkit that made this layer made the backend.
        executor = cast("LayerAttention", executor_of_step())
        given = None
        if self.rotary is not None and position_embeddings is not None:
            given = GivenAngles(position_embeddings, self.rotary.order)
        hidden_TH = hidden_states[0]
        if self.is_whole:
            executor.run_layer(self.fused, hidden_TH, given)
        else:
            mlp_input_TH = executor.run_mixer_part(self.fused, hidden_TH, given)
            self._add(hidden_TH, self.mlp(mlp_input_TH.unsqueeze(0))[0])
        return hidden_states

    def adapt(self, name: str, step: StepAdapters, num_slots: int) -> list[AdaptablePart]:
        """Make the layer's products compute updates of the modules that they were made of."""
        parts: list[AdaptablePart] = []
        of_mlp = self.c.gate_up, self.c.down
        products = (self.c.query_key_value, self.c.attention_output, *of_mlp, self.c.recurrent.steps)
        for product, plan in zip(products, self._plan, strict=True):
            if plan is not None:
                adapted = AdaptedProduct(name, plan, step, num_slots)
                adapted.attach(product)
                self._kept.append(adapted)
                parts.append(adapted)
        return parts

    def _attend(self, mixer: Mixer, heads: HeadShape, call: LayerCall) -> None:
        sinks = None if call.options.sinks is None else call.options.sinks.float().contiguous()
        self._kept.append(sinks)
        query_norm, self.c.all_queries_norm = self._head_norms(mixer.query_norm, heads)
        key_norm, self.c.all_keys_norm = self._head_norms(mixer.key_norm, heads)
        self.c.heads = CHeadShape(*heads)
        self.c.rotation = CRotation(query_norm, key_norm, rotated_dim=call.rotated_dim)
        self.c.attention = attention_options(call.options, sinks)

    def _recur(self, recurrence: DeltaRule, state: StateShape) -> RecurrentInputs:
        """Fill in the part between the products. Raises Unrecognised for sizes that kernels do not take."""
        num_groups = num_groups_of(state)
        if state.num_columns > MOST_COLUMNS or state.num_channels % WIDEST_VECTOR:
            raise Unrecognised("its convolution is too wide")
        if recurrence.steps.num_outputs != 2 * state.num_heads or not num_groups:
            raise Unrecognised("its projections are not those of its heads alone")
        bias_C = recurrence.convolution_bias_C
        kept = (
            recurrence.convolution_CW.float().t().contiguous(),
            None if bias_C is None else bias_C.float().contiguous(),
            recurrence.decay_factors_H.contiguous(),
            recurrence.decay_biases_H.contiguous(),
        )
        self._kept.append(kept)
        weights, bias, factors, biases = map(pointer, kept)
        self.c.recurrent = CRecurrentMixer(
            steps=self._packed(pack_linear(recurrence.steps, self._inputs)),
            convolution=weights,
            convolution_bias=bias,
            num_columns=state.num_columns,
            is_activated=True,
            decay_factors=factors,
            decay_biases=biases,
            num_heads=state.num_heads,
            num_groups=num_groups,
            key_dim=state.key_dim,
            value_dim=state.value_dim,
            scaling=state.key_dim**-0.5,
            norm=self._norm(recurrence.norm),
        )
        return RecurrentInputs(recurrence.convolution_CW, bias_C, state, num_groups)

    def _add(self, hidden_TH: Tensor, delta_TH: Tensor) -> None:
        """Add the MLP's output to the residual, as the kernels do."""
        norm = self._after_mlp_norm
        if norm is None:
            hidden_TH.add_(delta_TH, alpha=self._residual_multiplier)
        elif isinstance(norm, LayerNorm):
            hidden_TH.add_(
                layer_norm(delta_TH.float(), norm.weight_H.shape, norm.weight_H, norm.bias_H, norm.epsilon)
            )
        else:
            hidden_TH.add_(rms_norm(delta_TH.float(), norm.weight_H.shape, norm.weight_H, norm.epsilon))

    def _take_mlp(self, mlp: GatedMlp | nn.Module) -> tuple[CPackedWeight, CPackedWeight]:
        """Pack the MLP; for a module that stays, the kernels get weights without outputs."""
        if not isinstance(mlp, GatedMlp):
            self.mlp = mlp  # under its name: experts in it are looked for, and replaced
            return CPackedWeight(), CPackedWeight()
        gate_up, down = pack_gate_up(mlp, self._inputs), pack_linear(mlp.down, self._inputs)
        return self._packed(gate_up), self._packed(down)

    def _packed(self, weight: PackedWeight) -> CPackedWeight:
        self._kept.append(weight)
        return weight.c

    def _head_norms(self, norm: RmsNorm | None, heads: HeadShape) -> tuple[CNorm, CNorm]:
        """Return the norm of each head, and that of all heads as one: a layer has at most one of them."""
        found, none = self._norm(norm), self._norm(None)
        return (none, found) if norms_all_heads(norm, heads) else (found, none)

    def _norm(self, norm: RmsNorm | None) -> CNorm:
        if norm is None:
            return CNorm()
        self._kept.append(norm)
        return norm_struct(norm)


def norm_struct(norm: RmsNorm) -> CNorm:
    """Put a norm in the kernels' form; it must outlive the struct."""
    bias_H = norm.bias_H if isinstance(norm, LayerNorm) else None
    return CNorm(pointer(norm.weight_H), norm.epsilon, pointer(bias_H))


def _plan(parts: LayerParts, call: LayerCall) -> LayerPlan:
    order_N = None
    if isinstance(parts.mlp, GatedMlp):
        weight = parts.mlp.gate_up.weight
        order_N = gate_up_order(weight.shape[0] // 2, weight.device)
    return plan_layer(parts, call, order_N)
