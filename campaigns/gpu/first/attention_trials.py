"""The attention kernels, each once, over a cache whose blocks lie in disorder.

Owns: small steps, and attention as plain torch computes it, one sequence after the other.
Never: windows, chunks, caps and sinks: the kernels' tests have them.

Shapes: T tokens, R sequences, Hq and Hk query and KV heads, D head size, L tokens of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from campaigns.gpu.first.trial import Build, Place, Trial, agreement
from campaigns.gpu.tune.workloads import work_of
from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import FLOAT8, BlockLayout, KVCache, LayerShape
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_decode import attend_decodes
from worker.gpu.kernels.attention_prefill import attend_prefills

_BLOCK_SIZE = 16
_NUM_KV_HEADS, _NUM_GROUPS = 2, 4
_LAYER = 1

Attend = Callable[[Tensor], None]
"""Fill in what all queries attended to."""
Shares = Sequence[tuple[int, int]]
"""Length of each sequence after the step, and its tokens in the step."""


def attention_trials(place: Place) -> list[Build]:
    # Each a few tiles at most, and of many programs: short ones are cut where the shares end, or not at all.
    many = [(1 + 3 * number, 1) for number in range(10)]
    return [
        partial(_decodes, place, "attention of decodes, in parts", 64, [(300, 1), (1, 1), (47, 1)]),
        partial(_decodes, place, "attention of decodes, many", 128, many),
        partial(_prefills, place, "attention of prefills", 64, [(40, 17), (9, 9), (130, 3)]),
        partial(_prefills, place, "attention of prefills", 128, [(70, 70)]),
        partial(_mixed, place, 128, [(33, 1), (50, 20), (8, 1)]),
        partial(_mixed, place, 128, [(33, 1), (50, 20), (8, 1)], is_of_8_bits=True),
    ]


def _decodes(place: Place, name: str, head_dim: int, shares: Shares) -> Trial:
    step = _Step(place, head_dim, shares, num_decodes=len(shares))
    return step.trial(name, lambda out_THD: attend_decodes(*step.arguments, out_THD))


def _prefills(place: Place, name: str, head_dim: int, shares: Shares) -> Trial:
    step = _Step(place, head_dim, shares, num_decodes=0)
    return step.trial(
        f"{name}, heads of {head_dim}", lambda out_THD: attend_prefills(*step.arguments, out_THD)
    )


def _mixed(place: Place, head_dim: int, shares: Shares, *, is_of_8_bits: bool = False) -> Trial:
    """Call as in a captured step, where the host knows no number of tokens."""
    step = _Step(place, head_dim, shares, num_decodes=0, is_of_8_bits=is_of_8_bits)

    def attend(out_THD: Tensor) -> None:
        attend_decodes(*step.arguments, out_THD)
        attend_prefills(*step.arguments, out_THD)

    return step.trial(f"attention of a mixed step{', 8 bits' if is_of_8_bits else ''}", attend)


class _Step:
    """Sequences with their keys and values in a cache."""

    def __init__(
        self, place: Place, head_dim: int, shares: Shares, *, num_decodes: int, is_of_8_bits: bool = False
    ) -> None:
        self._place, self._shares = place, shares
        lengths, counts = zip(*shares, strict=True)
        self.queries_THD = place.random(sum(counts), _NUM_KV_HEADS * _NUM_GROUPS, head_dim)
        self._keys = [place.random(length, _NUM_KV_HEADS, head_dim) for length in lengths]
        self._values = [place.random(length, _NUM_KV_HEADS, head_dim, scale=2.0) for length in lengths]
        if is_of_8_bits:
            self._keys, self._values = (
                [rows_LHD.to(FLOAT8).to(place.dtype) for rows_LHD in each]
                for each in (self._keys, self._values)
            )
        self._options = AttentionOptions(
            scaling=1 / math.sqrt(head_dim), sliding_window=None, softcap=None, sinks=None
        )
        self._starts = [0, *accumulate(counts)]
        most_blocks = -(-max(lengths) // _BLOCK_SIZE)
        num_blocks = most_blocks * len(shares)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)) + 1
        self._tables_RB = order.view(len(shares), most_blocks)
        layout = BlockLayout(
            layers=dict.fromkeys((0, _LAYER), LayerShape(_NUM_KV_HEADS, head_dim, head_dim)),
            block_size=_BLOCK_SIZE,
            dtype=FLOAT8 if is_of_8_bits else place.dtype,
        )
        memory = torch.zeros((num_blocks + 1) * layout.block_numel, dtype=layout.storage, device=place.device)
        self._layer = KVCache(layout, num_blocks, memory).layers[_LAYER]
        self._fill()
        batch = AttentionBatch(
            num_decodes=num_decodes,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            query_starts_R=place.integers(self._starts),
            seq_lens_R=place.integers(lengths),
            block_tables_CB=place.integers(self._tables_RB),
            slots_T=place.integers([-1] * sum(counts), torch.int64),
        )
        self._tables = batch.block_tables_CB
        self.arguments = (self.queries_THD, self._layer, work_of(batch), self._options)

    def trial(self, name: str, attend: Attend) -> Trial:
        out_THD = torch.zeros_like(self.queries_THD)

        def compute() -> list[Tensor]:
            attend(out_THD)
            return [out_THD]

        inputs = {
            "queries": self.queries_THD,
            "keys": self._layer.keys.blocks_NHSD,
            "block tables": self._tables,
        }
        return agreement(name, inputs, compute, lambda: [self._defined()])(self._place.tolerance)

    def _fill(self) -> None:
        for table, keys_LHD, values_LHD in zip(self._tables_RB, self._keys, self._values, strict=True):
            for first in range(0, len(keys_LHD), _BLOCK_SIZE):
                block = int(table[first // _BLOCK_SIZE])
                some = slice(first, first + _BLOCK_SIZE)
                for paged, rows_LHD in ((self._layer.keys, keys_LHD), (self._layer.values, values_LHD)):
                    page_HSD = rows_LHD[some].transpose(0, 1)
                    paged.blocks_NHSD[block, :, : page_HSD.shape[1]] = page_HSD

    def _defined(self) -> Tensor:
        """In float32 on the CPU."""
        outs = []
        for row, (length, count) in enumerate(self._shares):
            queries_THD = self.queries_THD[self._starts[row] : self._starts[row + 1]].cpu().float()
            keys, values = (
                each[row].cpu().float().transpose(0, 1).repeat_interleave(_NUM_GROUPS, dim=0)
                for each in (self._keys, self._values)
            )
            positions = torch.arange(length - count, length)
            is_seen = torch.arange(length)[None] <= positions[:, None]
            out_HTD = functional.scaled_dot_product_attention(
                queries_THD.transpose(0, 1), keys, values, attn_mask=is_seen, scale=self._options.scaling
            )
            outs.append(out_HTD.transpose(0, 1))
        return torch.cat(outs)
