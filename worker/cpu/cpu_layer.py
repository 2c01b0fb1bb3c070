"""Decoder layers as calls of the kernels, in the place of transformers' own: each alone, or all by one call.

A step reads more than caches hold, so that what the interpreter does between layers, and around them, comes
from memory: with a small model in codes that is a tenth of a step of one sequence.

Owns: a layer's packed weights and the struct that points to them; an MLP that kernels cannot compute stays.
And the body of a model whose layers all have theirs (embedding, layers, last norm), with the rotations of
positions that steps have had, and its trial.
Never: decides whether the kernels compute the same as a layer (surgery.py), or has an embedding or a rotation
other than the model's own module.

Shapes: T tokens, H numbers of a hidden state.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from worker.adapters.adapted_linear import AdaptablePart, StepAdapters
from worker.adapters.product_plan import LayerPlan, plan_layer
from worker.attention.interface import (
    AttentionMetadata,
    BlockTables,
    active,
    counter_of_layers,
    executor_of_step,
    present_executor,
)
from worker.attention.kv_cache import BlockLayout, KVCache
from worker.cpu.cpu_adapters import AdaptedProduct
from worker.cpu.cpu_attention import GivenAngles, LayerAttention, all_and_all_again, attention_options
from worker.cpu.cpu_products import pack_gate_up, pack_linear
from worker.cpu.native import (
    CAngles,
    CHeadShape,
    CLayer,
    CNorm,
    CPackedWeight,
    CRotation,
    CStack,
    PackedWeight,
    gate_up_order,
    pointer,
)
from worker.cpu.packing.grouped_packing import Inputs
from worker.model.layer_call import (
    HeadShape,
    LayerCall,
    Rotary,
    Rotation,
    head_shape,
    in_halves,
    norms_all_heads,
)
from worker.model.layer_parts import (
    GatedMlp,
    LayerNorm,
    LayerParts,
    RmsNorm,
    TakenWeights,
    Unrecognised,
    read_norm,
)

_LEAST_KEPT_POSITIONS, _MOST_KEPT_POSITIONS = 256, 8192
"""A few megabytes at most; steps with later positions are long enough to compute theirs."""
_BLOCK_SIZE, _NUM_BLOCKS = 8, 4
_TRIAL_START, _TRIAL_TOKENS = 11, 21
_NORM_TOLERANCE = 0.01
"""transformers' norms round twice, ours once."""


class CpuLayer(nn.Module):
    """A layer that runs only while a LayerAttention executes a step. Raises Unrecognised."""

    def __init__(self, parts: LayerParts, call: LayerCall, inputs: Inputs = Inputs.AS_THEY_ARE) -> None:
        super().__init__()
        self._inputs = inputs
        heads = head_shape(parts, call)
        self.shape = call.shape
        self._plan = _plan(parts, call)
        parts = in_halves(parts, call)
        self.layer_idx = call.layer_idx
        self.rotary = call.rotary
        self._kept: list[Any] = []  # the struct points to it
        sinks = None if call.options.sinks is None else call.options.sinks.float().contiguous()
        self._kept.append(sinks)
        self._after_mlp_norm = parts.after_mlp_norm
        self._residual_multiplier = parts.residual_multiplier
        self.is_whole = isinstance(parts.mlp, GatedMlp)
        """Whether the kernels compute the MLP too."""
        gate_up, down = self._take_mlp(parts.mlp)
        query_norm, all_queries_norm = self._head_norms(parts.query_norm, heads)
        key_norm, all_keys_norm = self._head_norms(parts.key_norm, heads)
        self.c = CLayer(
            hidden_size=parts.attention_output.num_outputs,
            attention_norm=self._norm(parts.attention_norm),
            query_key_value=self._packed(pack_linear(parts.query_key_value, inputs)),
            heads=CHeadShape(*heads),
            all_queries_norm=all_queries_norm,
            all_keys_norm=all_keys_norm,
            rotation=CRotation(query_norm, key_norm, rotated_dim=call.rotated_dim),
            attention=attention_options(call.options, sinks),
            attention_output=self._packed(pack_linear(parts.attention_output, inputs)),
            after_attention_norm=self._norm(parts.after_attention_norm),
            mlp_norm=self._norm(parts.mlp_norm),
            gate_up=gate_up,
            down=down,
            after_mlp_norm=self._norm(parts.after_mlp_norm),
            residual_multiplier=parts.residual_multiplier,
            mlp_is_parallel=parts.mlp_is_parallel,
            is_shard=call.is_shard,
        )

    def forward(
        self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation | None = None, **__: Any
    ) -> Tensor:
        """Compute [1, T, H] in place: nothing else of the model reads a layer's input."""
        # The toolkit that made this layer made the backend.
        executor = cast("LayerAttention", executor_of_step())
        given = None
        if self.rotary is not None and position_embeddings is not None:
            given = GivenAngles(position_embeddings, self.rotary.order)
        hidden_TH = hidden_states[0]
        if self.is_whole:
            executor.run_layer(self.c, self.layer_idx, hidden_TH, given)
        else:
            mlp_input_TH = executor.run_attention_part(self.c, self.layer_idx, hidden_TH, given)
            self._add(hidden_TH, self.mlp(mlp_input_TH.unsqueeze(0))[0])
        return hidden_states

    def adapt(self, name: str, step: StepAdapters, num_slots: int) -> list[AdaptablePart]:
        """Make the layer's products compute updates of the modules that they were made of."""
        parts: list[AdaptablePart] = []
        products = (self.c.query_key_value, self.c.attention_output, self.c.gate_up, self.c.down)
        for product, plan in zip(products, self._plan, strict=True):
            if plan is not None:
                adapted = AdaptedProduct(name, plan, step, num_slots)
                adapted.attach(product)
                self._kept.append(adapted)
                parts.append(adapted)
        return parts

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
        return _norm_struct(norm)


