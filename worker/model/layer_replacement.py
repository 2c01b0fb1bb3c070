"""Replacement of a model's layers by fused ones, where they compute the same.

Owns: the order of it, and the report: a layer that differs in its trial stays as it was, and the report says
why.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from worker.devices.device import Device
from worker.devices.weight_life import lent_to
from worker.machine import trim_heaps
from worker.model.body import whole_body_of
from worker.model.layer_call import LayerCall
from worker.model.layer_parts import Unrecognised, find_mlp, find_parts
from worker.model.layer_shards import Pack, can_shard_own, shard_layer, shard_own_layer, shard_own_mlp
from worker.model.layer_trial import RecordedCall, kind_of, record_calls, try_layer
from worker.model.linear import Axis, Linear
from worker.model.mixture import ReplacedExperts
from worker.model.stage_layers import EdgeLayer, PassedLayer, drop_ends
from worker.model.toolkit import Toolkit
from worker.ranks.ranks import ALONE, Ranks, is_divided
from worker.ranks.stage import Stage


@dataclass(slots=True)
class LayerReplacement:
    """Report of the layers that were replaced, and of the reasons why others were not."""

    kernels: str
    fused: str = "fused"
    num_layers: int = 0
    num_fused: int = 0
    num_cut: int = 0
    """Layers that stayed, and of which each rank has a part."""
    numbers: set[int] = field(default_factory=set)
    """Numbers under which the layers that this rank has, or its part of them, keep something."""
    is_one_call: bool = False
    """Whether one call computes all layers."""
    num_kept_mlps: int = 0
    """Fused layers in which the MLP's module stayed as it was."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons why layers stayed as they were."""
    experts: ReplacedExperts = field(default_factory=ReplacedExperts)

    kept_linears: list[str] = field(default_factory=list)
    """Names of the linear layers of layers that stayed as they were."""
    is_hybrid: bool = False
    """Whether some layer that stays did not call attention, or keeps latents: products of such are packed."""

    def keep(self, call: RecordedCall, reason: str) -> None:
        """Note a layer that stays as it was."""
        self.reasons[reason] += 1
        self.kept_linears += call.linears
        self.is_hybrid |= call.shape is None or call.shape.value_is_key_part

    def count(self, *, is_fused: bool) -> None:
        """Note a layer that some rank computes: a fused one, or its part of one that stays."""
        self.num_fused += is_fused
        self.num_cut += not is_fused

    def describe(self) -> str:
        """Return one line for a person."""
        said = f"{self.kernels} kernels: {self.num_fused} of {self.num_layers} layers {self.fused}"
        if self.num_kept_mlps:
            said += f" ({self.num_kept_mlps} but for their MLPs)"
        if self.num_cut:
            said += f", {self.num_cut} divided as they are"
        if self.experts.num_found:
            said += f", and the experts of {self.experts.num_replaced} of {self.experts.num_found}"
        if self.is_one_call:
            said += ", all by one call"
        all_reasons = self.reasons + self.experts.reasons
        reasons = "; ".join(f"{reason} ({count})" for reason, count in all_reasons.items())
        return f"{said}; as they were: {reasons}" if reasons else said


