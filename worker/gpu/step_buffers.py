"""A step's arrays on the host -> a DeviceBatch, in one copy.

Owns: the memory that graphs read a step from, at addresses that never change, and the pinned memory that it
is copied from: two pieces in turn, so that one is filled while the other is still being read.
Never: what the numbers mean (inputs.py), or who reads them (runner.py).

    pinned  | token ids | positions | slots | logits indices | rows | ... | block tables, as wide as need be |
    device  | the same, one copy                                         | -> tables of full width, one copy |

Where a field begins depends on the sizes alone. Block tables come last and narrow: at full width, those of
256 sequences of a long context are 8 MiB, of which a step reads a hundredth.

Shapes: T tokens, R sequences, B blocks of the longest table, N logits wanted; all with padding.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.device import Device, Event
from worker.gpu.batch import AttentionBatch, DeviceBatch
from worker.inputs import StepInputs

_ALIGNMENT = 16
"""Bytes. Kernels load that much at once where they may."""


class BatchSizes(NamedTuple):
    """What a step is padded to. For a captured graph these are all the numbers that it knows of a step."""

    num_tokens: int
    num_sequences: int
    num_logits: int
    num_decodes: int
    """The first so many sequences have one token each, or are padding; 0 where any may have several."""
    max_query_len: int
    max_seq_len: int


class Limits(NamedTuple):
    """The largest step."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    """Of one sequence."""
    block_size: int


class _Field(NamedTuple):
    dtype: torch.dtype
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.end].view(self.dtype)


class _Layout(NamedTuple):
    """Where in the memory of a step its fields are."""

    input_ids_T: _Field
    position_ids_T: _Field
    slots_T: _Field
    logits_indices_N: _Field
    rows_T: _Field
    query_starts_R: _Field
    seq_lens_R: _Field
    rows_N: _Field
    block_tables: _Field
    """Without a size of its own: it begins here."""

    @classmethod
    def of(cls, sizes: BatchSizes) -> "_Layout":
        num_tokens, num_sequences, num_logits = sizes[:3]
        fields, end = [], 0
        for dtype, numel in (
            (torch.int64, num_tokens),
            (torch.int64, num_tokens),
            (torch.int64, num_tokens),
            (torch.int64, num_logits),
            (torch.int32, num_tokens),
            (torch.int32, num_sequences + 1),
            (torch.int32, num_sequences),
            (torch.int32, num_logits),
            (torch.int32, 0),
        ):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            fields.append(_Field(dtype, start, numel))
            end = fields[-1].end
        return cls(*fields)


class _Staging:
    """One of the two pieces of pinned memory."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.memory = device.pinned(num_bytes, torch.uint8)
        self._copied: Event | None = None

    def take(self) -> Tensor:
        """To write to, once the device has read what it was last asked to."""
        if self._copied is not None:
            self._copied.wait()
        return self.memory

    def send(self, num_bytes: int, target: Tensor) -> None:
        target[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        self._copied = self._device.record()


class StepBuffers:
    """The memory of one step on the device. What a step was filled with is good until the next is."""

    def __init__(self, device: Device, limits: Limits) -> None:
        self.limits = limits
        largest = BatchSizes(limits.num_tokens, limits.num_sequences, limits.num_sequences, 0, 0, 0)
        tables_numel = limits.num_sequences * limits.num_blocks
        num_bytes = _Layout.of(largest).block_tables.start + tables_numel * torch.int32.itemsize
        self._memory = device.zeros(num_bytes, torch.uint8)
        self._tables_RB = device.zeros(tables_numel, torch.int32).view(-1, limits.num_blocks)
        self._stagings = (_Staging(device, num_bytes), _Staging(device, num_bytes))
        self._turn = 0

    @staticmethod
    def num_bytes(limits: Limits) -> int:
        """On the device, about."""
        return limits.num_tokens * 32 + limits.num_sequences * (24 + 8 * limits.num_blocks)

    def view(self, sizes: BatchSizes) -> DeviceBatch:
        """Where a step of these sizes is found, whenever it is filled in."""
        assert sizes.num_tokens <= self.limits.num_tokens, "a step of more tokens than max_num_batched_tokens"
        assert sizes.num_sequences <= self.limits.num_sequences
        layout, memory = _Layout.of(sizes), self._memory
        return DeviceBatch(
            attention=AttentionBatch(
                num_decodes=sizes.num_decodes,
                max_query_len=sizes.max_query_len,
                max_seq_len=sizes.max_seq_len,
                query_starts_R=layout.query_starts_R.of(memory),
                seq_lens_R=layout.seq_lens_R.of(memory),
                block_tables_RB=self._tables_RB[: sizes.num_sequences],
                slots_T=layout.slots_T.of(memory),
            ),
            input_ids_1T=layout.input_ids_T.of(memory).unsqueeze(0),
            position_ids_1T=layout.position_ids_T.of(memory).unsqueeze(0),
            rows_T=layout.rows_T.of(memory),
            logits_indices_N=layout.logits_indices_N.of(memory),
            rows_N=layout.rows_N.of(memory),
        )

    @torch.inference_mode()
    def fill(self, inputs: StepInputs | None, sizes: BatchSizes) -> None:
        """Bring a step, with padding behind it, to where `view` of these sizes looks; None is all padding."""
        staging = self._stagings[self._turn]
        self._turn = 1 - self._turn
        host = staging.take()
        layout = _Layout.of(sizes)
        if inputs is None:
            self._write(layout, host, _NOTHING)
            staging.send(layout.block_tables.start, self._memory)
            return
        metadata = inputs.metadata
        self._write(
            layout,
            host,
            {
                "input_ids_T": inputs.input_ids_T,
                "position_ids_T": inputs.position_ids_T,
                "slots_T": metadata.token_blocks * self.limits.block_size + metadata.token_offsets,
                "logits_indices_N": inputs.logits_indices_N,
                "rows_T": inputs.rows_T,
                "query_starts_R": metadata.query_starts,
                "seq_lens_R": metadata.seq_lens,
                "rows_N": np.array(inputs.rows),
            },
        )
        tables_RB = metadata.block_tables
        tables = _Field(torch.int32, layout.block_tables.start, tables_RB.size)
        tables.of(host).numpy()[:] = tables_RB.reshape(-1)
        staging.send(tables.end, self._memory)
        num_sequences, num_blocks = tables_RB.shape
        self._tables_RB[:num_sequences, :num_blocks].copy_(tables.of(self._memory).view(tables_RB.shape))

    def _write(self, layout: _Layout, host: Tensor, arrays: dict[str, NDArray[Any]]) -> None:
        for name, field in zip(_Layout._fields, layout, strict=True):
            if name in arrays:
                given, target = arrays[name], field.of(host).numpy()
                target[: len(given)] = given
                # No sequence behind the last has tokens: all of them begin where the last one ends.
                padding = given[-1] if name == "query_starts_R" else _PADDING.get(name, 0)
                target[len(given) :] = padding
        rows_N = layout.rows_N.of(host).numpy()
        rows_N[len(arrays["rows_N"]) :] = self.limits.num_sequences


_PADDING = {"slots_T": -1}
_NOTHING: dict[str, NDArray[Any]] = {
    **{name: np.zeros(0) for name in _Layout._fields if name != "block_tables"},
    "query_starts_R": np.zeros(1),
}
