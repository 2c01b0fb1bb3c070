"""Attention without a cache, for one whole sequence, to learn the sizes of layers and the cost of a step.

Owns: the record of each layer's shape, taken from a real call, so that no configuration key is guessed; and
of its largest key and value.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from worker.attention.dense_attention import attend_densely
from worker.attention.interface import SHARED_LAYER, AttentionOptions, StepSpan
from worker.attention.kv_cache import KeptShapes, LayerShape
from worker.states.interface import Convolution, Recurrence, StateShape
from worker.worker_errors import UnsupportedAttention


class ProbeStates:
    """A StateExecutor that notes each layer's shapes."""

    def __init__(self) -> None:
        self.shapes: dict[int, StateShape] = {}
        self._layer_idx = -1

    def begin_layer(self, layer_idx: int) -> None:
        if layer_idx in self.shapes:
            raise UnsupportedAttention(f"a recurrence called twice for layer {layer_idx}")
        self.shapes[layer_idx] = StateShape()
        self._layer_idx = layer_idx

    def convolve(self, given: Convolution) -> None:
        """Note the channels. Raises UnsupportedAttention where none is kept, and for a second call."""
        shape = self.shapes[self._layer_idx]
        if shape.num_channels:
            raise UnsupportedAttention(f"two convolutions of layer {self._layer_idx}")
        num_channels, width = given.weight_CW.shape
        if width == 1:
            raise UnsupportedAttention("a convolution over single tokens")
        self.shapes[self._layer_idx] = replace(
            shape, input_dtype=given.input_TC.dtype, num_channels=num_channels, num_columns=width - 1
        )

    def recur(self, given: Recurrence) -> None:
        """Note the heads. Raises UnsupportedAttention for a second recurrence of a layer."""
        shape = self.shapes[self._layer_idx]
        if shape.num_heads:
            raise UnsupportedAttention(f"two recurrences of layer {self._layer_idx}")
        _, num_heads, value_dim = given.value_THV.shape
        self.shapes[self._layer_idx] = replace(
            shape, num_heads=num_heads, key_dim=given.key_TGK.shape[-1], value_dim=value_dim
        )


class ProbeIndexKeys:
    """The shapes of index keys. See IndexKeys; there is no sequence whose keys are to be chosen."""

    def __init__(self, shapes: dict[int, LayerShape]) -> None:
        self._shapes = shapes
        self.is_asked = False

    def spans(self) -> tuple[StepSpan, ...]:
        return ()

    def write_index(self, layer_idx: int, keys_TD: Tensor) -> None:
        dim = keys_TD.shape[-1]
        self._shapes[layer_idx] = LayerShape(1, dim, dim, value_is_key_part=True)
        self.is_asked = True

    def read_index(self, layer_idx: int, index: int) -> Tensor:
        raise UnsupportedAttention(f"index keys of sequence {index} in layer {layer_idx} of a probe")


class ProbeAttention:
    """A LayerExecutor for a batch that is one sequence from its first token on."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.largest: dict[int, tuple[Tensor, Tensor]] = {}
        """The largest key and value of each layer, on the device."""
        self.states = ProbeStates()
        self.index_keys = ProbeIndexKeys(self.shapes)
        self.together: list[tuple[int, ...]] = []
        """See KeptShapes."""
        self._places: dict[int, tuple[int, ...]] = {}

    @property
    def kept(self) -> KeptShapes:
        layers, states = sorted(self.shapes.items()), sorted(self.states.shapes.items())
        return KeptShapes(dict(layers), dict(states), self.index_keys.is_asked, tuple(self.together))

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend causally and note the layer's shape. Calls with one index have the same keys and values."""
        place = (*_place_of(key), *_place_of(value))
        if self._places.setdefault(layer_idx, place) != place:
            raise UnsupportedAttention(f"attention called twice for layer {layer_idx}")
        num_heads, num_tokens, key_dim = key.shape
        self.shapes[layer_idx] = LayerShape(
            num_heads, key_dim, value.shape[-1], options.lifetime, options.value_is_key_part
        )
        self.largest[layer_idx] = key.detach().abs().amax(), value.detach().abs().amax()
        queries_HGND = query.reshape(num_heads, -1, num_tokens, key_dim)
        return attend_densely(queries_HGND, key, value, options)


class SharingProbe(ProbeAttention):
    """A probe that finds layers which take keys and values of an earlier one.

    For few tokens: it holds them all, so that no two are in one place after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shared: dict[int, int] = {}
        """Layers of which nothing is kept, each with the earlier one."""
        self._held: list[Tensor] = []

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        attended = super().attend(layer_idx, query, key, value, options)
        self._held += [key, value]
        shape = self.shapes[layer_idx]
        first = next(idx for idx, place in self._places.items() if place == self._places[layer_idx])
        if first != layer_idx and self.shapes[first] == shape:
            self.shared[layer_idx] = first
            del self.shapes[layer_idx]
        return attended


def share_layers(model: nn.Module, shared: Mapping[int, int]) -> None:
    """Let attention of some layers go to earlier ones. They write what is there, again."""
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and layer_idx in shared:
            setattr(module, SHARED_LAYER, shared[layer_idx])


def _place_of(tensor: Tensor) -> tuple[int, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.shape, *tensor.stride()
