"""A step's arrays on the host -> a DeviceBatch, in one copy.

Owns: the memory that graphs read a step from, at addresses that never change, and the pinned memory that it
is copied from: two pieces in turn, so that one is filled while the other is still being read.

    pinned  | token ids | positions | slots | logits indices | rows | ... | blocks that are new to tables |
    device  | the same, in one copy                                      | -> into the tables, in the step |

Where a field begins depends on the sizes alone. Block tables stay on the device, a line for each row of the
worker: those of 256 sequences are 8 MiB if one of them is long, and a step adds a block to every sixteenth.

Shapes: T tokens, R sequences, C rows of the worker, B blocks of the longest table, N logits wanted, F
fields of a row's sampling; all with padding.
"""

from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.interface import BlockTables
from worker.devices.device import Device, DeviceEvent
from worker.gpu.device_batch import AttentionBatch, DeviceBatch, TableChanges
from worker.sampling.draw_fields import LINE, NOBODY, NUM_FIELDS, PLACE
from worker.steps.inputs import StepInputs
from worker.steps.tokens import StepTokens

_ALIGNMENT = 16
"""Bytes. Kernels load that much at once where they may."""

_NUM_KEPT_SIZES = 256
"""The count of layouts that are kept: for all graphs, and some others."""


class BatchSizes(NamedTuple):
    """The sizes to which a step is padded. A captured graph knows no other numbers of a step."""

    num_tokens: int
    num_sequences: int
    num_logits: int
    num_decodes: int
    """The number of first sequences with one token each, or padding; 0 where any may have several."""
    max_query_len: int
    max_seq_len: int

    @property
    def has_drafts(self) -> bool:
        """Whether some sequence has logits for several tokens: then the step samples none of them itself."""
        return self.num_logits > self.num_sequences


class Limits(NamedTuple):
    """The largest step."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    """The most blocks of one sequence."""
    block_size: int
    max_drafts: int = 0
    """The most drafts of one sequence, each of which has logits."""
    num_stripes: int = 1
    """Stripes of layers, each with a table of blocks."""
    num_state_blocks: int = 0
    """Blocks of a sequence's state."""

    @property
    def num_logits(self) -> int:
        return max(self.num_sequences, min(self.num_tokens, self.num_sequences * (1 + self.max_drafts)))


class _Field(NamedTuple):
    dtype: torch.dtype
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.end].view(self.dtype)


Part = TypeVar("Part")


class _Fields(NamedTuple, Generic[Part]):
    """The place of each field in the memory of a step, or the field itself."""

    draws_NF: Part
    input_ids_T: Part
    position_ids_T: Part
    slots_ST: Part
    """Flat, like those of lines."""
    logits_indices_N: Part
    rows_T: Part
    query_starts_R: Part
    seq_lens_R: Part
    rows_N: Part
    table_rows_R: Part
    lines_X: Part
    firsts_X: Part
    starts_X: Part
    state_blocks_RF: Part
    """Flat."""
    blocks: Part
    """All memory behind the other fields: a place without a size of its own."""


_Layout = _Fields[_Field]
_HostFields = _Fields[NDArray[Any]]
"""In one of the two pieces of pinned memory, to be written to."""


def _layout_of(num_tokens: int, num_sequences: int, num_logits: int, limits: Limits) -> _Layout:
    fields, end, num_stripes = list[_Field](), 0, limits.num_stripes
    for dtype, numel in (
        (torch.float64, num_logits * NUM_FIELDS),
        (torch.int64, num_tokens),
        (torch.int64, num_tokens),
        (torch.int64, num_tokens * num_stripes),
        (torch.int64, num_logits),
        (torch.int32, num_tokens),
        (torch.int32, num_sequences + 1),
        (torch.int32, num_sequences),
        (torch.int32, num_logits),
        (torch.int32, num_sequences),
        (torch.int32, num_sequences * num_stripes),
        (torch.int32, num_sequences * num_stripes),
        (torch.int32, num_sequences * num_stripes + 1),
        (torch.int32, num_sequences * limits.num_state_blocks),
        (torch.int32, 0),
    ):
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        fields.append(_Field(dtype, start, numel))
        end = fields[-1].end
    return _Fields(*fields)


def _host_fields_of(memory: Tensor, layout: _Layout) -> _HostFields:
    blocks = memory[layout.blocks.start :].view(torch.int32).numpy()
    draws, *others = (field.of(memory).numpy() for field in layout[:-1])
    return _HostFields._make((draws.reshape(-1, NUM_FIELDS), *others, blocks))


def _tables_numel(limits: Limits) -> int:
    return limits.num_stripes * limits.num_sequences * limits.num_blocks


