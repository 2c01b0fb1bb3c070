"""Sampler in plain torch: one call for all sequences that sample in a step.

Owns: the grouping of rows by the work they need, the check that logits are finite, the division among ranks.
Source: the order of the steps is that of scheduler.messages.SamplingParams.

A token depends on the row's own logits, parameters, seed and history alone: neither neighbours nor
preemption change it. gpu/sampling/gpu_sampler.py samples the same tokens without waiting for its device.

Shapes: N rows, V vocabulary, W vocabulary padded to whole blocks of draw.BLOCK.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from worker.devices.device import Device
from worker.ranks.ranks import ALONE, Ranks
from worker.sampling.draw import BLOCK, Draw, draw, pick_best
from worker.sampling.grammar_rows import Grammars
from worker.sampling.logits import alternatives_of, edit_logits, report_logprobs
from worker.sampling.row_sampler import (
    FAILED,
    DraftedPlace,
    LaunchedSample,
    RowSampler,
    SampleResult,
    lines_of,
)
from worker.sampling.state import SamplingRow, uniforms

_FEW_LINES = 8
"""Lines that one thread looks through as fast as several that have to be woken."""


def divide_lines(states: Sequence[SamplingRow], num_ranks: int) -> list[list[int]]:
    """Divide the rows of a step: each rank gets as many, as far as they are plain, and the first the rest."""
    num_each = len(states) // num_ranks
    plain = [n for n, state in enumerate(states) if state.is_plain]
    others: list[list[int]] = []
    for _ in range(1, num_ranks):
        start = max(0, len(plain) - num_each)
        others.append(plain[start:])
        del plain[start:]
    taken = {n for lines in others for n in lines}
    return [[n for n in range(len(states)) if n not in taken], *others]


class Sampler(RowSampler):
    """RowSampler that computes everything in `begin`; the host waits for the device."""

    def __init__(
        self, *, vocab_size: int, device: Device, grammars: Grammars | None = None, ranks: Ranks = ALONE
    ) -> None:
        """Without `grammars` no row may have one. Of several ranks this is the first."""
        super().__init__(vocab_size=vocab_size, grammars=grammars, ranks=ranks)
        width = -(-vocab_size // BLOCK) * BLOCK
        shape = (device.rows_at_once(width), width)
        self._scratch_NW = torch.empty(shape, dtype=torch.float32, device=device.torch_device)

    def _launch(
        self,
        logits_NV: torch.Tensor,
        rows: Sequence[int],  # noqa: ARG002 - `states` has all of them
        states: Sequence[SamplingRow],
    ) -> LaunchedSample:
        if self._ranks.size == 1:
            result = self.sample_lines(logits_NV, range(len(states)), states)
        else:
            result = self._sample_with_others(logits_NV, states)
        token_ids_N = torch.tensor(result.token_ids, dtype=torch.int64, device=logits_NV.device)
        return LaunchedSample(token_ids_N, lambda: result)

    def _sample_places(self, logits_NV: torch.Tensor, places: Sequence[DraftedPlace]) -> SampleResult:
        """Sample places of drafts, as RowSampler asks; the first rank samples all of them."""
        lines_NV = lines_of(logits_NV, [each.line for each in places])
        return self.sample_lines(lines_NV, range(len(places)), [each.state for each in places])

    def _sample_guesses(
        self,
        logits_NV: torch.Tensor,
        rows: Sequence[int],  # noqa: ARG002 - `views` has all of them
        views: Sequence[SamplingRow],
    ) -> SampleResult:
        return self.sample_lines(logits_NV, range(len(views)), views)

    def _sample_with_others(self, logits_NV: torch.Tensor, states: Sequence[SamplingRow]) -> SampleResult:
        """Sample this rank's rows, and take the tokens that FollowingSamplers draw for the others."""
        own, *others = divide_lines(states, self._ranks.size)
        result = self.sample_lines(logits_NV, own, states)
        if num_most := max(map(len, others), default=0):
            _, *drawn = self._ranks.of_all([0] * num_most).tolist()
            for lines, token_ids in zip(others, drawn, strict=True):
                for n, token_id in zip(lines, token_ids, strict=False):
                    if token_id == FAILED:
                        result.failed[n] = states[n].failure
                    else:
                        result.token_ids[n] = token_id
        return result

    def sample_lines(
        self, logits_NV: torch.Tensor, lines: Sequence[int], states: Sequence[SamplingRow]
    ) -> SampleResult:
        """Sample at some lines, in ascending order; the result has nothing at the others."""
        result = SampleResult(token_ids=[0] * len(states), logprobs={}, failed={})
        if _can_pick(logits_NV, lines, states):
            _pick_lines(logits_NV, lines, states, result)
            return result
        greedy = [n for n in lines if states[n].is_greedy]
        random = [n for n in lines if not states[n].is_greedy]
        for chunk in (*self._in_chunks(greedy), *self._in_chunks(random)):
            self._sample_chunk(logits_NV, chunk, states, result)
        asked = [n for n in lines if states[n].params.num_logprobs is not None]
        for chunk in self._in_chunks([n for n in asked if n not in result.failed]):
            self._report_lines(logits_NV, chunk, states, result)
        return result

    def _in_chunks(self, lines: list[int]) -> Iterator[list[int]]:
        size = len(self._scratch_NW)
        return (lines[start : start + size] for start in range(0, len(lines), size))

    def _load(self, logits: torch.Tensor, lines: list[int]) -> torch.Tensor:
        """Copy `lines` of the logits to scratch memory in float32, padded with -inf, until the next load."""
        loaded_NW = self._scratch_NW[: len(lines)]
        if lines[-1] - lines[0] + 1 == len(lines):
            source = logits[lines[0] : lines[-1] + 1]
        else:
            source = logits[torch.tensor(lines, device=logits.device)]
        loaded_NW[:, : self._vocab_size].copy_(source)
        loaded_NW[:, self._vocab_size :] = -torch.inf
        return loaded_NW

    def _sample_chunk(
        self, logits: torch.Tensor, lines: list[int], states: Sequence[SamplingRow], result: SampleResult
    ) -> None:
        """Fill in `result` for `lines`, which are all greedy or all random."""
        loaded_NW = self._load(logits, lines)
        # NaN and +inf both surface in the maximum, and so does a row of nothing but -inf.
        peak_N = loaded_NW.amax(-1)
        is_sound_N = peak_N.isfinite()
        chosen = [states[n] for n in lines]
        if any(state.edits_logits for state in chosen):
            if self._grammars is not None:
                # First: whether a text is complete decides whether it may end before its minimum length.
                self._grammars.mask(loaded_NW, [state.grammar for state in chosen])
            edit_logits(loaded_NW, chosen)
            # The first check stands: a ban may have hidden the fault.
            peak_N = loaded_NW.amax(-1)
            is_sound_N &= peak_N.isfinite()
        is_sound = is_sound_N.tolist()
        if not all(is_sound):
            for n, sound in zip(lines, is_sound, strict=True):
                if not sound:
                    result.failed[n] = states[n].failure
            lines = [n for n, sound in zip(lines, is_sound, strict=True) if sound]
            chosen = [states[n] for n in lines]
            loaded_NW, peak_N = loaded_NW[is_sound_N], peak_N[is_sound_N]
            if not lines:
                return
        tokens = pick_best(loaded_NW) if chosen[0].is_greedy else draw(loaded_NW, peak_N, _draws_of(chosen))
        for n, token_id in zip(lines, tokens, strict=True):
            result.token_ids[n] = token_id

    def _report_lines(
        self, logits: torch.Tensor, lines: list[int], states: Sequence[SamplingRow], result: SampleResult
    ) -> None:
        alternatives = [alternatives_of(states[n].params) for n in lines]
        token_ids = [result.token_ids[n] for n in lines]
        report = report_logprobs(self._load(logits, lines), token_ids, alternatives)
        result.logprobs.update(zip(lines, report, strict=True))


