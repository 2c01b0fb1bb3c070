"""Copies between the pools that run during the steps of a GPU.

Four streams work in order, and wait for each other by events only. The host waits for nothing.

    compute    step 7 ------------>|step 8 ------------>|step 9 --------
    out          [1 2 3][4 5 6][7 8 9]      ^                  ^
    late out                       [10]-----'  8 writes 10     '- 9 writes 2: it left long ago
    back         [21 22]--------------------^  8 reads 21

Copies are cut into pieces, each with an event. If two pieces, or a piece and a step, share a row that one of
them writes, the later waits for the earlier. A block that a step in flight still writes leaves by the late
stream, since all copies behind it in a stream wait with it. For a sequence that is swapped out, that is its
last block; the others leave while the step runs.

A row is forgotten when the event of the last piece that touched it has come.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.devices.block_copies import Pools, RowCopy, Rows, TouchedRows, merge_runs

# Of one piece. A step waits a quarter of a millisecond for it at 32 GB/s, and an event costs the host a
# hundredth of that.
_PIECE_BYTES = 8 << 20

Mask = NDArray[np.bool_]
"""[N]: one for each row of the device's pool."""


class StreamEvent(Protocol):
    """Point in the work of one stream."""

    def query(self) -> bool:
        """Whether all work before it is done."""


class Stream(Protocol):
    """Queue of work that is done later, in order. No call waits."""

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the second of each pair to the first."""

    def record(self) -> StreamEvent:
        """Mark the present end of the stream's work."""

    def wait(self, event: StreamEvent) -> None:
        """Do no further work before the event has come."""


class Streams(NamedTuple):
    """Streams of one GPU, which has an engine for copies in each direction."""

    compute: Stream
    out: Stream
    late_out: Stream
    back: Stream


class _Lane:
    """Stream of copies, and its pieces that are not known to be done."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.pieces: deque[_Piece] = deque()


class _Piece(NamedTuple):
    """Copies of one stream that share an event."""

    lane: _Lane
    done: StreamEvent
    entries: list[tuple["_LastPieces", list[int]]]
    """Entries of `_LastPieces` that may hold this piece."""


_LastPieces = dict[int, _Piece]
"""Last piece that touched a row, by row."""


class _Step:
    """Rows that a step touches. Masks are made when first asked for: most steps meet no copy."""

    def __init__(self, touched: TouchedRows, num_rows: int) -> None:
        self._touched = touched
        self._num_rows = num_rows

    @cached_property
    def writes(self) -> Mask:
        return self._mask(self._touched.written_W)

    @cached_property
    def touches(self) -> Mask:
        return self._mask(self._touched.read()) | self.writes

    def _mask(self, rows: Rows) -> Mask:
        mask = np.zeros(self._num_rows, np.bool_)
        mask[rows] = True
        return mask


class _Launch(NamedTuple):
    """Step that the GPU may not have done yet."""

    step: _Step
    done: StreamEvent


class _Way(NamedTuple):
    """Direction of copies: out or back."""

    last: _LastPieces
    """Last pieces, by row of the device's pool."""
    disturbing: Callable[[_Step], Mask]
    """Rows of that pool that cannot be copied while a step runs."""


class _Ends(NamedTuple):
    """Rows that some copies touch, aligned, in either direction."""

    device: list[int]
    host: list[int]