def _norm_struct(norm: RmsNorm) -> CNorm:
    """Put a norm in the kernels' form; it must outlive the struct."""
    bias_H = norm.bias_H if isinstance(norm, LayerNorm) else None
    return CNorm(pointer(norm.weight_H), norm.epsilon, pointer(bias_H))


def _plan(parts: LayerParts, call: LayerCall) -> LayerPlan:
    order_N = None
    if isinstance(parts.mlp, GatedMlp):
        weight = parts.mlp.gate_up.weight
        order_N = gate_up_order(weight.shape[0] // 2, weight.device)
    return plan_layer(parts, call, order_N)


@dataclass(slots=True)
class _Outputs:
    """Outputs of a body, as heads read them. A ModelOutput of transformers takes longer than a norm."""

    last_hidden_state: Tensor
    hidden_TH: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class CpuBody(nn.Module):
    """A body that runs only while a LayerAttention executes a step. Raises Unrecognised.

    Its parts have the names that they have in transformers' body.
    """

    def __init__(self, body: Any, norm: RmsNorm) -> None:
        super().__init__()
        layers = list(getattr(body, "layers", ()))
        if not layers or not all(isinstance(layer, CpuLayer) and layer.is_whole for layer in layers):
            raise Unrecognised("not all of its layers are whole")
        rotaries = {layer.rotary for layer in layers}
        rotary = rotaries.pop()
        if rotaries or (rotary is not None and not hasattr(body, "rotary_emb")):
            raise Unrecognised("its layers do not rotate alike")
        self.embed_tokens, self.layers, self.norm = body.get_input_embeddings(), body.layers, body.norm
        self._angles: _KeptAngles | None = None
        if rotary is not None:
            self.rotary_emb = body.rotary_emb
            self._angles = _KeptAngles(self.rotary_emb, rotary)
        self._layer_idxs = tuple(layer.layer_idx for layer in layers)
        self.plain_head: tuple[nn.Module, ...] = ()
        """The output layer, where logits are its outputs and nothing else. It is no part of the body."""
        self._kept = norm, _stack([layer.c for layer in layers], len(norm.weight_H), _norm_struct(norm))

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> _Outputs:
        """Compute the hidden states [1, T, H] behind the last norm."""
        hidden_1TH = self.embed_tokens(input_ids).contiguous()
        hidden_TH = hidden_1TH[0]
        angles = CAngles() if self._angles is None else self._angles.of(hidden_1TH, position_ids)
        # The toolkit that made the layers made the backend.
        executor = cast("LayerAttention", present_executor())
        executor.run_layers(self._kept[1], self._layer_idxs, hidden_TH, angles)
        return _Outputs(hidden_1TH, hidden_TH)

    def small_cache(self) -> KVCache:
        """Make a cache for a sequence of a trial."""
        shapes = {layer.layer_idx: layer.shape for layer in self.layers}
        dtype = self.embed_tokens(torch.zeros((1, 1), dtype=torch.int64)).dtype
        layout = BlockLayout(layers=shapes, block_size=_BLOCK_SIZE, dtype=dtype)
        return KVCache(layout, _NUM_BLOCKS, torch.zeros((_NUM_BLOCKS + 1) * layout.block_numel, dtype=dtype))

    def normed(self, hidden_1TH: Tensor) -> Tensor:
        """Compute the norm by itself."""
        out_1TH = hidden_1TH.clone()
        stack = _stack([], len(self._kept[0].weight_H), _norm_struct(self._kept[0]))
        cast("LayerAttention", present_executor()).run_layers(stack, (), out_1TH[0], CAngles())
        return out_1TH


class _KeptAngles:
    """Rotations of positions that steps have had, each computed once by the model's own module."""

    def __init__(self, module: nn.Module, rotary: Rotary) -> None:
        self._module, self._rotary = module, rotary
        self._num_kept = 0
        self._kept: list[Tensor] = []
        self._pointed_to: object = None

    def of(self, hidden_1TH: Tensor, position_ids_1T: Tensor) -> CAngles:
        """Give the rotations of some positions; good until the next call."""
        last = int(position_ids_1T.numpy().max())
        if last >= _MOST_KEPT_POSITIONS:
            cosines, sines = self._pointed_to = self._compute(hidden_1TH, position_ids_1T)
            return CAngles(pointer(cosines), pointer(sines))
        if last >= self._num_kept:
            num_positions = max(_LEAST_KEPT_POSITIONS, 1 << last.bit_length())
            self._kept = self._compute(hidden_1TH, torch.arange(num_positions).unsqueeze(0))
            self._num_kept = num_positions
        cosines, sines = self._kept
        self._pointed_to = positions_1T = position_ids_1T.contiguous()
        return CAngles(pointer(cosines), pointer(sines), pointer(positions_1T))

    def _compute(self, hidden_1TH: Tensor, position_ids_1T: Tensor) -> list[Tensor]:
        rotation = self._module(hidden_1TH, position_ids_1T)
        return [all_and_all_again(each[0].float(), self._rotary.order) for each in rotation]


def _stack(layers: list[Any], hidden_size: int, norm: CNorm) -> CStack:
    """Make the struct. The layers must outlive it."""
    pointers = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))
    begun = counter_of_layers()
    stack = CStack(
        ctypes.cast(pointers, ctypes.c_void_p), len(layers), hidden_size, norm, ctypes.addressof(begun)
    )
    stack.kept = pointers, begun  # a struct keeps nothing alive that it points to
    return stack


