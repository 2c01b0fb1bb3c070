"""The record of what recurrent layers keep, taken from a real call, so that no configuration key is guessed.

Never: computes: the family's own functions do, for one sequence from its first token on.
"""

from dataclasses import replace

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
