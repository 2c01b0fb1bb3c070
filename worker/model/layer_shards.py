"""The shard of a decoder layer that one rank computes.

Owns: the cut. Of attention a rank has whole heads, of the MLP gates with their ups; the sums of both are
those of the layer once they are reduced over all ranks.
Source: column and row parallel layers, arXiv:1909.08053.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from worker.attention.indexers import INDEXER, choose_for_rank
from worker.attention.kv_cache import BlockLayout, LayerShape, check_states
from worker.attention.latents import EXPANSION, LatentExpansion, find_expansions
from worker.attention.layer_groups import grouped
from worker.model.layer_call import LayerCall, head_shape, norms_all_heads, num_groups_of
from worker.model.layer_parts import (
    GatedMlp,
    LayerCuts,
    LayerParts,
    Mixer,
    TakenWeights,
    Unrecognised,
    find_layers,
)
from worker.model.linear import CUT, Axis, Cut, Linear, PlainWeight, Segment, linear_of
from worker.model.mixture import find_experts
from worker.ranks.ranks import Ranks
from worker.ranks.stage import ONLY_STAGE, Stage
from worker.states.interface import StateShape
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

_KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj")
_OF_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
"""Products that each rank computes whole."""
_BEHIND_HEADS, _BEHIND_GATES = "o_proj", "down_proj"
_NUM_PARTS = {"gate_proj": 1, "up_proj": 1, "gate_up_proj": 2}
"""Parts that lie side by side in the products before gates."""
CUT_BY_HEADS = "is_cut_by_heads"
"""Mark of an attention module that stays, and that ranks cut as it is."""
_NUM_TOKENS, _NUM_GATES, _SEED = 3, 8, 13
_DIVIDED_MODULES = (nn.Linear, nn.Embedding, LatentExpansion)


def shard_layer(
    parts: LayerParts, call: LayerCall, ranks: Ranks, taken: TakenWeights
) -> tuple[LayerParts, LayerCall]:
    """Cut a layer, into products that the kernels take. Raises Unrecognised."""
    if ranks.size == 1:
        return parts, call
    place, mixer = (ranks.rank, ranks.size), parts.mixer
    if call.state is not None:
        return _shard_recurrent(parts, call, call.state, ranks, taken)
    heads = head_shape(parts, call)
    if norms_all_heads(mixer.query_norm, heads) or norms_all_heads(mixer.key_norm, heads):
        raise Unrecognised("it norms the queries or the keys of all heads as one, which are on several ranks")
    if heads.num_query_heads % ranks.size:
        raise Unrecognised(f"its {heads.num_query_heads} query heads cannot be divided by {ranks.size}")
    query_key_value = mixer.query_key_value.in_segments(heads.segments)
    with _refusing_uneven(ranks):
        own = replace(mixer, query_key_value=query_key_value.shard(*place, Axis.OUTPUTS))
        parts = _with_shards(parts, own, query_key_value.cut(*place, Axis.OUTPUTS), None, ranks, taken)
    return parts, _shard_call(call, heads.num_query_heads // ranks.size, ranks)


@contextmanager
def _refusing_uneven(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except ValueError as uneven:
        raise Unrecognised(f"it cannot be divided by {ranks.size}: {uneven}") from uneven


def _with_shards(
    parts: LayerParts, mixer: Mixer, rows: Cut, steps: Cut | None, ranks: Ranks, taken: TakenWeights
) -> LayerParts:
    """Put in a mixer whose first products are cut, and cut the others. Raises Unrecognised, or ValueError."""
    mlp, place = parts.mlp, (ranks.rank, ranks.size)
    gate_up, down = (None, None) if isinstance(mlp, nn.Module) else _cut_mlp(mlp, ranks)
    parts = replace(
        parts,
        cuts=LayerCuts(rows, mixer.output.cut(*place, Axis.INPUTS), gate_up, down, steps),
        mixer=replace(mixer, output=mixer.output.shard(*place, Axis.INPUTS)),
        # Experts are divided when they are replaced; the router and the rest are computed on each rank.
        mlp=_shard_mlp(mlp, ranks, taken.size_multiple) if isinstance(mlp, GatedMlp) else mlp,
    )
    parts.with_linears(lambda linear: _check_taken(linear, taken))
    return parts


def _shard_recurrent(
    parts: LayerParts, call: LayerCall, state: StateShape, ranks: Ranks, taken: TakenWeights
) -> tuple[LayerParts, LayerCall]:
    """Cut a recurrence into groups of heads, with their channels and steps. Raises Unrecognised."""
    mixer, rule = parts.mixer, parts.mixer.recurrence
    assert rule is not None
    own, modules_of_steps = shard_state(state, ranks.size), rule.steps.segments
    num_groups, values = num_groups_of(state), state.num_heads * state.value_dim
    keys = Segment(num_groups * state.key_dim, state.key_dim)
    heads = Segment(state.num_heads, state.num_heads // num_groups)
    gates = Segment(values, values // num_groups)
    rows, steps = mixer.query_key_value.in_segments([keys, keys, gates, gates]), rule.steps
    if rule.is_by_group:
        rows = rows.in_segments([Segment(rows.num_outputs, rows.num_outputs // num_groups)])
        steps = steps.in_segments([Segment(steps.num_outputs, steps.num_outputs // num_groups)])
    else:
        steps = steps.in_segments([heads, heads])
    channels = Linear.of(PlainWeight(rule.convolution_CW), rule.convolution_bias_C)
    place, first = (ranks.rank, ranks.size, Axis.OUTPUTS), ranks.rank * own.num_heads
    channels = channels.in_segments([keys, keys, gates]).shard(*place)
    own_heads = slice(first, first + own.num_heads)
    with _refusing_uneven(ranks):
        rule = replace(
            rule,
            steps=steps.shard(*place),
            convolution_CW=channels.weight.dequantized(rule.convolution_CW.dtype),
            convolution_bias_C=channels.bias_N,
            decay_factors_H=rule.decay_factors_H[own_heads],
            decay_biases_H=rule.decay_biases_H[own_heads],
        )
        # To adapters, a segment is a module.
        cut_rows = rows.cut(*place)._replace(segments=mixer.query_key_value.segments)
        cut_steps = steps.cut(*place)._replace(segments=modules_of_steps)
        mixer = replace(mixer, query_key_value=rows.shard(*place), recurrence=rule)
        parts = _with_shards(parts, mixer, cut_rows, cut_steps, ranks, taken)
    return parts, replace(call, state=own, is_shard=True)


def shard_state(state: StateShape, num_ranks: int) -> StateShape:
    """Divide the groups of heads of a delta rule. Raises Unrecognised."""
    num_groups = num_groups_of(state) if state.key_dim else 0
    if num_ranks > 1 and (num_groups < 1 or num_groups % num_ranks or state.num_heads % num_groups):
        raise Unrecognised(f"its state of {num_groups} groups of heads cannot be divided by {num_ranks}")
    return replace(
        state, num_heads=state.num_heads // num_ranks, num_channels=state.num_channels // num_ranks
    )


Pack = Callable[[Linear, Axis], nn.Module]
"""The making of a rank's part of a product."""


