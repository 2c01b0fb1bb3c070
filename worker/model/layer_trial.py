"""Trial of a model's layers: one of each kind is computed both ways in float32, on numbers of several sizes.

Never: trusts a name: a guess of layer_parts.py counts only after the trial.

Shapes: T tokens, H numbers of a hidden state.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from worker.attention.dense_attention import attend_densely
from worker.attention.interface import AttentionBackend, AttentionOptions, active
from worker.attention.kv_cache import LayerShape
from worker.attention.probe_attention import ProbeIndexKeys, ProbeStates
from worker.attention.trial_step import TRIAL_TOKENS, trial_cache, trial_metadata
from worker.devices.device import Device
from worker.model.layer_call import AngleOrder, LayerCall, Pairing, Rotary
from worker.model.layer_parts import TakenWeights, Unrecognised, find_layers, find_mlp, find_parts
from worker.model.quantized_layers import skipping_products
from worker.model.toolkit import Toolkit
from worker.states.interface import StateShape

# Small numbers pin down the epsilon of norms, which large ones hide.
_SIZES = (1.0, 1e-2)
_TOLERANCE = 1e-4
_SEED = 11


@dataclass(slots=True)
class RecordedCall:
    """One layer's call, as it was recorded."""

    kwargs: dict[str, Any]
    hidden_size: int
    layer_idx: int | None = None
    numbers: set[int] = field(default_factory=set)
    """Numbers under which it keeps something: several where it attends more than once, or has an indexer."""
    shape: LayerShape | None = None
    options: AttentionOptions | None = None
    state: StateShape | None = None
    """State of a layer that called a recurrence."""
    mlp_is_plain: bool = False
    """Whether the MLP was given the hidden state alone, and returned one."""
    linears: list[str] = field(default_factory=list)
    """Names of the plain linear layers that it called: others may be read in another way."""


class _Halve(nn.Module):
    """A stand-in for an MLP that stays: too large to be copied, and the same in both layers of a trial."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


class _Recorder:
    """A LayerExecutor that notes the attention call of each layer, and what it keeps of a recurrence."""

    def __init__(self) -> None:
        self.current: RecordedCall | None = None
        self.states = _RecordedStates(self)
        self.index_keys = _RecordedIndexKeys(self)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        num_heads, num_tokens, key_dim = key.shape
        if self.current is not None:
            self.current.layer_idx = layer_idx
            self.current.numbers.add(layer_idx)
            self.current.shape = LayerShape(
                num_heads, key_dim, value.shape[-1], value_is_key_part=options.value_is_key_part
            )
            self.current.options = options
        return attend_densely(query.reshape(num_heads, -1, num_tokens, key_dim), key, value, options)


class _RecordedStates(ProbeStates):
    """A ProbeStates that notes which layer recurs."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def begin_layer(self, layer_idx: int) -> None:
        super().begin_layer(layer_idx)
        if self._recorder.current is not None:
            self._recorder.current.layer_idx = layer_idx
            self._recorder.current.numbers.add(layer_idx)

    def add_to(self, calls: Iterable[RecordedCall]) -> None:
        """Note the state of each layer that did not attend."""
        for call in calls:
            if call.shape is None and call.layer_idx is not None:
                call.state = self.shapes[call.layer_idx]


class _RecordedIndexKeys(ProbeIndexKeys):
    """A ProbeIndexKeys that notes which layer has an indexer."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__({})
        self._recorder = recorder

    def write_index(self, layer_idx: int, keys_TD: Tensor) -> None:
        super().write_index(layer_idx, keys_TD)
        if self._recorder.current is not None:
            self._recorder.current.numbers.add(layer_idx)


def record_calls(model: Any, device: Device, last_position: int) -> dict[str, RecordedCall]:
    """Call the model once and record the calls of its layers.

    The call is at the last positions: some families weigh queries by position, from some thousand tokens on.

    Layers themselves are not kept: their weights are to be freed as soon as they are replaced.
    """
    recorder, calls, hooks = _Recorder(), {}, []

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor):
            recorder.current = calls[name] = RecordedCall(kwargs, hidden.shape[-1])

    def behind_mlp(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        is_alone = len(args) == 1 and not kwargs and isinstance(output, Tensor)
        if name in calls:
            calls[name].mlp_is_plain = is_alone and output.shape == args[0].shape

    for name, layer in find_layers(model).items():
        hook = layer.register_forward_pre_hook(
            lambda _layer, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
        )
        hooks.append(hook)
        for inner, module in layer.named_modules(prefix=name):
            if type(module) is nn.Linear:
                hook = module.register_forward_hook(
                    lambda *_, name=name, inner=inner: calls[name].linears.append(inner)
                )
                hooks.append(hook)
        mlp = find_mlp(layer)
        if mlp is not None:
            hook = mlp.register_forward_hook(
                lambda _mlp, args, kwargs, output, name=name: behind_mlp(name, args, kwargs, output),
                with_kwargs=True,
            )
            hooks.append(hook)
    try:
        with torch.inference_mode(), active(recorder), skipping_products():
            positions = np.arange(TRIAL_TOKENS) + max(0, last_position - TRIAL_TOKENS + 1)
            model(
                input_ids=device.tensor(np.zeros((1, TRIAL_TOKENS), dtype=np.int64)),
                position_ids=device.tensor(positions[None]),
                use_cache=False,
            )
    finally:
        for hook in hooks:
            hook.remove()
    recorder.states.add_to(calls.values())
    return calls


def kind_of(layer: nn.Module, call: RecordedCall) -> object:
    """Return a key of layers that differ in their weights alone, so that one trial speaks for all."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    settings = tuple(
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if key != "layer_idx" and isinstance(value, str | int | float | bool)
    )
    options = None if call.options is None else call.options._replace(sinks=None)
    rotated = call.kwargs.get("position_embeddings") is not None
    return shapes, settings, call.shape, call.state, options, rotated


