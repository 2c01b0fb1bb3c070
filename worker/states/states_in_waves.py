"""States of a step whose shares are cut for them: at restore points, and before drafts.

Owns: the division of a layer's tokens into waves, the copy of what the layer has written between two, and the
inputs of drafts, which states take in once it is known which of them are right.

    share of a sequence   | tokens before a point | tokens behind it | drafts                    |
    wave                  | 0, then the copy      | 1                | the last: states stay     |

So a draft that is wrong leaves nothing behind, and one that is right is computed twice: its inputs are kept.

Shapes: T tokens of the step, W of a wave, R sequences, S blocks of a state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

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


class _Part(NamedTuple):
    """Tokens of one sequence in a wave."""

    sequence: int
    first: int
    last: int


_Given = TypeVar("_Given", Convolution, Recurrence)
_Copy = tuple[NDArray[np.int64], tuple[int, ...]]
"""Blocks of a sequence, and those that its state is copied to."""


@dataclass(frozen=True, slots=True)
class _Wave:
    step: StateStep
    tokens_W: Tensor
    copies: list[_Copy]
    """Made behind the wave."""


class _Call(NamedTuple):
    """One layer's call with the inputs of all drafts."""

    layer_idx: int
    given: Convolution | Recurrence


class StatesInWaves:
    """DraftingStates that compute each call in waves, where shares are cut, for one step at a time."""

    def __init__(self, states: SteppedStates, pool_NE: Tensor, layout: StateLayout) -> None:
        self._states, self._layout = states, layout
        self._bytes_NE = pool_NE.view(torch.uint8)
        self._step: StateStep
        self._waves: list[_Wave] = []
        self._drafted: list[_Call] = []
        self._layer_idx = -1

    def begin_step(self, step: StateStep) -> None:
        """Take a step, with at most one tap of each place in a share, and none among drafts."""
        self._step = step
        self._waves = _waves_of(step, self._bytes_NE.device) if step.taps or step.num_drafts_R else []
        self._drafted.clear()
        self._states.begin_step(step)

    @property
    def is_cut(self) -> bool:
        """Whether the step has waves; otherwise it may be computed without these calls."""
        return bool(self._waves)

    def begin_layer(self, layer_idx: int) -> None:
        self._layer_idx = layer_idx
        self._states.begin_layer(layer_idx)

    def convolve(self, given: Convolution) -> Tensor:
        if not self._waves:
            return self._states.convolve(given)
        out_TC = torch.empty_like(given.input_TC)
        layer = self._layout.layers[self._layer_idx]
        item_bytes = layer.shape.num_columns * layer.shape.input_dtype.itemsize
        for wave in self._waves:
            part = self._begin(wave, given)
            out_TC[wave.tokens_W] = self._states.convolve(part)
            self._copy(wave, layer.channels, item_bytes)
        return out_TC

    def recur(self, given: Recurrence) -> Tensor:
        if not self._waves:
            return self._states.recur(given)
        out_THV = torch.empty_like(given.value_THV, dtype=torch.float32)
        layer = self._layout.layers[self._layer_idx]
        for wave in self._waves:
            part = self._begin(wave, given)
            out_THV[wave.tokens_W] = self._states.recur(part)
            self._copy(wave, layer.rows, layer.shape.key_dim * torch.float32.itemsize)
        return out_THV

    def accept_drafts(self, num_right_R: Sequence[int]) -> None:
        if not (self._drafted and any(num_right_R)):
            return
        parts, places, end = [], [], 0
        for sequence, (num_drafts, num_right) in enumerate(
            zip(self._step.num_drafts_R, num_right_R, strict=True)
        ):
            if num_right:
                parts.append(_Part(sequence, end, end + num_right))
                places.append(torch.arange(end, end + num_right))
            end += num_drafts
        self._states.begin_step(_step_of(self._step, parts))
        tokens_W = torch.cat(places).to(self._bytes_NE.device)
        for layer_idx, given in self._drafted:
            self._states.begin_layer(layer_idx)
            if isinstance(given, Convolution):
                self._states.convolve(given.of(tokens_W))
            else:
                self._states.recur(given.of(tokens_W))

    def _begin(self, wave: _Wave, given: _Given) -> _Given:
        """Begin a wave, and return its part of a call; that of drafts is kept."""
        self._states.begin_step(wave.step)
        part = given.of(wave.tokens_W)
        if not wave.step.keeps_states:
            self._drafted.append(_Call(self._layer_idx, part))
        return part

    def _copy(self, wave: _Wave, runs: tuple[Run, ...], item_bytes: int) -> None:
        for sources_S, targets_S in wave.copies:
            for run in runs:
                place = slice(run.offset, run.offset + run.length * item_bytes)
                source, target = int(sources_S[run.stripe]), targets_S[run.stripe]
                self._bytes_NE[target, place] = self._bytes_NE[source, place]


def _waves_of(step: StateStep, device: torch.device) -> list[_Wave]:
    """Cut the shares of a step; the wave of a part is its number in its share, that of drafts the last."""
    starts_R, ends_R = step.query_starts[:-1], step.query_starts[1:]
    num_drafts_R = step.num_drafts_R or (0,) * len(starts_R)
    parts: dict[int, list[_Part]] = {}
    copies: dict[int, list[_Copy]] = {}
    drafted: list[_Part] = []
    for sequence, (start, end) in enumerate(zip(starts_R.tolist(), ends_R.tolist(), strict=True)):
        end_known = end - num_drafts_R[sequence]
        own = sorted((tap for tap in step.taps if tap.sequence == sequence), key=lambda tap: tap.num_tokens)
        cuts = [start, *(start + tap.num_tokens for tap in own), end_known]
        for number, (first, last) in enumerate(pairwise(cuts)):
            if first < last:
                parts.setdefault(number, []).append(_Part(sequence, first, last))
        for number, tap in enumerate(own):
            copies.setdefault(number, []).append((step.blocks_RS[sequence], tap.blocks_S))
        if end_known < end:
            drafted.append(_Part(sequence, end_known, end))
    waves = []
    for number in sorted(parts):
        own_step = _step_of(step, parts[number])
        if not number:  # the first tokens of sequences, decodes before all others
            is_first_R = step.is_first_R[[part.sequence for part in parts[number]]]
            own_step = own_step._replace(num_decodes=step.num_decodes, is_first_R=is_first_R)
        waves.append(_Wave(own_step, _tokens_of(parts[number], device), copies.get(number, [])))
    if drafted:
        own_step = _step_of(step, drafted)._replace(keeps_states=False)
        waves.append(_Wave(own_step, _tokens_of(drafted, device), []))
    return waves


def _step_of(step: StateStep, parts: list[_Part]) -> StateStep:
    """Make a step of some parts, none of which begins its sequence."""
    return StateStep(
        num_decodes=0,
        query_starts=np.cumsum([0, *(part.last - part.first for part in parts)]),
        is_first_R=np.zeros(len(parts), np.bool_),
        blocks_RS=step.blocks_RS[[part.sequence for part in parts]],
    )


def _tokens_of(parts: list[_Part], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(part.first, part.last) for part in parts]).to(device)
