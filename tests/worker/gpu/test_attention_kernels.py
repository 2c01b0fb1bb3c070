"""The attention kernels against the definition of correct, on steps of every kind, with poison where nothing
may be read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from scheduler.cache_groups import ALL_TOKENS, Lifetime, LifetimeKind
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from worker.attention.interface import AttentionMetadata, AttentionOptions, BlockTables, SeenPictures
from worker.attention.kv_cache import FLOAT8, BlockLayout, KVCache, LayerShape
from worker.attention.ref_attention import RefAttention
from worker.devices.device import CpuDevice
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels import attention_decode, attention_tiles, attention_work
from worker.gpu.kernels.attention_decode import attend_decodes
from worker.gpu.kernels.attention_prefill import attend_prefills
from worker.gpu.kernels.attention_tiles import HeadGroups
from worker.gpu.kernels.attention_work import AttentionWork
from worker.gpu.kernels.kv_write import write_kv
from worker.gpu.triton_attention import TritonAttention
from worker.worker_config import WorkerConfig

LAYER = 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New memory is full of NaN, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Heads(NamedTuple):
    num_kv_heads: int = 2
    num_groups: int = 3
    key_dim: int = 8
    value_dim: int = 8


class Case(NamedTuple):
    """Sequences of (length before the step, tokens in the step), decodes first."""

    shares: list[tuple[int, int]]
    heads: Heads = Heads()
    block_size: int = 8
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    value_is_key_part: bool = False

    @property
    def lifetime(self) -> Lifetime:
        if self.chunk is not None:
            return Lifetime(LifetimeKind.CHUNK, self.chunk)
        return ALL_TOKENS if self.window is None else Lifetime(LifetimeKind.WINDOW, self.window)


class Step:
    """A step at its beginning: a cache that holds what lies before it, and NaN everywhere else."""

    def __init__(self, case: Case) -> None:
        self.case = case
        heads = case.heads
        self.generator = torch.Generator().manual_seed(5)
        longest = -(-max(sum(share) for share in case.shares) // case.block_size)
        self.num_blocks = len(case.shares) * longest + 1
        blocks = np.random.default_rng(5).permutation(self.num_blocks - 1) + 1
        # The last block belongs to nobody.
        self.tables = np.full((len(case.shares), longest), self.num_blocks, dtype=np.int32)
        for row, (before, now) in enumerate(case.shares):
            held = -(-(before + now) // case.block_size)
            self.tables[row, :held] = blocks[row * longest : row * longest + held]
        self.options = AttentionOptions(
            scaling=0.3,
            lifetime=case.lifetime,
            softcap=case.softcap,
            sinks=self.random(heads.num_kv_heads * heads.num_groups) if case.has_sinks else None,
        )
        self.device = CpuDevice(WorkerConfig(model_path="", num_threads=1))
        self.ref_cache, self.cache = self.new_cache(torch.float32), self.new_cache(case.dtype)
        self.ref = RefAttention(self.ref_cache, self.device)
        self.triton = TritonAttention(self.cache, self.device)
        self.write_before()
        self.metadata = self.spans([(before, before + now) for before, now in case.shares])
        num_tokens = sum(now for _, now in case.shares)
        self.query = self.random(heads.num_kv_heads * heads.num_groups, num_tokens, heads.key_dim)
        self.key = self.random(heads.num_kv_heads, num_tokens, heads.key_dim)
        self.value = self.random(heads.num_kv_heads, num_tokens, heads.value_dim)
        if case.value_is_key_part:
            self.value = self.key[..., : heads.value_dim]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.case.dtype)

    def new_cache(self, dtype: torch.dtype) -> KVCache:
        heads = self.case.heads
        shape = LayerShape(
            heads.num_kv_heads,
            heads.key_dim,
            heads.value_dim,
            value_is_key_part=self.case.value_is_key_part,
        )
        layout = BlockLayout(
            layers={0: LayerShape(1, 12, 12), LAYER: shape}, block_size=self.case.block_size, dtype=dtype
        )
        return KVCache(
            layout,
            self.num_blocks,
            torch.full(((self.num_blocks + 1) * layout.block_numel,), torch.nan, dtype=dtype),
        )

    def write_before(self) -> None:
        """Keys and values of each sequence until now. A slot that a window has passed is another's now."""
        written = [index for index, (before, _) in enumerate(self.case.shares) if before]
        if written:
            spans = [(0, self.case.shares[index][0]) for index in written]
            self.ref.begin_step(self.spans(spans, written))
            num_tokens, heads = sum(end for _, end in spans), self.case.heads
            key = self.random(heads.num_kv_heads, num_tokens, heads.key_dim)
            value = self.random(heads.num_kv_heads, num_tokens, heads.value_dim)
            self.ref.write(LAYER, key.float(), value.float())
        self.cache.pool_NE.copy_(self.ref_cache.pool_NE)
        self.ref_cache.pool_NE[0] = 0  # which the reference gathers for places without a key
        if self.options.lifetime.is_limited:
            for row, (before, _) in enumerate(self.case.shares):
                first = self.options.lifetime.first_read(before) // self.case.block_size
                self.tables[row, :first] = self.num_blocks

    def spans(self, spans: list[tuple[int, int]], rows: list[int] | None = None) -> AttentionMetadata:
        tables = self.tables if rows is None else self.tables[rows]
        positions = [np.arange(*span) for span in spans]
        blocks = [table[each // self.case.block_size] for table, each in zip(tables, positions, strict=True)]
        counts = [end - start for start, end in spans]
        return AttentionMetadata(
            num_decodes=counts.count(1) if sorted(counts, key=lambda each: each > 1) == counts else 0,
            query_starts=np.cumsum([0, *counts]),
            seq_lens=np.array([end for _, end in spans]),
            tables=BlockTables.of(tables),
            token_blocks_ST=np.concatenate(blocks).astype(np.int64)[None],
            token_offsets=np.concatenate(positions) % self.case.block_size,
        )

    def expected(self) -> Tensor:
        self.ref.begin_step(self.metadata)
        return self.ref.attend(LAYER, self.query.float(), self.key.float(), self.value.float(), self.options)

    def attend_padded(self, *, num_decodes: int, num_sequences: int, num_tokens: int) -> Tensor:
        """Attend within a batch of these sizes; decodes that are missing stand between those and the rest."""
        has_decodes = self.metadata.num_decodes
        missing = max(0, num_decodes - has_decodes)
        behind = num_sequences - len(self.case.shares) - missing
        counts = np.diff(self.metadata.query_starts)
        counts = np.concatenate([counts[:has_decodes], [0] * missing, counts[has_decodes:], [0] * behind])
        row_of = np.concatenate(
            [
                np.arange(has_decodes),
                np.full(missing, -1),
                np.arange(has_decodes, len(self.case.shares)),
                np.full(behind, -1),
            ]
        )
        nobodys = np.full((1, self.tables.shape[1]), self.num_blocks, dtype=np.int32)
        slots = self.metadata.token_blocks_ST[0] * self.case.block_size + self.metadata.token_offsets
        padding = num_tokens - len(slots)
        batch = AttentionBatch(
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=1000,
            query_starts_R=torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            seq_lens_R=torch.from_numpy(np.append(self.metadata.seq_lens, 0)[row_of].astype(np.int32)),
            block_tables_SCB=torch.from_numpy(np.concatenate([self.tables, nobodys])[row_of])[None],
            slots_ST=torch.from_numpy(np.append(slots, np.full(padding, -1)))[None],
        )
        self.triton.begin_batch(batch)
        return self.triton.attend(
            LAYER, *(_pad(each, padding) for each in (self.query, self.key, self.value)), self.options
        )


def _pad(tensor_HTD: Tensor, padding: int) -> Tensor:
    return torch.nn.functional.pad(tensor_HTD, (0, 0, 0, padding), value=torch.nan)


def check(case: Case) -> None:
    step = Step(case)
    step.triton.begin_step(step.metadata)
    found = step.triton.attend(LAYER, step.query, step.key, step.value, step.options)
    assert_close(found, step.expected())
    torch.testing.assert_close(step.cache.pool_NE[1:].float(), step.ref_cache.pool_NE[1:], equal_nan=True)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


SHARES = st.tuples(
    st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), max_size=2),
).filter(any)
REACHES = st.sampled_from(
    [(None, None), (1, None), (7, None), (16, None), (40, None), (None, 1), (None, 6), (None, 32)]
)
HEADS = st.builds(
    Heads,
    num_kv_heads=st.integers(1, 2),
    num_groups=st.sampled_from([1, 2, 3, 7, 20]),
    key_dim=st.sampled_from([8, 16, 20, 80, 96]),
    value_dim=st.sampled_from([8, 16, 24, 80]),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    SHARES,
    HEADS,
    REACHES,
    st.sampled_from([8, 16, 32, 64]),
    st.sampled_from([None, 3.0]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_paged_attention_is_what_the_reference_says(
    shares, heads, reach, block_size, softcap, has_sinks, dtype
) -> None:
    decodes, prefills = shares
    check(Case(decodes + prefills, heads, block_size, *reach, softcap, has_sinks, dtype))


MIXED = [(0, 1), (33, 1), (12, 1), (5, 7), (0, 3), (40, 20)]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_prompts_longer_than_a_tile_of_keys_or_rows(dtype: torch.dtype) -> None:
    for reach in ({}, {"window": 50}, {"chunk": 48}):
        check(Case([(90, 80)], Heads(1, 2), dtype=dtype, **reach))


@pytest.mark.parametrize("in_windows_only", [False, True])
@pytest.mark.parametrize("reach", [{}, {"window": 20}], ids=str)
def test_tokens_of_a_picture_see_all_of_it_also_beyond_a_tile(
    reach: dict[str, int], in_windows_only: bool
) -> None:
    """The first sequence is a decode behind a picture, the second has two of them, the third none."""
    step = Step(Case([(40, 1), (30, 90), (0, 20)], Heads(2, 3), **reach))
    ends_T = np.zeros(111, dtype=np.int64)
    ends_T[6:56], ends_T[60:75] = 85, 104
    pictures = SeenPictures(ends_T, in_windows_only)
    causal = step.expected()
    step.metadata = replace(step.metadata, pictures=pictures)
    assert torch.equal(step.expected(), causal) is (in_windows_only and not reach)
    step.triton.begin_step(step.metadata)
    found = step.triton.attend(LAYER, step.query, step.key, step.value, step.options)
    assert_close(found, step.expected())


def work_of(step: Step, *, num_processors: int) -> AttentionWork:
    """The work of a whole step on a device of this many processors."""
    step.triton.begin_step(step.metadata)
    step.triton.write(LAYER, step.key, step.value)
    counters = torch.zeros(AttentionWork.num_counters(1000), dtype=torch.int32)
    return AttentionWork(step.triton._work.batch, counters, num_processors)


def attended(step: Step, work: AttentionWork) -> Tensor:
    heads = step.case.heads
    out_THV = torch.full((step.query.shape[1], heads.num_kv_heads * heads.num_groups, heads.value_dim), 5.0)
    arguments = (step.query.transpose(0, 1), step.cache.layers[LAYER], work, step.options)
    attend_decodes(*arguments, out_THV)
    if step.metadata.num_decodes < out_THV.shape[0]:
        attend_prefills(*arguments, out_THV)
    return out_THV


@pytest.mark.parametrize("num_processors", [1, 2, 5, 40])
def test_a_decode_is_put_together_from_the_parts_of_however_many_programs(num_processors: int) -> None:
    for options in ({"softcap": 3.0}, {"window": 100, "has_sinks": True}, {"chunk": 200}):
        step = Step(Case([(250, 1), (3, 1), (64, 1), (0, 1)], Heads(2, 2, 16, 8), **options))
        work = work_of(step, num_processors=num_processors)
        assert_close(attended(step, work), step.expected())
        assert not work.counters.any(), "ready for the next layer"


@pytest.mark.parametrize(
    ("heads", "block_size", "other_layer", "is_in_words"),
    [
        (Heads(2, 3, 48, 32), 8, (1, 12), True),
        (Heads(2, 3, 32, 80), 8, (1, 12), True),
        (Heads(1, 3, 128, 128), 16, (1, 12), True),
        (Heads(2, 3, 16, 32), 8, (1, 12), False),
        (Heads(2, 3, 33, 32), 8, (1, 12), False),
        # Behind an odd number of others, words would begin at odd places.
        (Heads(3, 2, 34, 64), 9, (1, 5), False),
    ],
)
def test_a_cache_of_eight_bits_is_attended_to_as_one_of_its_numbers(
    heads, block_size, other_layer, is_in_words
) -> None:
    step = Step(Case(MIXED, heads, block_size, window=50))
    work = work_of(step, num_processors=3)
    of_floats = step.cache.layers[LAYER]
    for paged in (of_floats.keys, of_floats.values):
        paged.blocks_NHSD.copy_(paged.blocks_NHSD.to(FLOAT8).float())
    expected = attended(step, work)
    other, shape = LayerShape(other_layer[0], other_layer[1], 12), LayerShape(heads[0], *heads[2:])
    layout = BlockLayout(layers={0: other, LAYER: shape}, block_size=block_size, dtype=FLOAT8)
    memory = torch.zeros((step.num_blocks + 1) * layout.block_numel, dtype=torch.uint8)
    step.cache = KVCache(layout, step.num_blocks, memory)
    of_bytes = step.cache.layers[LAYER]
    for name in ("keys", "values"):
        getattr(of_bytes, name).blocks_NHSD.copy_(getattr(of_floats, name).blocks_NHSD)
    assert (attention_tiles.pages(of_bytes, HeadGroups(*heads))[0].dtype is torch.int16) == is_in_words
    assert_close(attended(step, work), expected)


@pytest.mark.parametrize("heads", [Heads(1, 20, 48, 32), Heads(2, 3, 24, 16)])
def test_values_that_lie_in_keys_are_read_there(heads: Heads) -> None:
    check(Case([(70, 1), (3, 1), (0, 9), (21, 12)], heads, value_is_key_part=True))


def test_more_parts_and_heads_than_are_taken_at_once_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_decode, "_PARTS_AT_ONCE", 2)
    step = Step(Case([(250, 1), (90, 1)], Heads(1, 6), has_sinks=True))
    assert_close(attended(step, work_of(step, num_processors=4)), step.expected())


@pytest.mark.skipif(HAS_GPU, reason="a GPU runs programs in an order of its own")
def test_whichever_program_comes_last_puts_the_parts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them in their order; here they come in the opposite one."""
    places: list[int] = []
    set_place = InterpreterBuilder.set_grid_idx

    def set_opposite(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        places.append(builder.grid_dim[0] - 1 - x)
        set_place(builder, places[-1], y, z)

    step = Step(Case([(250, 1), (3, 1), (64, 1)], Heads(1, 2)))
    work = work_of(step, num_processors=3)
    work.list_decodes(step.options.lifetime, 32)
    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_opposite)
    assert_close(attended(step, work), step.expected())
    assert places[0] == max(places) == 5


def test_sequences_and_blocks_beyond_what_one_load_looks_at_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_work, "_AT_ONCE", 4)
    monkeypatch.setattr(attention_decode, "_SEQUENCES_AT_ONCE", 2)
    step = Step(Case([(20 * number, 1) for number in range(6)] + [(5, 7), (40, 20), (0, 2)], Heads(1, 2)))
    for num_decodes in (6, 0):
        work = work_of(step, num_processors=2)
        work.batch = work.batch._replace(num_decodes=num_decodes)
        assert_close(attended(step, work), step.expected())


def test_every_program_has_its_share_and_none_is_launched_for_a_longer_sequence() -> None:
    """One grid for 1,000 tokens and for 131,072; the tiles of all heads are shared within one of another."""
    tiles = attention_decode.decode_tiles(HeadGroups(2, 2, 8, 8), torch.float32)
    grids = []
    for longest in (1000, 131072):
        step = Step(Case([(250, 1), (3, 1), (64, 1)], Heads(2, 2)))
        work = work_of(step, num_processors=2)
        work.batch = work.batch._replace(max_seq_len=longest)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_decode, "decode_kernel", Grids(attention_decode.decode_kernel, grids))
            assert_close(attended(step, work), step.expected())
        listed = work.list_decodes(step.options.lifetime, tiles.num_keys).tolist()
        counts = [-(-length // tiles.num_keys) for length in (251, 4, 65)]
        starts = [0, counts[0], sum(counts[:2]), sum(counts)]
        tokens, lengths, lines = [0, 1, 2], [251, 4, 65], [0, 1, 2]
        assert listed == [3, sum(counts), *starts, *tokens, *lengths, *lines]
    assert grids == [(4,), (4,)]


class Grids:
    """In a kernel's place: notes its grids."""

    def __init__(self, kernel: Any, noted: list[tuple[int, ...]]) -> None:
        self._kernel, self._noted = kernel, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._noted.append(grid)
        return self._kernel[grid]


def test_layers_that_see_alike_share_a_list() -> None:
    step = Step(Case(MIXED, window=20))
    work = work_of(step, num_processors=2)
    windowed, full = Lifetime(LifetimeKind.WINDOW, 20), ALL_TOKENS
    assert work.list_decodes(windowed, 16) is work.list_decodes(windowed, 16)
    assert work.list_decodes(windowed, 16).tolist()[1] == 1 + 3 + 1
    assert work.list_decodes(full, 16).tolist()[1] == 1 + 3 + 1 + 0
    assert work.list_prefills(8) is work.list_prefills(8)


def test_more_query_heads_than_rows_are_attended_in_parts() -> None:
    check(Case([(20, 1), (0, 3)], Heads(1, 70, 8, 8)))


def test_a_sequence_of_one_token_may_stand_among_longer_ones() -> None:
    check(Case([(10, 1), (0, 4), (30, 1), (3, 2)], has_sinks=True))
    check(Case([(0, 2), (30, 1), (3, 2)], has_sinks=True))


@pytest.mark.parametrize(
    ("num_decodes", "num_sequences", "num_tokens"),
    [(3, 6, 33), (3, 8, 40), (0, 6, 33), (0, 9, 50), (5, 12, 34)],
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_padding_changes_nothing_and_gets_zeros(num_decodes, num_sequences, num_tokens, has_sinks) -> None:
    """With decodes that the host knows, that it does not know, and with some missing."""
    step = Step(Case(MIXED, has_sinks=has_sinks))
    found = step.attend_padded(num_decodes=num_decodes, num_sequences=num_sequences, num_tokens=num_tokens)
    expected = step.expected()
    assert_close(found[: len(expected)], expected)
    assert not found[len(expected) :].any()


@pytest.mark.parametrize("num_tokens", [3, 4, 8])
def test_a_decode_graph_larger_than_its_decodes(num_tokens: int) -> None:
    step = Step(Case(MIXED[:3], window=20))
    found = step.attend_padded(num_decodes=num_tokens, num_sequences=num_tokens, num_tokens=num_tokens)
    assert_close(found[:3], step.expected())
    assert not found[3:].any()


def test_a_batch_of_padding_alone_gets_zeros() -> None:
    step = Step(Case([(4, 1)]))
    tables = torch.full((4, 2), step.num_blocks, dtype=torch.int32)
    zeros = torch.zeros(5, dtype=torch.int32)
    for num_decodes in (0, 4):
        slots = torch.full((4,), -1)
        step.triton.begin_batch(
            AttentionBatch(num_decodes, 1, 100, zeros, zeros[:4], tables[None], slots[None])
        )
        queries_THD = torch.full((4, 6, 8), torch.nan)
        assert not step.triton.attend_written(LAYER, queries_THD, step.options).any()


def test_decodes_that_the_host_does_not_know_are_not_walked_through_as_prompts() -> None:
    """One would be a whole tile of rows, and nobody would share its keys among programs."""
    step = Step(Case(MIXED))
    step.triton.begin_step(step.metadata)
    step.triton.write(LAYER, step.key, step.value)
    work = work_of(step, num_processors=1)
    work.batch = work.batch._replace(num_decodes=0)
    out_THV = torch.full((33, 6, 8), 5.0)
    attend_prefills(step.query.transpose(0, 1), step.cache.layers[LAYER], work, step.options, out_THV)
    assert (out_THV[:3] == 5).all()
    assert_close(out_THV[3:], step.expected()[3:])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 20), HEADS, st.sampled_from([8, 16, 64]), st.booleans())
