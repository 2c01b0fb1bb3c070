"""Lists of the work that attention has in a step, made on the device once for all layers that see alike.

Owns: which sequences have work, how much, and which place of it belongs to which sequence; the counters by
which programs share it.
Source: FlashInfer's plan (arXiv:2501.01005) and FlashAttention-3's scheduler, made on the device.

A captured graph has one grid for ever. If that had room for the longest sequence that may come, nearly all of
its programs would find nothing to do. These grids are as large as the device instead, and programs share what
there is. Units are tiles of keys for decodes, blocks of tokens for prefills:

    units      | sequence 3      | 5 | 6                         |     sequences without work are not listed
    starts     0                 5   6                           14

Shapes: R sequences that may be listed, L of them that are. A list is int32: L, the number of units, [R + 1]
where the units of each begin, with the end of the last behind, and [R] of each thing that is known of them.
It has for all layers and programs what each would have to look up, load after load.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from scheduler.cache_groups import Lifetime
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_tiles import first_seen

_AT_ONCE = 1024
"""Sequences that are looked at with one load."""
_NUM_WARPS = 4
_NUM_DECODE_FIELDS = 3
"""The token, the length and the line in the block tables. Prefills have the sequence alone."""
_NUM_SHARED_COUNTERS = 2
"""Counters before those of single programs: the next free prefill, and the number of finished programs."""


class AttentionWork:
    """The work of one step. Lists are made for the first layer, so that a graph records it."""

    def __init__(self, batch: AttentionBatch, counters: Tensor, num_processors: int) -> None:
        """Take `counters` of `num_counters`, int32: zero now, and zero again after each launch."""
        self.batch = batch
        self.num_processors = num_processors
        self.counters = counters
        self._lists: dict[Any, Tensor] = {}

    @staticmethod
    def num_counters(num_programs: int) -> int:
        """Count those that launches of up to `num_programs` programs need."""
        return _NUM_SHARED_COUNTERS + num_programs

    @property
    def arrivals(self) -> Tensor:
        """Counters of single programs."""
        return self.counters[_NUM_SHARED_COUNTERS:]

    def list_decodes(self, lifetime: Lifetime, num_keys: int) -> Tensor:
        """List sequences with one token, by their tiles of `num_keys` keys that this token sees.

        Padding that is to get zeros here has one tile. Where the host does not know the decodes, prefills
        give zeros to all of it.
        """
        key = (lifetime, num_keys)
        if key not in self._lists:
            batch = self.batch
            most = batch.num_decodes or batch.num_sequences
            made = batch.seq_lens_R.new_empty(3 + (1 + _NUM_DECODE_FIELDS) * most)
            list_decodes_kernel[(1,)](
                made, batch.query_starts_R, batch.seq_lens_R, batch.table_rows_R, most, batch.num_sequences,
                WINDOW=lifetime.window, CHUNK=lifetime.chunk, NUM_KEYS=num_keys,
                TAKES_PADDING=batch.num_decodes > 0, AT_ONCE=_AT_ONCE, num_warps=_NUM_WARPS,
            )  # fmt: skip
            self._lists[key] = made
        return self._lists[key]

    def list_prefills(self, tokens_per_block: int) -> Tensor:
        """List sequences behind the decodes, by their blocks of tokens.

        Where the host does not know the decodes, those are left out. Tokens behind the last sequence's are
        listed as those of sequence num_sequences.
        """
        key = tokens_per_block
        if key not in self._lists:
            batch = self.batch
            most = batch.num_sequences - batch.num_decodes + 1
            made = batch.seq_lens_R.new_empty(3 + 2 * most)
            list_prefills_kernel[(1,)](
                made, batch.query_starts_R, most, batch.num_tokens, batch.num_sequences, batch.num_decodes,
                TOKENS=tokens_per_block, LEAVE_DECODES=batch.num_decodes == 0, AT_ONCE=_AT_ONCE,
                num_warps=_NUM_WARPS,
            )  # fmt: skip
            self._lists[key] = made
        return self._lists[key]


@triton.jit(do_not_specialize=["most", "num_sequences"])
def list_decodes_kernel(
    work, query_starts, seq_lens, table_rows, most, num_sequences,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, NUM_KEYS: tl.constexpr,
    TAKES_PADDING: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: see AttentionWork.list_decodes."""
    num_listed = 0
    num_units = 0
    num_real_tokens = tl.load(query_starts + num_sequences)
    for first in range(0, most, AT_ONCE):
        sequences_R = first + tl.arange(0, AT_ONCE)
        is_there_R = sequences_R < most
        starts_R = tl.load(query_starts + sequences_R, mask=is_there_R, other=0)
        ends_R = tl.load(query_starts + sequences_R + 1, mask=is_there_R, other=0)
        lens_R = tl.load(seq_lens + sequences_R, mask=is_there_R, other=0)
        first_tiles_R = first_seen(lens_R - 1, WINDOW, CHUNK) // NUM_KEYS
        units_R = tl.where(
            is_there_R & (ends_R - starts_R == 1), tl.cdiv(lens_R, NUM_KEYS) - first_tiles_R, 0
        )
        if TAKES_PADDING:
            # Its token is the one of its own number, unless that belongs to a sequence.
            is_padding_R = is_there_R & (ends_R == starts_R) & (sequences_R >= num_real_tokens)
            units_R = tl.where(is_padding_R, 1, units_R)
        # Padding has the token of its own number.
        tokens_R = tl.where(ends_R - starts_R == 1, starts_R, sequences_R)
        lines_R = sequences_R
        if table_rows is not None:
            lines_R = tl.load(table_rows + sequences_R, mask=is_there_R, other=0)
        fields_R, num_listed, num_units = _append(work, most, units_R, num_listed, num_units)
        tl.store(fields_R, tokens_R, mask=units_R > 0)
        tl.store(fields_R + most, lens_R, mask=units_R > 0)
        tl.store(fields_R + 2 * most, lines_R, mask=units_R > 0)
    _end(work, num_listed, num_units)