class _Staging:
    """One of the two pieces of pinned memory."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.memory = device.pinned(num_bytes, torch.uint8)
        self._copied: DeviceEvent | None = None

    def wait(self) -> None:
        """Wait until the device has read the memory: then it may be written to."""
        if self._copied is not None:
            self._copied.wait()

    def send(self, num_bytes: int, target: Tensor) -> None:
        target[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        self._copied = self._device.record()


class StepBuffers:
    """The memory of one step on the device. What a step was filled with is good until the next is."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.limits = limits
        tables_numel = _tables_numel(limits)
        num_bytes = self.num_bytes(limits) - tables_numel * torch.int32.itemsize
        self._memory = device.zeros(num_bytes, torch.uint8)
        self._tables_SCB = device.zeros(tables_numel, torch.int32).view(
            limits.num_stripes, limits.num_sequences, limits.num_blocks
        )
        # What the tables there hold of each row, once all that was sent has arrived.
        self._generations_C = np.full(limits.num_sequences, -1, dtype=np.int64)
        self._num_sent_SC = np.zeros((limits.num_stripes, limits.num_sequences), dtype=np.int64)
        self._stagings = (_Staging(device, num_bytes), _Staging(device, num_bytes))
        self._turn = 0
        self._host_fields = lru_cache(_NUM_KEPT_SIZES)(self._find_host_fields)

    @staticmethod
    def num_bytes(limits: Limits) -> int:
        """Count the memory on the device: a step, with all blocks of its tables, and the tables."""
        largest = _layout_of(limits.num_tokens, limits.num_sequences, limits.num_logits, limits)
        return largest.blocks.start + 2 * _tables_numel(limits) * torch.int32.itemsize

    def view(self, sizes: BatchSizes) -> DeviceBatch:
        """Return the tensors of a step of these sizes, whenever it is filled in."""
        assert sizes.num_tokens <= self.limits.num_tokens, "a step of more tokens than max_num_batched_tokens"
        assert sizes.num_sequences <= self.limits.num_sequences
        num_stripes, num_state_blocks = self.limits.num_stripes, self.limits.num_state_blocks
        layout, memory = _layout_of(*sizes[:3], self.limits), self._memory
        state_blocks_RF = layout.state_blocks_RF.of(memory).view(-1, num_state_blocks or 1)
        return DeviceBatch(
            attention=AttentionBatch(
                num_decodes=sizes.num_decodes,
                max_query_len=sizes.max_query_len,
                max_seq_len=sizes.max_seq_len,
                query_starts_R=layout.query_starts_R.of(memory),
                seq_lens_R=layout.seq_lens_R.of(memory),
                block_tables_SCB=self._tables_SCB,
                slots_ST=layout.slots_ST.of(memory).view(num_stripes, -1),
                table_rows_R=layout.table_rows_R.of(memory),
                state_blocks_RF=state_blocks_RF if num_state_blocks else None,
            ),
            tokens=StepTokens(
                layout.input_ids_T.of(memory).unsqueeze(0),
                layout.position_ids_T.of(memory).unsqueeze(0),
                layout.logits_indices_N.of(memory),
            ),
            rows_T=layout.rows_T.of(memory),
            rows_N=layout.rows_N.of(memory),
            draws_NF=layout.draws_NF.of(memory).view(-1, NUM_FIELDS),
            changes=TableChanges(
                lines_X=layout.lines_X.of(memory),
                firsts_X=layout.firsts_X.of(memory),
                starts_X=layout.starts_X.of(memory),
                blocks=memory[layout.blocks.start :].view(torch.int32),
            ),
        )

    @torch.inference_mode()
    def fill(self, inputs: StepInputs, draws_NF: NDArray[np.float64], sizes: BatchSizes) -> None:
        """Bring a step, with padding behind it, to where `view` of these sizes looks."""
        staging = self._stagings[self._turn]
        staging.wait()
        layout, host = self._host_fields(self._turn, *sizes[:3])
        self._turn = 1 - self._turn
        metadata = inputs.metadata
        num_tokens, num_sequences, num_logits = sizes_without_padding = (
            len(inputs.input_ids_T),
            len(metadata.seq_lens),
            len(inputs.logits_indices_N),
        )
        host.draws_NF[:num_logits] = draws_NF
        host.input_ids_T[:num_tokens] = inputs.input_ids_T
        host.position_ids_T[:num_tokens] = np.atleast_2d(inputs.position_ids_T)[0]
        slots_ST = host.slots_ST.reshape(self.limits.num_stripes, -1)
        slots_ST = slots_ST[: len(metadata.token_blocks_ST), :num_tokens]
        np.multiply(metadata.token_blocks_ST, self.limits.block_size, out=slots_ST)
        slots_ST += metadata.token_offsets
        host.logits_indices_N[:num_logits] = inputs.logits_indices_N
        host.rows_T[:num_tokens] = inputs.rows_T
        host.query_starts_R[: num_sequences + 1] = metadata.query_starts
        host.seq_lens_R[:num_sequences] = metadata.seq_lens
        host.state_blocks_RF[: metadata.state_blocks.size] = metadata.state_blocks.reshape(-1)
        # Tokens behind drafts are sampled after the step: there is none to remember.
        host.rows_N[:num_logits] = self.limits.num_sequences if inputs.has_drafts else inputs.rows
        if sizes_without_padding != sizes[:3]:
            self._pad(host, *sizes_without_padding)
        num_new = self._pack_new_blocks(metadata.tables, host)
        staging.send(layout.blocks.start + num_new * torch.int32.itemsize, self._memory)

    @torch.inference_mode()
    def fill_with_padding(self, sizes: BatchSizes) -> None:
        """Fill in a step of nothing but padding."""
        staging = self._stagings[self._turn]
        staging.wait()
        layout, host = self._host_fields(self._turn, *sizes[:3])
        self._turn = 1 - self._turn
        host.query_starts_R[0] = 0
        self._pad(host, 0, 0, 0)
        host.lines_X[:] = host.firsts_X[:] = 0
        host.starts_X[:] = 0
        staging.send(layout.blocks.start, self._memory)

    def _pack_new_blocks(self, tables: BlockTables, host: _HostFields) -> int:
        """Pack the blocks that the device's tables lack, and note them as sent; returns their number."""
        rows_R, num_blocks_SR = tables.rows_R, tables.num_blocks_SR
        host.table_rows_R[: len(rows_R)] = rows_R
        if not tables.num_stripes:
            host.lines_X[:] = host.firsts_X[:] = host.starts_X[:] = 0
            return 0
        is_same_R = self._generations_C[rows_R] == tables.generations_R
        firsts_SR = np.where(is_same_R, self._num_sent_SC[:, rows_R], 0)
        self._generations_C[rows_R], self._num_sent_SC[:, rows_R] = tables.generations_R, num_blocks_SR
        stripes_SR, rows_SR = np.broadcast_arrays(np.arange(tables.num_stripes)[:, None], rows_R)
        stripes_X, rows_X, firsts_X = stripes_SR.reshape(-1), rows_SR.reshape(-1), firsts_SR.reshape(-1)
        counts_X = num_blocks_SR.reshape(-1) - firsts_X
        ends_X = np.cumsum(counts_X)
        num_lines, num_new = len(rows_X), int(ends_X[-1])
        host.lines_X[:num_lines] = stripes_X * self.limits.num_sequences + rows_X
        host.firsts_X[:num_lines] = firsts_X
        host.lines_X[num_lines:] = host.firsts_X[num_lines:] = 0
        host.starts_X[0] = 0
        host.starts_X[1 : num_lines + 1] = ends_X
        host.starts_X[num_lines + 1 :] = num_new
        if num_new:
            places = np.arange(num_new) + np.repeat(firsts_X - ends_X + counts_X, counts_X)
            of_lines = np.repeat(stripes_X, counts_X), np.repeat(rows_X, counts_X)
            host.blocks[:num_new] = tables.block_ids_SCB[(*of_lines, places)]
        return num_new

    def _find_host_fields(
        self, turn: int, num_tokens: int, num_sequences: int, num_logits: int
    ) -> tuple[_Layout, _HostFields]:
        layout = _layout_of(num_tokens, num_sequences, num_logits, self.limits)
        return layout, _host_fields_of(self._stagings[turn].memory, layout)

    def _pad(self, host: _HostFields, num_tokens: int, num_sequences: int, num_logits: int) -> None:
        """Return the offsets behind these sizes."""
        host.draws_NF[num_logits:] = 0
        host.draws_NF[num_logits:, LINE] = NOBODY
        host.draws_NF[num_logits:, PLACE] = np.arange(num_logits, len(host.draws_NF))
        host.input_ids_T[num_tokens:] = host.position_ids_T[num_tokens:] = 0
        host.rows_T[num_tokens:] = self.limits.num_sequences  # of no sequence: it has no adapter
        host.slots_ST.reshape(self.limits.num_stripes, -1)[:, num_tokens:] = -1
        host.logits_indices_N[num_logits:] = 0
        # No sequence behind the last has tokens: all of them begin where the last one ends.
        host.query_starts_R[num_sequences:] = host.query_starts_R[num_sequences]
        host.seq_lens_R[num_sequences:] = host.table_rows_R[num_sequences:] = 0
        # Block 0 is no sequence's: the trial of early launches gives padding tokens.
        host.state_blocks_RF[num_sequences * self.limits.num_state_blocks :] = 0
        host.rows_N[num_logits:] = self.limits.num_sequences
