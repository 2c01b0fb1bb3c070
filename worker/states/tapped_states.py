"""Copies of states in the middle of a share, for restore points: no step is cut for them.

Owns: the division of a layer's tokens into waves, and the copy of what the layer has written between two.
Never: computes (ref_states.py and its siblings), or chooses a point (scheduler/).

    share of a sequence   | tokens before the point | tokens behind it |
    wave                  | 0, then the copy        | 1                |

Shapes: T tokens of the step, W of a wave, R sequences, S blocks of a state.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.states.interface import Convolution, Recurrence, StateExecutor, StateStep
from worker.states.state_layout import Run, StateLayout


class SteppedStates(StateExecutor, Protocol):
    """A StateExecutor over blocks."""

    def begin_step(self, step: StateStep) -> None:
        """Take the sequences of the next calls."""

    def convolve(self, given: Convolution) -> Tensor:
        """See StateExecutor."""

    def recur(self, given: Recurrence) -> Tensor:
        """See StateExecutor."""


@dataclass(frozen=True, slots=True)
class _Wave:
    step: StateStep
    tokens_W: Tensor
    copies: list[tuple[NDArray[np.int64], tuple[int, ...]]]
    """Blocks of a sequence, and those that its state is copied to behind the wave."""


class TappedStates:
    """A StateExecutor that computes each call in waves. One step at a time."""

    def __init__(self, states: SteppedStates, pool_NE: Tensor, layout: StateLayout) -> None:
        self._states, self._layout = states, layout
        self._bytes_NE = pool_NE.view(torch.uint8)
        self._waves: list[_Wave] = []
        self._layer_idx = -1

    def begin_step(self, step: StateStep) -> None:
        """Take a step, with at most one tap of each place in a share."""
        self._waves = _waves_of(step) if step.taps else []
        self._states.begin_step(step)

    def begin_layer(self, layer_idx: int) -> None:
        self._layer_idx = layer_idx
        self._states.begin_layer(layer_idx)

    def convolve(self, given: Convolution) -> Tensor:
        """See StateExecutor."""
        if not self._waves:
            return self._states.convolve(given)
        out_TC = torch.empty_like(given.input_TC)
        layer = self._layout.layers[self._layer_idx]
        item_bytes = layer.shape.num_columns * layer.shape.input_dtype.itemsize
        for wave in self._waves:
            self._states.begin_step(wave.step)
            found = self._states.convolve(given._replace(input_TC=given.input_TC[wave.tokens_W]))
            out_TC[wave.tokens_W] = found
            self._copy(wave, layer.channels, item_bytes)
        return out_TC

    def recur(self, given: Recurrence) -> Tensor:
        """See StateExecutor."""
        if not self._waves:
            return self._states.recur(given)
        out_THV = torch.empty_like(given.value_THV, dtype=torch.float32)
        layer = self._layout.layers[self._layer_idx]
        for wave in self._waves:
            self._states.begin_step(wave.step)
            found = self._states.recur(given.of(wave.tokens_W))
            out_THV[wave.tokens_W] = found
            self._copy(wave, layer.rows, layer.shape.key_dim * torch.float32.itemsize)
        return out_THV

    def _copy(self, wave: _Wave, runs: tuple[Run, ...], item_bytes: int) -> None:
        for sources_S, targets_S in wave.copies:
            for run in runs:
                place = slice(run.offset, run.offset + run.length * item_bytes)
                source, target = int(sources_S[run.stripe]), targets_S[run.stripe]
                self._bytes_NE[target, place] = self._bytes_NE[source, place]


def _waves_of(step: StateStep) -> list[_Wave]:
    """Cut the shares of a step at its taps; the wave of a part is its number in its share."""
    starts_R, ends_R = step.query_starts[:-1], step.query_starts[1:]
    parts: dict[int, list[tuple[int, int, int]]] = {}
    copies: dict[int, list[tuple[NDArray[np.int64], tuple[int, ...]]]] = {}
    for sequence, (start, end) in enumerate(zip(starts_R.tolist(), ends_R.tolist(), strict=True)):
        own = sorted((tap for tap in step.taps if tap.sequence == sequence), key=lambda tap: tap.num_tokens)
        cuts = [start, *(start + tap.num_tokens for tap in own), end]
        for number, (first, last) in enumerate(pairwise(cuts)):
            if first < last:
                parts.setdefault(number, []).append((sequence, first, last))
        for number, tap in enumerate(own):
            copies.setdefault(number, []).append((step.blocks_RS[sequence], tap.blocks_S))
    return [_wave(step, number, parts[number], copies.get(number, [])) for number in sorted(parts)]


def _wave(
    step: StateStep,
    number: int,
    parts: list[tuple[int, int, int]],
    copies: list[tuple[NDArray[np.int64], tuple[int, ...]]],
) -> _Wave:
    sequences = [sequence for sequence, _, _ in parts]
    part_of_wave = StateStep(
        num_decodes=0 if number else step.num_decodes,
        query_starts=np.cumsum([0, *(last - first for _, first, last in parts)]),
        is_first_R=step.is_first_R[sequences] & (number == 0),
        blocks_RS=step.blocks_RS[sequences],
    )
    tokens_W = torch.cat([torch.arange(first, last) for _, first, last in parts])
    return _Wave(part_of_wave, tokens_W, copies)
