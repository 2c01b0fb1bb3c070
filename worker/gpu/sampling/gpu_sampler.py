"""Logits to tokens on a GPU: the tokens of worker/sampling/sampler.py, without waiting for the device.

Owns: the sampling fields of each row, the choice of kernels, and the copies to the host.

    plain rows    logits  ---- within the step, as the end of its graph: draw -->  outcome  --> pinned memory
    other rows    logits  --> copied, masked, edited  ----->  best or draw  ---------^
    asked rows    logits and outcome  --> log-probabilities  -----------------------------> pinned memory

A step samples all rows whose logits are not edited, greedy or not. The others are sampled behind it, into the
same outcome. Logits from elsewhere (tests, a first try) are all sampled in `begin`.
Nothing of this depends on a result, so that a batch without truncation costs one pass over its logits.

Shapes: N positions, F fields of a row, V vocabulary, C rows of the worker, I lines that are reported on, G
tokens that a line's request names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.messages import SamplingParams, TokenLogprobs
from worker.devices.device import Device
from worker.gpu.sampling.logit_edits import EditedRow, LogitsEditor
from worker.gpu.sampling.token_counts import GpuTokenCounts
from worker.gpu.sampling_kernels.token_draw import LogitRows, Workspace, draw, pick_best
from worker.gpu.upload import upload
from worker.ranks.ranks import ALONE, Ranks, is_divided, samples
from worker.sampling.draw_fields import LINE, NOBODY, NUM_FIELDS, PLACE, TOP_K, UNIFORM, draw_fields
from worker.sampling.grammar_rows import Grammars
from worker.sampling.logits import alternatives_of, given_ids_NG, measure_logprobs, write_reports
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.row_sampler import DraftedPlace, LaunchedSample, RowSampler, SampleResult, lines_of
from worker.sampling.state import SamplingRow, uniforms

_NUM_REPORTED = 64
"""Lines at once: their logits are copied as float32, 39 MB at a vocabulary of 151,936."""

_Item = TypeVar("_Item")

_GREEDY = 1
"""The value of top_k for it."""


class _StepDraws(NamedTuple):
    """Sampling of a step that draws tokens itself."""

    draws_NF: NDArray[np.float64]
    not_drawn: list[int]
    """Positions that it leaves to `begin`."""


class GpuSampler(RowSampler):
    """A sampler that launches in `begin`; only the result waits for the device."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        device: Device,
        grammars: Grammars | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Allocate for rows below max_num_seqs. Without `grammars` no row may have one. This is rank 0."""
        super().__init__(vocab_size=vocab_size, grammars=grammars, ranks=ranks)
        self._device = device
        self._counts = GpuTokenCounts(num_rows=max_num_seqs, vocab_size=vocab_size, device=device)
        self._editor = LogitsEditor(
            vocab_size=vocab_size, device=device, grammars=grammars, counts=self._counts
        )
        self._workspace = Workspace.allocate(max_num_seqs, vocab_size, device.torch_device)
        self._outcome_2C = device.zeros(2 * max_num_seqs, torch.int64).view(2, max_num_seqs)
        self._free_results: list[Tensor] = []
        self._draws_CF = np.zeros((max_num_seqs, NUM_FIELDS))
        self._seeds_C = np.zeros(max_num_seqs, np.uint64)
        self._editing: set[int] = set()
        self._asking: set[int] = set()
        self._step: _StepDraws | None = None
        """Set if the next logits are from a step that samples."""

    def add_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """See RowSampler. Raises torch.OutOfMemoryError for the first row that has penalties."""
        self.remove_row(row)
        super().add_row(row, params, token_ids, num_prompt_tokens)
        self._draws_CF[row] = draw_fields(params, self._vocab_size)
        self._seeds_C[row] = params.seed
        if self._rows[row].may_edit:
            self._editing.add(row)
        if params.num_logprobs is not None:
            self._asking.add(row)

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        self._counts.end_row(row)
        self._editing.discard(row)
        self._asking.discard(row)

    def draws_of_step(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Return the fields [N, F] of the step about to be launched; `begin` samples the other rows."""
        states = [self._rows[row] for row in rows]
        draws_NF, not_drawn = self._draws_of(rows, states), self._edited_places(rows, states)
        self._step = _StepDraws(draws_NF, not_drawn)
        if not_drawn:
            draws_NF = draws_NF.copy()
            draws_NF[not_drawn, LINE] = NOBODY
        return draws_NF

    def draw_in_step(self, logits_NV: Tensor, draws_NF: Tensor) -> Tensor:
        """Ask for the tokens of a step, as its last part: they stand in the memory that is returned, [N]."""
        draw(LogitRows(logits_NV, draws_NF), self._outcome_2C, self._workspace)
        return self._outcome_2C[0, : len(draws_NF)]

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype) -> None:
        """Draw once in every way there is, from logits of this type: Triton compiles when it is first asked.

        Raises triton.TritonError where it cannot.
        """
        greedy = SamplingParams(temperature=0.0, num_logprobs=1)
        ways = (greedy, SamplingParams(top_p=0.9))
        penalized = [replace(way, presence_penalty=1.0) for way in ways]
        masked = [replace(way, allowed_token_ids=(0,)) for way in ways]
        logits_NV = torch.arange(self._vocab_size, device=self._device.torch_device).to(dtype).repeat(2, 1)
        for each in (*ways, *penalized, *masked):
            self.add_row(0, each, [0], 1)
            self.sample(logits_NV[:1], [0])
        self.remove_row(0)
        self._counts.release()

    def _begin_counting(
        self, row: int, state: SamplingRow, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self._counts.begin_row(row, state.params, token_ids, num_prompt_tokens)

    def _edited_places(self, rows: Sequence[int], states: Sequence[SamplingRow]) -> list[int]:
        if not self._editing:
            return []
        return [n for n, row in enumerate(rows) if row in self._editing and states[n].edits_logits]

    def _draws_of(self, rows: Sequence[int], states: Sequence[SamplingRow]) -> NDArray[np.float64]:
        chosen_N = np.array(rows, np.int64)
        num_generated = (state.num_generated for state in states)
        draws_NF = self._draws_CF[chosen_N]
        draws_NF[:, LINE] = draws_NF[:, PLACE] = np.arange(len(rows))
        draws_NF[:, UNIFORM] = uniforms(
            self._seeds_C[chosen_N], np.fromiter(num_generated, np.uint64, len(rows))
        )
        return draws_NF

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        step, self._step = self._step, None
        draws_NF, not_drawn = step or _StepDraws(self._draws_of(rows, states), list(range(len(rows))))
        # A token that was learned since may have begun or ended an edit.
        places = not_drawn if step and not self._learners else self._edited_places(rows, states)
        edited = [EditedRow(rows[n], n, states[n]) for n in places]
        if plain := sorted(set(not_drawn).difference(places)):
            self._draw_plain(logits_NV, draws_NF[plain], self._outcome_2C)
        for chunk in _in_chunks(edited, self._editor.num_lines):
            copies = self._editor.edit(logits_NV, chunk, draws_NF)
            self._choose(copies.lines, draws_NF[[each.place for each in chunk]], self._outcome_2C)
            self._editor.count(copies, self._outcome_2C)
        outcome = self._download_outcome()
        asked = [n for n, row in enumerate(rows) if row in self._asking] if self._asking else []
        measures = self._measure(logits_NV, asked, states) if asked else None
        event = self._device.record()

        def collect() -> SampleResult:
            event.wait()
            token_ids, failed = _read(outcome, states)
            logprobs = {} if measures is None else _reports_of(measures, asked, token_ids, states)
            for n in failed:
                logprobs.pop(n, None)
            # Last: should anything above raise, it is asked for again.
            self._free_results.append(outcome)
            return SampleResult(token_ids=token_ids, logprobs=logprobs, failed=failed)

        # The other ranks do not know the tokens that the step itself has sampled.
        is_new = bool(not_drawn) or bool(edited) or is_divided(self._ranks)
        return LaunchedSample(self._outcome_2C[0, : len(rows)], collect, is_new)

    def _sample_guesses(
        self, logits_NV: Tensor, rows: Sequence[int], views: Sequence[SamplingRow]
    ) -> SampleResult:
        """See RowSampler. Logits are not edited: the counts on the device are of sampled tokens."""
        outcome_2C = torch.empty_like(self._outcome_2C)  # that of a step stays as it is
        self._draw_plain(logits_NV, self._draws_of(rows, views), outcome_2C)
        token_ids, failed = _read(outcome_2C.cpu(), views)
        return SampleResult(token_ids=token_ids, logprobs={}, failed=failed)

    def _sample_places(self, logits_NV: Tensor, places: Sequence[DraftedPlace]) -> SampleResult:
        """See RowSampler. The host waits.

        Counts for penalties are of sampled tokens. So a row with penalties is sampled place by place, as long
        as its drafts are right: then its counts are those before the next place. Others are sampled at once.
        """
        found = SampleResult(token_ids=[0] * len(places), logprobs={}, failed={})
        wave = [n for n, each in enumerate(places) if not self._waits(places, n)]
        while wave:
            for some in _in_chunks(wave, self._outcome_2C.shape[1]):
                chosen = [places[n] for n in some]
                lines_NV = lines_of(logits_NV, [each.line for each in chosen])
                self._step = None
                result = self._launch(
                    lines_NV, [each.row for each in chosen], [each.state for each in chosen]
                ).collect()
                for n, token_id in zip(some, result.token_ids, strict=True):
                    found.token_ids[n] = token_id
                found.logprobs.update((some[place], report) for place, report in result.logprobs.items())
                found.failed.update((some[place], reason) for place, reason in result.failed.items())
            wave = [n + 1 for n in wave if self._goes_on(places, n, found)]
        return found

    @staticmethod
    def _waits(places: Sequence[DraftedPlace], n: int) -> bool:
        """Tell whether a place is sampled once the one before it is."""
        return places[n].state.is_penalized and n > 0 and places[n - 1].row == places[n].row

    def _goes_on(self, places: Sequence[DraftedPlace], n: int, found: SampleResult) -> bool:
        """Tell whether the place behind was waiting for this one, whose draft is right."""
        is_right = n not in found.failed and places[n].draft == found.token_ids[n]
        return is_right and self._waits(places, n + 1)

    def _draw_plain(self, logits_NV: Tensor, draws_MF: NDArray[np.float64], outcome_2C: Tensor) -> None:
        [on_device] = upload(self._device, [draws_MF])
        self._choose(LogitRows(logits_NV, on_device), draws_MF, outcome_2C)

    def _choose(self, lines: LogitRows, draws_MF: NDArray[np.float64], outcome_2C: Tensor) -> None:
        """Fill in an outcome; draws_MF has the fields that the host knows."""
        choose = pick_best if (draws_MF[:, TOP_K] == _GREEDY).all() else draw
        choose(lines, outcome_2C, self._workspace)

    def _measure(self, logits_NV: Tensor, places: list[int], states: Sequence[SamplingRow]) -> Tensor:
        """Return the host's memory for the lines of `measure_logprobs` for these places."""
        alternatives = [alternatives_of(states[n].params) for n in places]
        num_top = max(each.num_top for each in alternatives)
        host_arrays = [np.array(places, np.int64), given_ids_NG(alternatives)]
        where_I, given_IG = upload(self._device, host_arrays)
        lines = zip(torch.split(where_I, _NUM_REPORTED), torch.split(given_IG, _NUM_REPORTED), strict=True)
        parts = [
            measure_lines(logits_NV, where, self._outcome_2C[0], num_top, given) for where, given in lines
        ]
        return self._download(torch.cat(parts) if len(parts) > 1 else parts[0])

    def _download(self, tensor: Tensor) -> Tensor:
        """Return the host's copy of `tensor`, complete once an event recorded after this has come."""
        pinned = self._device.pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor, non_blocking=True)
        return pinned

    def _download_outcome(self) -> Tensor:
        """The same for the outcome, into memory that an earlier one was collected from."""
        if not self._free_results:
            return self._download(self._outcome_2C)
        return self._free_results.pop().copy_(self._outcome_2C, non_blocking=True)