def can_shard_own(layer: nn.Module) -> bool:
    """Tell whether a layer that stays is one that `shard_own_layer` cuts."""
    return any(_own_attentions(layer))


def shard_own_layer(layer: nn.Module, ranks: Ranks, pack: Pack) -> None:
    """Cut a layer that stays, with latents or an indexer: heads, and gates of MLPs. Raises Unrecognised.

    Latents and index keys are computed and kept whole by each rank, and so is all that is not named here.
    """
    products = []
    for prefix, attention in _own_attentions(layer):
        products += [each._replace(name=prefix + each.name) for each in _products_of_heads(attention)]
        for name, parameter in attention.named_parameters(recurse=False):  # such as sinks, one for each head
            own_H = parameter.detach().tensor_split(ranks.size)[ranks.rank].clone()
            setattr(attention, name, nn.Parameter(own_H, requires_grad=False))
        if isinstance(indexer := getattr(attention, INDEXER, None), nn.Module):
            choose_for_rank(indexer, ranks.rank, ranks.size)
    _shard_products(layer, [*products, *_products_of_gates(layer)], ranks, pack)


def shard_own_mlp(mlp: nn.Module, ranks: Ranks, pack: Pack) -> None:
    """Cut the MLP of a fused layer, where it stays. Raises Unrecognised.

    Experts are cut where they are replaced.
    """
    if any(find_experts(mlp)):
        return
    if not (products := [*_products_of_gates(mlp)]):
        raise Unrecognised("its MLP cannot be divided among ranks")
    _shard_products(mlp, products, ranks, pack)


