"""Interface of recurrent layers to the step that is under way, and the shape of their states.

Owns: one form for the recurrences of all families, and the interface of what computes them.

Shapes: T tokens, C channels of a convolution, W its width, H heads, G groups of heads with the same key and
query, K numbers of a key, V numbers of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one layer's state. Those of parts that it does not have are 0."""

    input_dtype: torch.dtype = torch.float32
    """Dtype of a convolution's inputs. States themselves are float32: they are rounded at each token."""
    num_channels: int = 0
    num_columns: int = 0
    """Inputs of each channel of the convolution that later tokens need: its width less 1."""
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class Recurrence(NamedTuple):
    """Inputs of a recurrence. A head's state S is [V, K]; each token changes it and reads it:

    S <- S * exp(log_decay)
    S <- S + (value - S key) * beta x key     with beta, the delta rule
    S <- S + value x key                      without
    out = S query * scaling
    """

    query_TGK: Tensor
    key_TGK: Tensor
    value_THV: Tensor
    log_decay: Tensor
    """float32 [T, H], or [T, H, K] where each number of a key decays by itself."""
    beta_TH: Tensor | None
    has_unit_keys: bool
    """Whether queries and keys are divided by their length first."""
    scaling: float

    def of(self, tokens: slice | Tensor) -> "Recurrence":
        """Select some tokens."""
        return self._replace(
            query_TGK=self.query_TGK[tokens],
            key_TGK=self.key_TGK[tokens],
            value_THV=self.value_THV[tokens],
            log_decay=self.log_decay[tokens],
            beta_TH=None if self.beta_TH is None else self.beta_TH[tokens],
        )


class Convolution(NamedTuple):
    """A convolution of each channel by itself over its last W inputs."""

    input_TC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None
    activation: str | None
    """Name of the function of its outputs, as transformers names it."""

    def of(self, tokens: slice | Tensor) -> "Convolution":
        """Select some tokens."""
        return self._replace(input_TC=self.input_TC[tokens])


class Tap(NamedTuple):
    """Wish for the state of a sequence after some tokens of its share."""

    sequence: int
    """Place among the R sequences of the step."""
    num_tokens: int
    """At least one, at most all of the share."""
    blocks_S: tuple[int, ...]


class StateStep(NamedTuple):
    """Sequences of one step. R of them, with S blocks of states each."""

    num_decodes: int
    """The number of sequences, from the first on, that have one token each."""
    query_starts: NDArray[np.int64]
    """[R + 1]: tokens query_starts[r] to query_starts[r + 1] are those of sequence r."""
    is_first_R: NDArray[np.bool_]
    """Sequences that begin with this step: what their blocks contain is another's."""
    blocks_RS: NDArray[np.int64]
    taps: tuple[Tap, ...] = ()
    num_drafts_R: tuple[int, ...] = ()
    """Tokens at the end of each share that may turn out wrong; empty where no share has any."""
    keeps_states: bool = True
    """Whether blocks take in what is computed; otherwise they stay as they are."""


class StateExecutor(Protocol):
    """Computes the recurrent layers of a step, whose tokens are those of several sequences, side by side."""

    def begin_layer(self, layer_idx: int) -> None:
        """Name the layer that calls from now on."""

    def convolve(self, given: Convolution) -> Tensor | None:
        """Convolve each sequence behind its earlier inputs; [T, C] in the input's dtype.

        None: nothing is kept, and the caller is to compute one sequence from its first token on.
        """

    def recur(self, given: Recurrence) -> Tensor | None:
        """Continue each sequence's recurrence; float32 [T, H, V]. None as in `convolve`."""


class DraftingStates(StateExecutor, Protocol):
    """A StateExecutor whose states take in the drafts of a step once it is known which are right."""

    def begin_step(self, step: StateStep) -> None:
        """Take the sequences of the next calls."""

    def accept_drafts(self, num_right_R: Sequence[int]) -> None:
        """Take in the first drafts of each sequence of the step: their numbers."""