def test_keys_and_values_of_any_strides_reach_their_slots_and_nothing_else(
    num_tokens, heads, block_size, is_spread
) -> None:
    step = Step(Case([(0, 3 * block_size)], heads, block_size))
    slots_T = torch.randperm(3 * block_size, generator=step.generator)[:num_tokens] + block_size
    slots_T[num_tokens // 2] = -1
    key, value = (
        _spread(step.random(heads.num_kv_heads, num_tokens, dim), is_spread)
        for dim in (heads.key_dim, heads.value_dim)
    )
    expected = step.new_cache(torch.float32)
    write_kv(key, value, step.cache.layers[LAYER], slots_T)
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            expected.layers[LAYER].keys.blocks_NHSD[block, :, offset] = key[:, token]
            expected.layers[LAYER].values.blocks_NHSD[block, :, offset] = value[:, token]
    torch.testing.assert_close(step.cache.pool_NE, expected.pool_NE, rtol=0, atol=0, equal_nan=True)


def _spread(tensor_HTD: Tensor, is_spread: bool) -> Tensor:
    """The same numbers with other strides, in the last dimension as well."""
    return tensor_HTD.permute(2, 1, 0).contiguous().permute(2, 1, 0) if is_spread else tensor_HTD


def test_queries_of_any_strides_are_attended_for() -> None:
    step = Step(Case(MIXED))
    step.triton.begin_step(step.metadata)
    query = _spread(step.query, is_spread=True)
    assert_close(step.triton.attend(LAYER, query, step.key, step.value, step.options), step.expected())
