"""A step on a GPU, launched by the host without waiting for anything.

Owns: the order of a step on the device (bring new blocks into tables, fill in tokens that the host does
not know, attention's batch, the model, the logits, sampling, the last token of each row), and the choice
between a captured graph and a launch kernel by kernel.

Shapes: T tokens, N logits wanted, V vocabulary, C rows of the worker and one more of no sequence, F fields
of a row's sampling.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.interface import SeenPictures, note_layers_begun
from worker.devices.device import Device
from worker.gpu.attention import PagedAttention
from worker.gpu.device_batch import DeviceBatch
from worker.gpu.graphs import GraphSizes, StepGraphs, capture_all
from worker.gpu.kernels.input_fill import change_tables, fill_unknown_tokens, remember_tokens
from worker.gpu.step_buffers import BatchSizes, StepBuffers
from worker.gpu.trials.launch_trial import EARLY, WARM, WHOLE, StepOnTrial, Way, count_gains
from worker.ranks.ranks import ALONE, Ranks, is_divided
from worker.sampling.draw_fields import no_draws
from worker.states.interface import StateStep
from worker.steps.inputs import StepInputs
from worker.steps.model_runner import ModelRunner, StepRunner
from worker.steps.tokens import PlacedRows, StepOutcome

_TRIED_CONTEXT = 1024
_TRIED_ROWS = (1, 16, 64, 256)


class StepSampler(Protocol):
    """The sampler, as a step calls it."""

    def draws_of_step(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Return the sampling fields [N, F] of these rows in the step that is about to be launched."""

    def draw_in_step(self, logits_NV: Tensor, draws_NF: Tensor) -> Tensor:
        """Launch the sampling of a step, without waiting; returns the memory for its tokens, [N]."""