def replace_layers(
    model: Any,
    toolkit: Toolkit,
    device: Device,
    *,
    max_model_len: int,
    ranks: Ranks = ALONE,
    free_taken: Callable[[], None] = trim_heaps,
) -> LayerReplacement:
    """Replace the layers that pass their trial. They compute the same up to `max_model_len` tokens.

    The trial is of whole layers; on several ranks each is then replaced by this rank's shard of it. Weights
    move: `free_taken` is called before each layer, to give back those of the layers before.
    """
    done = LayerReplacement(toolkit.name, toolkit.fused)
    verdicts: dict[object, str | LayerCall] = {}
    calls = record_calls(model, device, max_model_len - 1)
    stage_places = ranks.stage.layers_of(len(calls))
    for place, (name, call) in enumerate(calls.items()):
        done.num_layers += 1
        layer = model.get_submodule(name)
        free_taken()  # of the layers before
        kind = kind_of(layer, call)
        if kind not in verdicts:
            with lent_to(device.torch_device, layer):
                verdicts[kind] = try_layer(layer, call, toolkit, device)
        verdict = verdicts[kind]
        is_fused = isinstance(verdict, LayerCall)
        if not (is_fused or (is_divided(ranks) and can_shard_own(layer))):
            done.keep(call, str(verdict))
            continue
        if place not in stage_places:
            _replace_layer(model, name, PassedLayer())
            done.count(is_fused=is_fused)  # by the stage that has it
            continue
        try:
            with lent_to(device.torch_device, layer):
                own = _own_part(model, name, call, verdict, toolkit, ranks)
        except Unrecognised as undivided:
            done.reasons[str(undivided)] += 1
            continue
        done.num_kept_mlps += is_fused and find_mlp(own) is not None
        _replace_layer(model, name, _at_edge(own, ranks.stage, place, stage_places))
        done.count(is_fused=is_fused)
        done.numbers |= call.numbers
    if ranks.stage.count > 1:
        drop_ends(model, ranks.stage)
    _replace_others(model, toolkit, max_model_len, done)
    return done


def _replace_others(model: Any, toolkit: Toolkit, max_model_len: int, done: LayerReplacement) -> None:
    if done.is_hybrid:
        toolkit.replace_linears(model, done.kept_linears)
    done.experts = toolkit.replace_others(model, max_model_len)
    done.is_one_call = whole_body_of(model) is not None


def _own_part(
    model: Any, name: str, call: RecordedCall, verdict: str | LayerCall, toolkit: Toolkit, ranks: Ranks
) -> nn.Module:
    """Make a rank's part of a layer: a fused one, or of one that stays. Raises Unrecognised."""
    layer: nn.Module = model.get_submodule(name)

    def pack(shard: Linear, axis: Axis) -> nn.Module:
        return toolkit.pack_shard(shard, axis, model.dtype)

    if isinstance(verdict, LayerCall):
        return _fuse(layer, verdict, call, toolkit, ranks, pack)
    if toolkit.device_kind != "CPU":
        raise Unrecognised("layers that stay are divided on CPUs only")
    if ranks.size > 1:
        shard_own_layer(layer, ranks, pack)
    toolkit.replace_linears(model, call.linears)
    return layer


def _fuse(
    layer: nn.Module, guess: LayerCall, recorded: RecordedCall, toolkit: Toolkit, ranks: Ranks, pack: Pack
) -> nn.Module:
    """Make a rank's shard of a layer. Raises Unrecognised."""
    assert recorded.layer_idx is not None
    call = replace(guess, layer_idx=recorded.layer_idx, options=recorded.options or guess.options)
    parts = toolkit.round_weights(find_parts(layer, toolkit.weights))
    own = shard_layer(parts, call, ranks, toolkit.weights)
    if ranks.size > 1 and isinstance(parts.mlp, nn.Module):
        shard_own_mlp(parts.mlp, ranks, pack)
    return toolkit.fuse(*own)


def _at_edge(layer: nn.Module, stage: Stage, place: int, places: range) -> nn.Module:
    inlet = stage.inlet if place == places[0] else None
    outlet = stage.outlet if place == places[-1] else None
    return layer if inlet is None and outlet is None else EdgeLayer(layer, inlet, outlet)


def _replace_layer(model: Any, name: str, fused: nn.Module) -> None:
    parent_name, _, child = name.rpartition(".")
    old = model.get_submodule(name)
    # Models ask their layers for such things as the kind of attention.
    for key, value in vars(old).items():
        if not key.startswith("_") and isinstance(value, str | int | float | bool):
            setattr(fused, key, value)
    fused.eval()
    setattr(model.get_submodule(parent_name), child, fused)
