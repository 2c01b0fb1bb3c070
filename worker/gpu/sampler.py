"""Logits to tokens on a GPU: the tokens of worker/sampler.py, asked for without waiting for anything.

Owns: what goes up to the device in a step, which kernels are asked, and what comes down again.
Never: the state of rows (row_sampler.py), or how a token is drawn (kernels/sampling.py).

    plain rows    logits  --------------------------------->  best or draw  -->  outcome  --> pinned memory
    other rows    logits  --> copied, masked, edited  ----->  best or draw  ----^
    asked rows    logits and outcome  --> log-probabilities  -------------------------------> pinned memory

Nothing of this depends on a result, so that a batch in which nobody truncates costs what it reads.

Shapes: N positions, M rows at work, F fields of a row, V vocabulary, I lines that are reported on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.device import Device
from worker.draw import LEAST_TOP_P
from worker.gpu.edits import EditedLogits, LogitsEditor
from worker.gpu.kernels import weights
from worker.gpu.kernels.sampling import Lines, Workspace, draw, pick_best
from worker.gpu.upload import upload
from worker.grammar import Grammars
from worker.logits import measure_logprobs, write_reports
from worker.row_sampler import RowSampler, SampleResult
from worker.sampling_state import SamplingRow, uniforms

_NUM_REPORTED = 32
"""Lines at once: their logits are copied as float32."""


class GpuSampler(RowSampler):
    """Asks for tokens in `begin`; only the result waits for the device."""

    def __init__(self, *, vocab_size: int, device: Device, grammars: Grammars | None = None) -> None:
        """Without `grammars` no row may have one."""
        super().__init__(vocab_size=vocab_size, grammars=grammars)
        self._device = device
        self._editor = LogitsEditor(vocab_size=vocab_size, device=device, grammars=grammars)
        self._workspace = Workspace.allocate(1, vocab_size, device.torch_device)

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
        for rows in ([greedy], ways, [penalized[0]], penalized, [masked[0]], masked):
            states = [
                SamplingRow(params, [0], num_prompt_tokens=1, vocab_size=self._vocab_size) for params in rows
            ]
            self._draw(logits_NV[: len(rows)], states)[1]()

    def _draw(
        self, logits_NV: Tensor, states: Sequence[SamplingRow]
    ) -> tuple[Tensor, Callable[[], SampleResult]]:
        outcome_2N = torch.empty((2, len(states)), dtype=torch.int64, device=logits_NV.device)
        edits = [state.edits_logits for state in states]
        plain = [n for n, edit in enumerate(edits) if not edit]
        if plain:
            self._choose(logits_NV, plain, plain, states, outcome_2N)
        for places in _in_chunks([n for n, edit in enumerate(edits) if edit], self._editor.num_lines):
            edited = self._editor.edit(logits_NV, places, [states[n] for n in places])
            self._choose(edited, list(range(len(places))), places, states, outcome_2N)
        outcome = self._download(outcome_2N)
        asked = [n for n, state in enumerate(states) if state.params.num_logprobs is not None]
        measured = [
            (places, self._download(self._measure(logits_NV, places, states, outcome_2N[0])))
            for places in _in_chunks(asked, _NUM_REPORTED)
        ]
        event = self._device.record()

        def collect() -> SampleResult:
            event.wait()
            return _result_of(outcome, measured, states)

        return outcome_2N[0], collect

    def _choose(
        self,
        source: Tensor | EditedLogits,
        lines: Sequence[int],
        places: Sequence[int],
        states: Sequence[SamplingRow],
        outcome_2N: Tensor,
    ) -> None:
        """Fill in the outcome of `places` from these lines of `source`."""
        chosen = [states[n] for n in places]
        table = np.zeros((len(places), weights.NUM_FIELDS))
        table[:, weights.LINE] = lines
        table[:, weights.PLACE] = places
        table[:, weights.TOP_K] = 1
        drawn = [m for m, state in enumerate(chosen) if not state.is_greedy]
        if drawn:
            _fill_in_draws(table, drawn, chosen, vocab_size=self._vocab_size)
        [rows_MF] = upload(self._device, [table])
        work = self._workspace_for(len(places))
        logits_LV, faults_MS = (source, None) if isinstance(source, Tensor) else source
        choose = draw if drawn else pick_best
        choose(Lines(logits_LV, rows_MF, faults_MS), outcome_2N, work)

    def _workspace_for(self, num_rows: int) -> Workspace:
        if num_rows > len(self._workspace.maxima_MB):
            self._workspace = Workspace.allocate(num_rows, self._vocab_size, self._device.torch_device)
        return self._workspace

    def _measure(
        self, logits_NV: Tensor, places: list[int], states: Sequence[SamplingRow], token_ids_N: Tensor
    ) -> Tensor:
        [where_I] = upload(self._device, [np.array(places, np.int64)])
        num_top = max(states[n].params.num_logprobs or 0 for n in places)
        logits_IV = logits_NV.index_select(0, where_I).float()
        return measure_logprobs(logits_IV, token_ids_N.index_select(0, where_I), num_top)

    def _download(self, tensor: Tensor) -> Tensor:
        """Where `tensor` will be on the host, once an event recorded after this has come."""
        pinned = self._device.pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor, non_blocking=True)
        return pinned


def _in_chunks(places: list[int], size: int) -> Iterator[list[int]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def _fill_in_draws(
    table: np.ndarray[tuple[int, int], np.dtype[np.float64]],
    drawn: list[int],
    states: Sequence[SamplingRow],
    *,
    vocab_size: int,
) -> None:
    """Parameters of the rows that are not greedy."""
    chosen = [states[m] for m in drawn]
    seeds_N = np.array([state.params.seed for state in chosen], np.uint64)
    indices_N = np.array([state.num_generated for state in chosen], np.uint64)
    table[drawn, weights.UNIFORM] = uniforms(seeds_N, indices_N)
    parameters = [state.params for state in chosen]
    table[drawn, weights.TEMPERATURE] = [each.temperature for each in parameters]
    table[drawn, weights.MIN_P] = [each.min_p for each in parameters]
    # As many as there are is no truncation.
    table[drawn, weights.TOP_K] = [each.top_k if 0 < each.top_k < vocab_size else 0 for each in parameters]
    table[drawn, weights.TOP_P] = [max(each.top_p, LEAST_TOP_P) for each in parameters]


def _result_of(
    outcome: Tensor, measured: list[tuple[list[int], Tensor]], states: Sequence[SamplingRow]
) -> SampleResult:
    token_ids, has_failed = outcome.tolist()
    result = SampleResult(
        token_ids=token_ids,
        logprobs={},
        failed={n: states[n].failure for n, failed in enumerate(has_failed) if failed},
    )
    for places, measures in measured:
        num_top = [states[n].params.num_logprobs or 0 for n in places]
        reports = write_reports(measures.tolist(), [token_ids[n] for n in places], num_top)
        result.logprobs.update(
            (n, report) for n, report in zip(places, reports, strict=True) if n not in result.failed
        )
    return result
