"""Attention without a cache, for one whole sequence, to learn the sizes of layers and the cost of a step.

Owns: the record of each layer's shape, taken from a real call, so that no configuration key is guessed; and
of its largest key and value.
Never: runs in a served step.
"""

from typing import NamedTuple

from torch import Tensor

from worker.attention.dense_attention import attend_densely
from worker.attention.interface import AttentionOptions, StepSpan
from worker.attention.kv_cache import LayerShape
from worker.states.interface import StateShape
from worker.states.probe_states import ProbeStates
from worker.worker_errors import UnsupportedAttention


class KeptShapes(NamedTuple):
    """Shapes of all that the layers of a model keep of a sequence, in the order of their numbers."""

    layers: dict[int, LayerShape]
    """With those of the keys of indexers behind them."""
    states: dict[int, StateShape]
    has_index_keys: bool


class ProbeIndexKeys:
    """The shapes of index keys. See IndexKeys; there is no sequence whose keys are to be chosen."""

    def __init__(self, shapes: dict[int, LayerShape]) -> None:
        self._shapes = shapes
        self.is_asked = False

    def spans(self) -> tuple[StepSpan, ...]:
        """See IndexKeys."""
        return ()

    def write_index(self, layer_idx: int, keys_TD: Tensor) -> None:
        """See IndexKeys."""
        dim = keys_TD.shape[-1]
        self._shapes[layer_idx] = LayerShape(1, dim, dim, value_is_key_part=True)
        self.is_asked = True

    def read_index(self, layer_idx: int, index: int) -> Tensor:
        """See IndexKeys."""
        raise UnsupportedAttention(f"index keys of sequence {index} in layer {layer_idx} of a probe")


class ProbeAttention:
    """A LayerExecutor for a batch that is one sequence from its first token on."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}
        """The largest key and value of each layer, on the device."""
        self.states = ProbeStates()
        self.index_keys = ProbeIndexKeys(self.shapes)

    @property
    def kept(self) -> KeptShapes:
        layers, states = sorted(self.shapes.items()), sorted(self.states.shapes.items())
        return KeptShapes(dict(layers), dict(states), self.index_keys.is_asked)

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend causally and note the layer's shape. Two calls with one index cannot share one cache."""
        if layer_idx in self.shapes:
            raise UnsupportedAttention(f"attention called twice for layer {layer_idx}")
        num_heads, num_tokens, key_dim = key.shape
        self.shapes[layer_idx] = LayerShape(
            num_heads, key_dim, value.shape[-1], options.reach.lifetime, options.value_is_key_part
        )
        self.largest[layer_idx] = key.detach().abs().amax(), value.detach().abs().amax()
        queries_HGND = query.reshape(num_heads, -1, num_tokens, key_dim)
        return attend_densely(queries_HGND, key, value, options)