def try_layer(layer: nn.Module, call: RecordedCall, toolkit: Toolkit, device: Device) -> str | LayerCall:
    """Compute one layer both ways. Returns the call that was understood, or why the layer must stay."""
    if call.layer_idx is None:
        return "it calls neither attention nor a recurrence"
    if call.options is not None and call.options.lifetime.chunk:
        return "it attends in chunks"
    heads, size_multiple = call.shape or call.state, toolkit.weights.size_multiple
    if heads is not None and (heads.key_dim % size_multiple or heads.value_dim % size_multiple):
        return f"its heads have {heads.key_dim} numbers and {heads.value_dim}"
    error = float("inf")
    try:
        layer = _copy_for_trial(layer, call, toolkit.weights)
        parts = find_parts(layer, toolkit.weights)
        # The trial judges the layer; rounding of weights is the format's own.
        parts = parts.with_linears(lambda linear: linear.dequantized(torch.float32))
        for guess in _guesses(call):
            fused = toolkit.fuse_exactly(parts, guess)
            error = min(error, _error_of(fused, layer, call, _private_backend(guess, toolkit, device)))
            if error <= _TOLERANCE:
                return guess
    except Unrecognised as unusual:
        return str(unusual)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, MemoryError) as error_alone:
        return f"it cannot be computed alone ({type(error_alone).__name__})"
    return f"it computes something else (error {error:.1e})"


def _guesses(call: RecordedCall) -> list[LayerCall]:
    """List the ways in which a layer may use what it is given."""
    assert call.layer_idx is not None
    if call.shape is None or call.options is None:
        options = AttentionOptions(scaling=1.0)
        none = LayerShape(0, 0, 0)
        return [
            LayerCall(layer_idx=call.layer_idx, shape=none, options=options, rotary=None, state=call.state)
        ]
    sinks = None if call.options.sinks is None else call.options.sinks.float()
    return [
        LayerCall(
            layer_idx=call.layer_idx,
            shape=call.shape,
            options=call.options._replace(sinks=sinks),
            rotary=rotary,
        )
        for rotary in _possible_rotaries(call)
    ]


def _copy_for_trial(layer: nn.Module, call: RecordedCall, taken: TakenWeights) -> nn.Module:
    """Copy the layer in float32. Raises Unrecognised."""
    mlp = find_parts(layer, taken).mlp
    if not isinstance(mlp, nn.Module):
        return deepcopy(layer).float()
    if not call.mlp_is_plain:
        raise Unrecognised("its MLP takes or returns more than a hidden state")
    return deepcopy(layer, {id(mlp): _Halve()}).float()


def _possible_rotaries(call: RecordedCall) -> list[Rotary | None]:
    rotation = call.kwargs.get("position_embeddings")
    if not isinstance(rotation, tuple):
        return [None]
    cosines_1TR = rotation[0]
    is_in_pairs = torch.equal(cosines_1TR[..., ::2], cosines_1TR[..., 1::2])
    order = AngleOrder.IN_PAIRS if is_in_pairs else AngleOrder.TWICE
    return [*(Rotary(int(cosines_1TR.shape[-1]), pairing, order) for pairing in Pairing), None]


def _error_of(fused: nn.Module, layer: nn.Module, call: RecordedCall, backend: AttentionBackend) -> float:
    """Return the largest error of any token, over the size of the layer's own addition to it, in float32."""
    kwargs = {name: _as_float(value) for name, value in call.kwargs.items() if name != "hidden_states"}
    generator = torch.Generator().manual_seed(_SEED)
    worst = 0.0
    for scale in _SIZES:
        hidden_1TH = torch.randn((1, TRIAL_TOKENS, call.hidden_size), generator=generator) * scale
        hidden_1TH = hidden_1TH.to(next(layer.parameters()).device)
        with torch.inference_mode():
            with active(_Recorder()):
                expected = layer(hidden_1TH.clone(), **kwargs)
            if not isinstance(expected, Tensor):
                raise Unrecognised(f"it returns a {type(expected).__name__}")
            with active(backend):
                found = fused(hidden_1TH.clone(), **kwargs)
        errors = (found - expected).norm(dim=-1) / (expected - hidden_1TH).norm(dim=-1)
        worst = max(worst, float(errors.max().nan_to_num(torch.inf)))
    return worst


def _private_backend(call: LayerCall, toolkit: Toolkit, device: Device) -> AttentionBackend:
    """Make a backend over a cache for one layer and one sequence, in the middle of its step."""
    layers = {call.layer_idx: call.shape} if call.state is None else {}
    states = {} if call.state is None else {call.layer_idx: replace(call.state, input_dtype=torch.float32)}
    cache = trial_cache(layers, torch.float32, device, states)
    backend = toolkit.attention_over(cache)
    backend.begin_step(trial_metadata(num_state_blocks=cache.layout.num_state_blocks))
    return backend


def _as_float(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple):
        return tuple(_as_float(each) for each in value)
    return value