@triton.jit(do_not_specialize=["most", "num_tokens", "num_sequences", "first_sequence"])
def list_prefills_kernel(
    work, query_starts, most, num_tokens, num_sequences, first_sequence,
    TOKENS: tl.constexpr, LEAVE_DECODES: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """One program: see AttentionWork.list_prefills."""
    num_listed = 0
    num_units = 0
    for first in range(0, most, AT_ONCE):
        sequences_R = first_sequence + first + tl.arange(0, AT_ONCE)
        is_there_R = sequences_R <= num_sequences
        is_sequence_R = sequences_R < num_sequences
        starts_R = tl.load(query_starts + sequences_R, mask=is_there_R, other=0)
        ends_R = tl.load(query_starts + sequences_R + 1, mask=is_sequence_R, other=0)
        counts_R = tl.where(is_sequence_R, ends_R, num_tokens) - starts_R
        if LEAVE_DECODES:
            counts_R = tl.where(is_sequence_R & (counts_R == 1), 0, counts_R)
        units_R = tl.where(is_there_R, tl.cdiv(counts_R, TOKENS), 0)
        fields_R, num_listed, num_units = _append(work, most, units_R, num_listed, num_units)
        tl.store(fields_R, sequences_R, mask=units_R > 0)
    _end(work, num_listed, num_units)


@triton.jit
def _append(work, most, units_R, num_listed, num_units) -> tl.tuple:
    """List those with units behind those before; returns where the first field of each belongs.

    Behind it come the numbers of those that are listed now, and of their units.
    """
    is_listed_R = units_R > 0
    places_R = num_listed + tl.cumsum(is_listed_R.to(tl.int32), axis=0) - 1
    starts_R = num_units + tl.cumsum(units_R, axis=0) - units_R
    tl.store(work + 2 + places_R, starts_R, mask=is_listed_R)
    num_listed += tl.sum(is_listed_R.to(tl.int32), axis=0)
    return work + 3 + most + places_R, num_listed, num_units + tl.sum(units_R, axis=0)


@triton.jit
def _end(work, num_listed, num_units) -> None:
    tl.store(work, num_listed)
    tl.store(work + 1, num_units)
    tl.store(work + 2 + num_listed, num_units)


@triton.jit
def load_ends(work, most, AT_ONCE: tl.constexpr) -> tl.tensor:
    """Load where the units of the first AT_ONCE end; behind the last that is listed are any numbers.

    So this need not wait for how many are listed.
    """
    places_L = tl.arange(0, AT_ONCE)
    return tl.load(work + 3 + places_L, mask=places_L < most, other=0)


@triton.jit
def find_listed(work, num_listed, ends_L, unit, AT_ONCE: tl.constexpr) -> tl.tensor:
    """Find the place in the list of the sequence that a unit belongs to; see load_ends for `ends_L`."""
    # All at once: a search by halves is as many loads that wait for one another.
    place = 0
    for first in range(0, num_listed, AT_ONCE):
        places_L = first + tl.arange(0, AT_ONCE)
        place += tl.sum(((places_L < num_listed) & (ends_L <= unit)).to(tl.int32), axis=0)
        later_L = places_L + AT_ONCE
        ends_L = tl.load(work + 3 + later_L, mask=later_L < num_listed, other=0)
    return place


@triton.jit
def load_decode(work, most, place) -> tl.tuple:
    """Load a sequence's first unit and their number, its token, its length, and its line in the tables."""
    start, end = tl.load(work + 2 + place), tl.load(work + 3 + place)
    fields = work + 3 + most + place
    return start, end - start, tl.load(fields), tl.load(fields + most), tl.load(fields + 2 * most)


@triton.jit
def load_prefill(work, most, place) -> tl.tuple:
    """Load a sequence's first unit, and its number."""
    return tl.load(work + 2 + place), tl.load(work + 3 + most + place)