class _Given(nn.Module):
    """Stand-in for a body whose outputs are computed already."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return self._outputs


def join_body(model: Any, taken: TakenWeights, open_backend: Callable[[KVCache], LayerAttention]) -> None:
    """Put a CpuBody in the place of the model's own body.

    Raises Unrecognised, and changes nothing, where that computes something else.
    """
    name = str(model.base_model_prefix)
    body: Any = getattr(model, name, None)
    if not all(hasattr(body, part) for part in ("layers", "norm", "config", "get_input_embeddings")):
        raise Unrecognised("its body is made otherwise than most")
    try:
        joined = CpuBody(body, read_norm(body.norm, taken))
        backend = open_backend(joined.small_cache())
        arguments = begin_trial(backend, body.config.vocab_size, _TRIAL_START, _TRIAL_TOKENS)
        with torch.inference_mode(), active(backend):
            outputs = _try_body(body, joined, arguments)
            head = model.get_output_embeddings()
            setattr(model, name, _Given(outputs))
            logits_1TV = model(**arguments, use_cache=False, return_dict=True).logits
            joined.plain_head = (head,) if _are_same(head(outputs.hidden_TH), logits_1TV[0]) else ()
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        setattr(model, name, body)
        raise Unrecognised(f"its body cannot be joined ({type(error).__name__})") from error
    setattr(model, name, joined)


def _try_body(body: Any, joined: CpuBody, arguments: dict[str, Tensor]) -> _Outputs:
    """Compare all before the last norm to the bit, and that with its own. Raises Unrecognised."""
    seen: list[Tensor] = []
    hook = body.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    try:
        expected = body(**arguments, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    outputs: _Outputs = joined(**arguments)
    found = outputs.last_hidden_state
    if not _are_same(found, joined.normed(seen[0])):
        raise Unrecognised("its body computes more than its parts")
    # A model of numbers that are none stays as it is.
    if not (found - expected).float().norm() <= _NORM_TOLERANCE * expected.float().norm():
        raise Unrecognised("its last norm computes something else")
    return outputs


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Compare bits: what is not a number equals itself."""
    return a.dtype is b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def begin_trial(backend: LayerAttention, vocab_size: int, start: int, num_tokens: int) -> dict[str, Tensor]:
    """Begin a step of some tokens over a small cache; returns the arguments of a body."""
    generator = np.random.default_rng(num_tokens)
    backend.begin_step(_metadata(num_tokens))
    return {
        "input_ids": torch.from_numpy(generator.integers(0, vocab_size, (1, num_tokens))),
        "position_ids": torch.arange(start, start + num_tokens).unsqueeze(0),
    }


def _metadata(num_tokens: int) -> AttentionMetadata:
    """Describe a step of one sequence, which begins with it."""
    places = np.arange(num_tokens)
    blocks = np.arange(_NUM_BLOCKS, 0, -1)
    return AttentionMetadata(
        num_decodes=int(num_tokens == 1),
        query_starts=np.array([0, num_tokens]),
        seq_lens=np.array([num_tokens]),
        tables=BlockTables.of(blocks[None].astype(np.int32)),
        token_blocks=blocks[places // _BLOCK_SIZE],
        token_offsets=places % _BLOCK_SIZE,
    )