class GpuSteps(StepRunner):
    """A StepRunner that launches and does not wait. Steps share their memory, one after the other."""

    _backend: PagedAttention

    def __init__(
        self,
        runner: ModelRunner,
        backend: PagedAttention,
        device: Device,
        buffers: StepBuffers,
        sampler: StepSampler,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(runner, backend, device)
        self._buffers = buffers
        self._sampler = sampler
        self._ranks = ranks
        self._logits_NV: Tensor
        self._last_token_C = device.zeros(buffers.limits.num_sequences + 1, torch.int64)
        self._graphs = StepGraphs()
        self._rows_N: Tensor
        self._rows_of: dict[BatchSizes, Tensor] = {}
        self._num_replayed = self._num_eager = self._num_padding = 0
        self._warm_up()

    def capture(self, sizes: GraphSizes, logits_NV: Tensor) -> None:
        """Capture as many sizes as fit into memory. Steps that fit into them are replayed from then on.

        Each graph leaves its logits in `logits_NV`. Kernels of decodes are launched early up to the largest
        size for which a trial says so; together with kernels of NCCL they are not.
        """
        self._logits_NV = logits_NV
        is_alone = not is_divided(self._ranks)
        largest = sizes.decodes[-1]
        tried = [each for each in sizes.decodes if each.num_decodes in _TRIED_ROWS or each is largest]
        most_by_way: list[tuple[int, Way]] = []
        for usual, candidate in ((WHOLE, EARLY), (EARLY, WARM)) if is_alone else ():
            num_faster = count_gains(map(self._on_trial, tried), self._device, usual, candidate)
            tried = tried[:num_faster]
            most_by_way.insert(0, (tried[-1].num_decodes if tried else 0, candidate))

        def work_on(each: BatchSizes) -> "_Work":
            self._buffers.fill_with_padding(each)
            batch = self._buffers.view(each)
            self._rows_of[each] = batch.rows_N
            fitting = (way for most, way in most_by_way if 0 < each.num_decodes <= most)
            return _Work(self, batch, each, next(fitting, WHOLE))

        self._graphs = capture_all(sizes, work_on, self._device, must_have_all=not is_alone)

    def compute(self, inputs: StepInputs) -> StepOutcome:
        is_of_graphs = not inputs.keeps_hidden and inputs.placed is None
        captured = self._graphs.find(inputs) if is_of_graphs else None
        if captured is None:
            batch = self._begin(inputs)
            outcome = self._forward(batch, inputs.placed)
            if not inputs.has_drafts:
                self.draw(outcome.logits_NV, batch)
            return outcome
        self._buffers.fill(inputs, self._draws_of(inputs), captured.sizes)
        self._rows_N = self._rows_of[captured.sizes]
        with self._ranks.stage.around_graph(captured.sizes.num_tokens):
            captured.graph.replay()
        note_layers_begun(captured.num_layers)
        self._num_replayed += 1
        self._num_padding += captured.sizes.num_tokens - len(inputs.input_ids_T)
        return StepOutcome(self._logits_NV[: len(inputs.logits_indices_N)])

    @torch.inference_mode()
    def remember(self, token_ids_N: Tensor) -> None:
        """See StepRunner. On several ranks they are those of rank 0; stages learn them with a later plan."""
        if self._ranks.stage.count > 1:
            return
        self._ranks.share(token_ids_N)
        remember_tokens(self._last_token_C, self._rows_N, token_ids_N)

    def describe(self) -> str:
        return (
            f"{self._num_replayed} steps were replayed from CUDA graphs, with {self._num_padding} tokens of "
            f"padding; {self._num_eager} were not"
        )

    def compute_into_graphs_memory(self, batch: DeviceBatch) -> Tensor:
        """Compute a batch. Its logits go to the memory for graphs."""
        logits_NV = self._logits_NV[: len(batch.tokens.logits_indices_N)]
        with self._runner.logits_into(logits_NV):
            found_NV = self._forward(batch).logits_NV
        if self._ranks.stage.is_last and found_NV.data_ptr() != logits_NV.data_ptr():
            logits_NV.copy_(found_NV)
        return logits_NV

    def _on_trial(self, sizes: BatchSizes) -> StepOnTrial:
        """Make a step of decodes whose contexts are block 0 again and again, which is no sequence's.

        One writes its token, to its first place: products may end otherwise for one row than for another, and
        it would not be known whose keys are read. Attention has parts to add up, as in service.
        """
        batch = self._buffers.view(sizes)

        @torch.inference_mode()
        def fill(token_id: int) -> None:
            self._buffers.fill_with_padding(sizes)
            attention = batch.attention
            starts_R = attention.query_starts_R
            starts_R.copy_(torch.arange(len(starts_R), device=starts_R.device))
            attention.seq_lens_R.fill_(min(_TRIED_CONTEXT, sizes.max_seq_len))
            attention.slots_ST.fill_(-1)
            attention.slots_ST[:, :1].zero_()
            batch.tokens.input_ids_1T.fill_(token_id)

        logits_NV = self._logits_NV[: sizes.num_logits]
        return StepOnTrial(fill, _Work(self, batch, sizes, WHOLE), logits_NV)

    def _begin(self, inputs: StepInputs) -> DeviceBatch:
        """Fill in a step without padding."""
        self._num_eager += 1
        sizes = sizes_of(inputs)
        self._buffers.fill(inputs, self._draws_of(inputs), sizes)
        batch = self._buffers.view(sizes)
        self._rows_N = batch.rows_N
        attention = batch.attention._replace(cut_states=inputs.metadata.cut_states)
        tokens = batch.tokens._replace(keeps_hidden=inputs.keeps_hidden)
        if inputs.position_ids_T.ndim > 1:
            tokens = tokens._replace(position_ids=self._device.tensor(inputs.position_ids_T[:, None]))
        return batch._replace(
            attention=attention.with_pictures(inputs.metadata.pictures, self._device), tokens=tokens
        )

    def _draws_of(self, inputs: StepInputs) -> NDArray[np.float64]:
        """Return the sampling fields of a step; with drafts it samples nothing itself."""
        if inputs.has_drafts:
            return no_draws(len(inputs.logits_indices_N))
        return self._sampler.draws_of_step(inputs.rows)

    @torch.inference_mode()
    def _forward(self, batch: DeviceBatch, placed: PlacedRows | None = None) -> StepOutcome:
        change_tables(batch.changes, batch.attention.block_tables_SCB)
        fill_unknown_tokens(batch.tokens.input_ids_1T, batch.rows_T, self._last_token_C)
        self._backend.begin_batch(batch.attention)
        self._runner.note_rows(batch.rows_T)
        outcome = self._runner.forward_placed(batch.tokens, placed, self._backend)
        self._runner.note_hidden(outcome.hidden, batch.attention.slots_ST)
        return outcome

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """Compile now, with steps of padding, and not in the middle of service.

        Attention's lists have one variant for steps of decodes alone, and one for others.
        """
        largest = self._buffers.limits.num_tokens
        for sizes in (BatchSizes(1, 1, 1, 1, 1, 1), BatchSizes(min(2, largest), 1, 1, 0, min(2, largest), 2)):
            self._buffers.fill_with_padding(sizes)
            batch = self._buffers.view(sizes)
            self._forward(batch)
        if self._runner.eyes is not None and self._runner.eyes.seen_in_windows_only is not None:
            seen = SeenPictures(np.full(sizes.num_tokens, sizes.num_tokens), in_windows_only=False)
            self._forward(batch._replace(attention=batch.attention.with_pictures(seen, self._device)))
        num_state_blocks = self._buffers.limits.num_state_blocks
        if num_state_blocks and self._buffers.limits.max_drafts:  # which leave states as they are
            blocks_RS, starts = np.zeros((1, num_state_blocks), np.int64), np.array([0, sizes.num_tokens])
            cut = StateStep(0, starts, np.ones(1, np.bool_), blocks_RS, num_drafts_R=(1,))
            self._forward(batch._replace(attention=batch.attention._replace(cut_states=cut)))
        self._rows_N = batch.rows_N
        remember_tokens(self._last_token_C, batch.rows_N, self._last_token_C[:1])

    @torch.inference_mode()
    def draw(self, logits_NV: Tensor, batch: DeviceBatch) -> None:
        """Sample the tokens of a batch without drafts, and keep them for a next step built without them."""
        if len(batch.rows_N) and self._ranks.stage.is_last:
            token_ids_N = self._sampler.draw_in_step(logits_NV, batch.draws_NF)
            if self._ranks.size == 1:  # otherwise each step is followed by `remember`
                remember_tokens(self._last_token_C, batch.rows_N, token_ids_N)


class _Work:
    """The work that a graph records: it knows a batch's place in memory, and nothing of the host's step."""

    def __init__(self, steps: GpuSteps, batch: DeviceBatch, sizes: BatchSizes, way: Way) -> None:
        self._steps, self._batch, self._sizes, self._way = steps, batch, sizes, way

    @torch.inference_mode()
    def __call__(self) -> None:
        with self._way.open():
            logits_NV = self._steps.compute_into_graphs_memory(self._batch)
        if not self._sizes.has_drafts:
            self._steps.draw(logits_NV, self._batch)


def sizes_of(inputs: StepInputs) -> BatchSizes:
    """Return the sizes of a step without padding."""
    metadata, num_tokens = inputs.metadata, len(inputs.input_ids_T)
    return BatchSizes(
        num_tokens=num_tokens,
        num_sequences=len(metadata.seq_lens),
        num_logits=len(inputs.logits_indices_N),
        # As for graphs: kernels with the decodes of a mixed step as a constant would be compiled in service.
        num_decodes=num_tokens if metadata.num_decodes == num_tokens else 0,
        max_query_len=int(np.diff(metadata.query_starts).max()),
        max_seq_len=int(metadata.seq_lens.max()),
    )