class _Product(NamedTuple):
    """A product that is cut."""

    name: str
    axis: Axis
    unit: int = 1
    """Outputs that stay together."""
    num_parts: int = 1
    """Parts of the outputs that lie side by side."""


def _shard_products(layer: nn.Module, products: Iterable[_Product], ranks: Ranks, pack: Pack) -> None:
    place, cut = (ranks.rank, ranks.size), dict[str, nn.Module]()
    with _refusing_uneven(ranks):
        for name, axis, unit, num_parts in products:
            product = layer.get_submodule(name)
            linear = linear_of(product)
            if isinstance(product, LatentExpansion):
                linear = Linear.of(PlainWeight(product.weight.detach()))
            if linear is None:
                raise Unrecognised(f"its {name} is {type(product).__name__}")
            linear = linear.in_segments([Segment(linear.num_outputs // num_parts, unit)] * num_parts)
            shard = linear.shard(*place, axis)
            if isinstance(product, LatentExpansion):
                numbers = nn.Parameter(shard.weight.dequantized(product.weight.dtype), requires_grad=False)
                cut[name] = LatentExpansion(numbers, product.sizes)
            else:
                cut[name] = pack(shard, axis)
            setattr(cut[name], CUT, linear.cut(*place, axis))
    for name, module in cut.items():
        layer.set_submodule(name, module)


def _own_attentions(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the attention modules with latents, an indexer, or a mark; each with its children's prefix."""
    latents = {attention for _, attention in find_expansions(layer)}
    for name, module in layer.named_modules():
        has_indexer = isinstance(getattr(module, INDEXER, None), nn.Module)
        if module in latents or has_indexer or getattr(module, CUT_BY_HEADS, False):
            yield f"{name}.", module


def _products_of_heads(attention: Any) -> Iterator[_Product]:
    """List the products of queries, keys, values, gates of heads, and what follows attention."""
    expansion = getattr(attention, EXPANSION, None)
    num_heads = 0 if expansion is None else len(expansion.weight) // sum(expansion.sizes[1:])
    for name, module in attention.named_children():
        if name == _BEHIND_HEADS:
            yield _Product(name, Axis.INPUTS)
        elif module is expansion:
            yield _Product(name, Axis.OUTPUTS, sum(expansion.sizes[1:]))
        elif name not in _OF_LATENTS and (linear := linear_of(module)) is not None:
            unit = linear.num_outputs // num_heads if num_heads else attention.head_dim
            yield _Product(name, Axis.OUTPUTS, unit)


def _products_of_gates(layer: nn.Module) -> Iterator[_Product]:
    """List the products of MLPs. Raises Unrecognised for one that takes its gates together."""
    for name, module in layer.named_modules():
        children, prefix = dict(module.named_children()), f"{name}." if name else ""
        parts = {each: num_parts for each, num_parts in _NUM_PARTS.items() if each in children}
        if not parts or _BEHIND_GATES not in children:
            continue
        if not _takes_gates_one_by_one(module, parts):
            raise Unrecognised("its MLP cannot be divided among ranks")
        for each, num_parts in parts.items():
            yield _Product(prefix + each, Axis.OUTPUTS, num_parts=num_parts)
        yield _Product(prefix + _BEHIND_GATES, Axis.INPUTS)


class _Given(nn.Module):
    """A stand-in for a product, with numbers that do not depend on its input."""

    numbers_TN: Tensor

    def forward(self, _: Tensor) -> Tensor:
        return self.numbers_TN


def _takes_gates_one_by_one(mlp: nn.Module, parts: dict[str, int]) -> bool:
    """Compute what stands between products for some gates, and for the first half of them alone."""
    given: dict[str, _Given] = {name: _Given() for name in parts}
    stand_ins: dict[int, Any] = {id(mlp.get_submodule(name)): each for name, each in given.items()}
    stand_ins[id(mlp.get_submodule(_BEHIND_GATES))] = nn.Identity()
    between, generator = deepcopy(mlp, stand_ins), torch.Generator().manual_seed(_SEED)
    numbers = {
        name: 3 * torch.randn((_NUM_TOKENS, num_parts, 2 * _NUM_GATES), generator=generator)
        for name, num_parts in parts.items()
    }
    found = []
    for num_gates in (2 * _NUM_GATES, _NUM_GATES):
        for name, each in given.items():
            each.numbers_TN = numbers[name][..., :num_gates].flatten(1)
        try:
            with torch.inference_mode():
                found.append(between(torch.zeros(_NUM_TOKENS, 1)))
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
            return False
    whole_TN, half_TN = found
    return torch.allclose(whole_TN[:, :_NUM_GATES], half_TN, atol=1e-5)


def _cut_mlp(mlp: GatedMlp, ranks: Ranks) -> tuple[Cut, Cut]:
    place = (ranks.rank, ranks.size)
    return mlp.gate_up.cut(*place, Axis.OUTPUTS), mlp.down.cut(*place, Axis.INPUTS)


def _shard_mlp(mlp: GatedMlp, ranks: Ranks, size_multiple: int) -> GatedMlp:
    """Cut gates with their ups. Raises Unrecognised, or ValueError where codes cannot be cut."""
    num_gates = mlp.gate_up.num_outputs // 2
    if num_gates % (ranks.size * size_multiple):
        raise Unrecognised(
            f"its MLP has {num_gates} gates, no multiple of {ranks.size} ranks times {size_multiple}"
        )
    gates = Segment(num_gates, size_multiple)
    place = (ranks.rank, ranks.size)
    return mlp._replace(
        gate_up=mlp.gate_up.in_segments([gates, gates]).shard(*place, Axis.OUTPUTS),
        down=mlp.down.shard(*place, Axis.INPUTS),
    )


def _check_taken(linear: Linear, taken: TakenWeights) -> Linear:
    """Raise Unrecognised for a part that the kernels cannot multiply by."""
    if not taken.include(linear):
        raise Unrecognised(f"a rank's part of its weights would be {taken.explain(linear)}")
    return linear


def shard_shape(shape: LayerShape, num_ranks: int) -> LayerShape:
    """Count the KV heads of one rank; several ranks share one where there are fewer heads than ranks."""
    if shape.num_heads % num_ranks and num_ranks % shape.num_heads:
        raise Unrecognised(f"its {shape.num_heads} KV heads cannot be divided by {num_ranks}")
    return replace(shape, num_heads=max(1, shape.num_heads // num_ranks))


def shard_layout(layout: BlockLayout, num_ranks: int, longest: int) -> BlockLayout:
    """Divide the KV heads of all layers, in groups for sequences of up to `longest` tokens.

    Raises Unrecognised.
    """
    layers = {key: shard_shape(shape, num_ranks) for key, shape in layout.layers.items()}
    states = {key: shard_state(shape, num_ranks) for key, shape in layout.state_shapes.items()}
    return grouped(replace(layout, layers=layers, state_shapes=states), longest)


class DividedLayout(NamedTuple):
    """The blocks of one rank's heads."""

    all_stages: BlockLayout
    own: BlockLayout
    """Layers of its stage alone."""


def divide_layout(
    layout: BlockLayout, ranks: Ranks, count_head_layers: Callable[[int], float], longest: int
) -> DividedLayout:
    """Keep the heads and layers of one rank, in groups for sequences of up to `longest` tokens.

    Raises StartupError where they cannot be divided.
    """
    if ranks.stage.count > 1:
        ranks.stage = replace(ranks.stage, head_layers=count_head_layers(len(layout.by_layer)))
    try:
        divided = shard_layout(layout, ranks.size, longest)
    except Unrecognised as uneven:
        raise refuse_division(f"--tensor-parallel-size {ranks.size}", str(uneven)) from uneven
    return layout_of_stage(divided, ranks.stage)


def layout_of_stage(layout: BlockLayout, stage: Stage) -> DividedLayout:
    """Keep the layers of a stage. A state takes as many blocks as in the stage that needs most.

    Raises StartupError where a stage would have no layer, or recurrent ones alone where others attend.
    """
    asked, num_layers = f"--pipeline-parallel-size {stage.count}", len(layout.by_layer)
    if stage.count > max(num_layers, 1):
        raise refuse_division(asked, f"it has {num_layers} layers")
    parts = [layout.only(replace(stage, index=each).layers_of(num_layers)) for each in range(stage.count)]
    if layout.layers and not all(part.layers for part in parts):
        raise refuse_division(asked, "a stage would have recurrent layers alone")
    for part in parts:
        check_states(part)
    num_state_blocks = max(part.num_state_blocks for part in parts)
    both = (layout, parts[stage.index])
    return DividedLayout(*(replace(each, least_state_blocks=num_state_blocks) for each in both))


def share_of_node(config: WorkerConfig, layout: BlockLayout, ranks: Ranks) -> float:
    """Count the blocks' bytes that are on this node, of those on all."""
    if config.num_nodes == 1:
        return 1.0
    num_layers, stage = len(layout.by_layer), ranks.stage
    stages = [replace(stage, index=index) for index in stage.node_of(config.num_nodes)]
    own = layout.only(place for each in stages for place in each.layers_of(num_layers))
    nodes_of_a_stage = max(1, config.num_nodes // stage.count)
    return own.block_bytes / layout.block_bytes / nodes_of_a_stage


def bytes_of_a_rank(model: Any, num_ranks: int, stage: Stage = ONLY_STAGE) -> int:
    """Estimate the bytes of a rank's weights, not too low.

    Products, experts and tables of tokens are divided. Keys and values have a head on each rank at least. Of
    tied ends each has its own part, padded to a whole token (vocabulary_shards.py). A stage has no layers of
    another, the embedding only if it is the first, and then whole, and the output layer if it is the last.
    """
    config = model.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_key_value_heads", None) or num_ranks
    ends = embedding, output = (model.get_input_embeddings(), model.get_output_embeddings())
    elsewhere = {embedding} if stage.index else set()
    elsewhere |= set() if stage.is_last else {output}
    layers = list(find_layers(model).values())
    own = stage.layers_of(len(layers))
    for place, layer in enumerate(layers):
        elsewhere |= set() if place in own else set(layer.modules())
    whole = () if stage.is_last else (embedding,)
    seen: set[int] = set()
    num_bytes = 0
    for name, module in model.named_modules():
        if module in elsewhere:
            continue
        for parameter in module.parameters(recurse=False):
            if module in ends or id(parameter) not in seen:
                seen.add(id(parameter))
                is_divided = type(module) in _DIVIDED_MODULES or parameter.dim() > 2
                is_divided &= module not in whole and not name.endswith(_OF_LATENTS)
                is_divided &= f".{INDEXER}." not in name
                of = min(num_ranks, num_heads) if name.endswith(_KEYS_AND_VALUES) else num_ranks
                unit = parameter[0].nbytes if module in ends else 1
                num_bytes += -(-parameter.nbytes // unit // (of if is_divided else 1)) * unit
    return num_bytes


def refuse_division(asked: str, reason: str) -> StartupError:
    """Make the error for a model that cannot be divided; `asked` are the options that ask for it."""
    return StartupError(
        f"{asked} does not fit this model: {reason}",
        fix="ask for a number that divides its heads or its layers, or leave it out (docs/models.md)",
    )


def _shard_call(call: LayerCall, num_query_heads: int, ranks: Ranks) -> LayerCall:
    options = call.options
    if options.sinks is not None:
        first = ranks.rank * num_query_heads
        options = options._replace(sinks=options.sinks[first : first + num_query_heads])
    return replace(call, shape=shard_shape(call.shape, ranks.size), options=options, is_shard=True)