def _draws_of(states: Sequence[SamplingRow]) -> list[Draw]:
    """Return the draw of the next token of each row: of its seed and the number generated alone."""
    seeds_N = np.array([state.params.seed for state in states], np.uint64)
    indices_N = np.array([state.num_generated for state in states], np.uint64)
    numbers = uniforms(seeds_N, indices_N).tolist()
    return [Draw(state.params, number) for state, number in zip(states, numbers, strict=True)]


def _can_pick(logits_NV: torch.Tensor, lines: Sequence[int], states: Sequence[SamplingRow]) -> bool:
    """Tell whether the highest logit is all that is asked of a few lines on the host."""
    return (
        len(lines) <= _FEW_LINES
        and logits_NV.device.type == "cpu"
        and logits_NV.dtype is torch.float32
        and all(
            states[n].is_greedy and not states[n].edits_logits and states[n].params.num_logprobs is None
            for n in lines
        )
    )


def _pick_lines(
    logits_NV: torch.Tensor, lines: Sequence[int], states: Sequence[SamplingRow], result: SampleResult
) -> None:
    """Fill in `result` for greedy lines, as `pick_best` would, by two calls a line.

    A dozen operators of torch, and the threads that they wake, take longer than a layer of a small model: a
    step has read more than caches hold, so that their code comes from memory.
    """
    logits = logits_NV.numpy()
    for n in lines:
        token_id = int(logits[n].argmax())  # the first of equals; of a line with NaN, the first of these
        if math.isfinite(logits[n, token_id]):
            result.token_ids[n] = token_id
        else:
            result.failed[n] = states[n].failure