class CopyStreams:
    """PoolCopier with four streams."""

    def __init__(self, pools: Pools, streams: Streams, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self._pools = pools
        self._compute = streams.compute
        self._out, self._late_out, self._back = (_Lane(stream) for stream in streams[1:])
        self._piece_rows = max(1, piece_bytes // (pools.device_NE.shape[1] * pools.device_NE.itemsize))
        self._launches: deque[_Launch] = deque()
        self._leaving = _Way({}, lambda step: step.writes)
        self._arriving = _Way({}, lambda step: step.touches)
        self._at_host: _LastPieces = {}  # by row of the host's pool

    def swap(self, out: Sequence[RowCopy], back: Sequence[RowCopy]) -> None:
        self._forget_done()
        ready, late = _divide(out, self._must_wait(self._out, self._leaving, _ends_of_out(out)))
        for lane, copies in ((self._out, ready), (self._late_out, late)):
            for piece in self._cut(copies):
                self._send(lane, piece)
        ready, late = _divide(back, self._must_wait(self._back, self._arriving, _ends_of_back(back)))
        # A step needs all rows that come back; rows that wait come last and do not hold up the others.
        for piece in self._cut(ready + late):
            self._fetch(piece)

    @contextmanager
    def step(self, touched: TouchedRows) -> Iterator[None]:
        self._forget_done()
        step = _Step(touched, len(self._pools.device_NE))
        for piece in self._in_the_way_of(step):
            self._compute.wait(piece.done)
        try:
            yield
        finally:
            # If the step fails half-way, its launched part is still done.
            self._launches.append(_Launch(step, self._compute.record()))

    def _cut(self, copies: list[RowCopy]) -> list[list[RowCopy]]:
        starts = range(0, len(copies), self._piece_rows)
        return [copies[start : start + self._piece_rows] for start in starts]

    def _send(self, lane: _Lane, copies: list[RowCopy]) -> None:
        device_NE, host_ME = self._pools
        pairs = [(host_ME[run.target_rows], device_NE[run.source_rows]) for run in merge_runs(copies)]
        self._ask(lane, self._leaving, _ends_of_out(copies), pairs)

    def _fetch(self, copies: list[RowCopy]) -> None:
        device_NE, host_ME = self._pools
        pairs = [(device_NE[run.target_rows], host_ME[run.source_rows]) for run in merge_runs(copies)]
        self._ask(self._back, self._arriving, _ends_of_back(copies), pairs)

    def _ask(self, lane: _Lane, way: _Way, ends: _Ends, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Launch one piece behind all work that it could disturb."""
        for launch in reversed(self._launches):
            if way.disturbing(launch.step)[ends.device].any():
                lane.stream.wait(launch.done)
                break  # earlier launches are done by then
        # Two pieces that only read a row would not disturb each other; but only the last is remembered.
        met = {id(last[row]): last[row] for last, rows in self._places(ends) for row in rows if row in last}
        for piece in met.values():
            if piece.lane is not lane:
                lane.stream.wait(piece.done)
        entries = [(way.last, ends.device), (self._at_host, ends.host)]
        try:
            lane.stream.copy(pairs)
        finally:
            # If one copy is refused, the copies before it are still made.
            piece = _Piece(lane, lane.stream.record(), entries)
            lane.pieces.append(piece)
            for last, rows in entries:
                last.update(dict.fromkeys(rows, piece))

    def _must_wait(self, lane: _Lane, way: _Way, ends: _Ends) -> Mask:
        """Mark the copies, aligned with `ends`, that must wait and would hold up others of the lane."""
        must_wait = np.zeros(len(ends.device), np.bool_)
        for last, rows in self._places(ends):
            if last:
                meets = [row in last and last[row].lane is not lane for row in rows]
                must_wait |= np.array(meets, np.bool_)
        for launch in self._launches if ends.device else ():
            must_wait |= way.disturbing(launch.step)[ends.device]
        return must_wait

    def _places(self, ends: _Ends) -> list[tuple[_LastPieces, list[int]]]:
        """List the tables of pieces that may come before some copies, with the rows to look up."""
        return [
            (self._leaving.last, ends.device),
            (self._arriving.last, ends.device),
            (self._at_host, ends.host),
        ]

    def _in_the_way_of(self, step: _Step) -> list[_Piece]:
        found: dict[int, _Piece] = {}
        for last, disturbing in (self._leaving, self._arriving):
            if last:
                rows = np.fromiter(last, np.int64, len(last))
                found.update((id(last[row]), last[row]) for row in rows[disturbing(step)[rows]].tolist())
        return list(found.values())

    def _forget_done(self) -> None:
        while self._launches and self._launches[0].done.query():
            self._launches.popleft()
        for lane in (self._out, self._late_out, self._back):
            while lane.pieces and lane.pieces[0].done.query():
                piece = lane.pieces.popleft()
                for last, rows in piece.entries:
                    for row in rows:
                        if last.get(row) is piece:
                            del last[row]


def _divide(copies: Sequence[RowCopy], is_late: Mask) -> tuple[list[RowCopy], list[RowCopy]]:
    """Split copies into early and late ones, each in the order given."""
    divided: tuple[list[RowCopy], list[RowCopy]] = [], []
    for copy, late in zip(copies, is_late.tolist(), strict=True):
        divided[late].append(copy)
    return divided


def _ends_of_out(copies: Sequence[RowCopy]) -> _Ends:
    return _Ends([copy.source for copy in copies], [copy.target for copy in copies])


def _ends_of_back(copies: Sequence[RowCopy]) -> _Ends:
    return _Ends([copy.target for copy in copies], [copy.source for copy in copies])


class CudaStream:
    """Stream of torch.cuda."""

    def __init__(self, find: Callable[[], torch.cuda.Stream]) -> None:
        """Take in `find`, which returns the stream at each call: each thread has a current one."""
        self._find = find

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """See Stream. The tensors live as long as the process: torch need not track their use."""
        with torch.cuda.stream(self._find()):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def record(self) -> StreamEvent:
        new_event: Any = torch.cuda.Event  # torch leaves its constructor untyped
        event: torch.cuda.Event = new_event()
        event.record(self._find())
        return event

    def wait(self, event: StreamEvent) -> None:
        self._find().wait_event(cast("torch.cuda.Event", event))  # `record` gave it


def open_streams(torch_device: torch.device) -> Streams:
    """Open streams for copies, and find the one that computes."""
    new_stream: Any = torch.cuda.Stream  # its constructor is untyped, too
    copying = [new_stream(torch_device) for _ in Streams._fields[1:]]
    return Streams(
        CudaStream(lambda: torch.cuda.current_stream(torch_device)),
        *(CudaStream(lambda stream=stream: stream) for stream in copying),  # type: ignore[misc]
    )