def measure_lines(
    logits_NV: Tensor, where_I: Tensor, token_ids_N: Tensor, num_top: int, given_IG: Tensor
) -> Tensor:
    """Measure the log-probabilities of the lines `where_I`, as `measure_logprobs`."""
    logits_IV = logits_NV.index_select(0, where_I).float()
    return measure_logprobs(logits_IV, token_ids_N.index_select(0, where_I), num_top, given_IG)


def _in_chunks(items: list[_Item], size: int) -> Iterator[list[_Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _read(outcome_2C: Tensor, states: Sequence[SamplingRow]) -> tuple[list[int], dict[int, str]]:
    """Read the tokens that were sampled in these states, and the reasons of those that failed, by place."""
    token_ids, has_failed = outcome_2C.numpy()[:, : len(states)].tolist()
    return token_ids, {n: states[n].failure for n, failed in enumerate(has_failed) if failed}


def _reports_of(
    measures_IF: Tensor, places: list[int], token_ids: list[int], states: Sequence[SamplingRow]
) -> dict[int, TokenLogprobs]:
    alternatives = [alternatives_of(states[n].params) for n in places]
    reports = write_reports(measures_IF.numpy(), [token_ids[n] for n in places], alternatives)
    return dict(zip(places, reports, strict=True))


def open_gpu_sampler(
    vocab_size: int, max_num_seqs: int, device: Device, grammars: Grammars, ranks: Ranks
) -> GpuSampler | FollowingSampler:
    """Open the sampler of one rank; its memory is allocated here."""
    if not samples(ranks):
        return FollowingSampler(vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, ranks=ranks)
    return GpuSampler(
        vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, grammars=grammars, ranks=ranks
    )
