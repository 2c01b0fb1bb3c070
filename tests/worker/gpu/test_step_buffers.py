"""Values that the host packs are those that the device reads, at addresses that do not change."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from scheduler.cache_groups import CacheGroup, Lifetime, LifetimeKind
from scheduler.messages import (
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.worker.gpu.interpreted_gpu import InterpretedGpu
from worker.attention.interface import AttentionMetadata, BlockTables
from worker.devices.device import DeviceEvent
from worker.gpu.kernels.input_fill import change_tables
from worker.gpu.step_buffers import BatchSizes, Limits, StepBuffers
from worker.sampling.draw_fields import LINE, NOBODY, NUM_FIELDS, PLACE
from worker.steps.inputs import StepInputs, build_inputs
from worker.steps.row_table import RowTable
from worker.worker_config import WorkerConfig

NUM_STRIPES = 2
LIMITS = Limits(
    num_tokens=40, num_sequences=6, num_blocks=9, block_size=4, num_stripes=NUM_STRIPES, num_state_blocks=3
)


class TransferLog(InterpretedGpu):
    """Copies to the device arrive when an event is waited for, as late as they may; memory begins dirty."""

    def __init__(self) -> None:
        super().__init__(WorkerConfig(model_path=""))
        self.pinned_memory: list[torch.Tensor] = []
        self.waited: list[int] = []

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.pinned_memory.append(super().pinned(numel, dtype).fill_(7))
        return self.pinned_memory[-1]

    def record(self) -> DeviceEvent:
        return _Recorded(self, super().record())


class _Recorded:
    def __init__(self, log: TransferLog, event: DeviceEvent) -> None:
        self._log, self._event = log, event
        self._number = log.num_events

    def wait(self) -> None:
        self._log.waited.append(self._number)
        self._event.wait()


def make_inputs(query_lens: list[int], seed: int) -> StepInputs:
    """Decodes first. Every second sequence draws."""
    generator = np.random.default_rng(seed)
    lens = np.array(sorted(query_lens, key=lambda length: length > 1), dtype=np.int64)
    ends = np.cumsum(lens)
    num_tokens, num_sequences = int(ends[-1]), len(lens)
    seq_lens = lens + generator.integers(0, 36 - lens.max() + 1, num_sequences)
    drawing = list(range(0, num_sequences, 2))
    longest = -(-int(seq_lens.max()) // LIMITS.block_size)
    shape = (NUM_STRIPES, num_sequences, longest)
    return StepInputs(
        input_ids_T=generator.integers(-1, 1000, num_tokens),
        position_ids_T=generator.integers(0, 36, num_tokens),
        rows_T=np.repeat(generator.permutation(LIMITS.num_sequences)[:num_sequences], lens),
        logits_indices_N=ends[drawing] - 1,
        metadata=AttentionMetadata(
            num_decodes=int((lens == 1).sum()),
            query_starts=np.concatenate([[0], ends]),
            seq_lens=seq_lens,
            tables=BlockTables.of(generator.integers(0, 1000, shape, dtype=np.int32)),
            token_blocks_ST=generator.integers(1, 1000, (NUM_STRIPES, num_tokens)),
            token_offsets=generator.integers(0, LIMITS.block_size, num_tokens),
            state_blocks=generator.integers(0, 1000, (num_sequences, LIMITS.num_state_blocks)),
        ),
        sequence_ids=[SequenceId(index) for index in drawing],
        rows=[int(row) for row in generator.permutation(LIMITS.num_sequences)[: len(drawing)]],
        shares=[],
    )


def draws_of(inputs: StepInputs) -> NDArray[np.float64]:
    return np.random.default_rng(len(inputs.rows)).random((len(inputs.rows), NUM_FIELDS))


def fill(buffers: StepBuffers, inputs: StepInputs, sizes: BatchSizes) -> None:
    """Fill as a step does: its first kernel brings new blocks into the tables."""
    buffers.fill(inputs, draws_of(inputs), sizes)
    batch = buffers.view(sizes)
    change_tables(batch.changes, batch.attention.block_tables_SCB)


def check(buffers: StepBuffers, inputs: StepInputs, sizes: BatchSizes) -> None:
    batch, metadata = buffers.view(sizes), inputs.metadata
    num_tokens, num_sequences = len(inputs.input_ids_T), len(metadata.seq_lens)
    num_logits = len(inputs.rows)
    ids = batch.tokens.input_ids_1T[0].tolist()
    assert ids == [*inputs.input_ids_T, *[0] * (sizes.num_tokens - num_tokens)]
    assert batch.tokens.position_ids[0, :num_tokens].tolist() == inputs.position_ids_T.tolist()
    assert not batch.tokens.position_ids[0, num_tokens:].any()
    assert batch.rows_T[:num_tokens].tolist() == inputs.rows_T.tolist()
    assert set(batch.rows_T[num_tokens:].tolist()) <= {LIMITS.num_sequences}, "padding is of no sequence"
    padding = sizes.num_logits - num_logits
    assert batch.tokens.logits_indices_N.tolist() == [*inputs.logits_indices_N, *[0] * padding]
    assert batch.rows_N.tolist() == [*inputs.rows, *[LIMITS.num_sequences] * padding]
    assert batch.draws_NF[:num_logits].tolist() == draws_of(inputs).tolist()
    assert batch.draws_NF[num_logits:, LINE].tolist() == [NOBODY] * padding
    assert batch.draws_NF[num_logits:, PLACE].tolist() == list(range(num_logits, sizes.num_logits))
    attention = batch.attention
    padding = [-1] * (sizes.num_tokens - num_tokens)
    for slots_T, blocks_T in zip(attention.slots_ST, metadata.token_blocks_ST, strict=True):
        assert slots_T.tolist() == [*(blocks_T * LIMITS.block_size + metadata.token_offsets), *padding]
    padding = sizes.num_sequences - num_sequences
    assert attention.query_starts_R.tolist() == [*metadata.query_starts, *[num_tokens] * padding]
    assert attention.seq_lens_R.tolist() == [*metadata.seq_lens, *[0] * padding]
    if metadata.state_blocks.size:
        assert attention.state_blocks_RF is not None
        assert attention.state_blocks_RF[:num_sequences].tolist() == metadata.state_blocks.tolist()
        assert not attention.state_blocks_RF[num_sequences:].any()
    assert attention.table_rows_R is not None
    assert attention.table_rows_R.tolist() == [*metadata.tables.rows_R, *[0] * padding]
    for stripe, table_CB in enumerate(attention.block_tables_SCB):
        expected = metadata.tables.gathered(stripe)
        tables = table_CB[attention.table_rows_R[:num_sequences].long()]
        assert tables[:, : expected.shape[1]].tolist() == expected.tolist()
        assert table_CB.stride() == (LIMITS.num_blocks, 1)
    for tensor in (batch.tokens.input_ids_1T, batch.tokens.position_ids, attention.slots_ST, batch.draws_NF):
        assert tensor.data_ptr() % 16 == 0


steps = st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 1000))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(steps, st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
def test_a_step_is_read_as_it_was_written_with_its_padding(drawn: list[Any]) -> None:
    buffers = StepBuffers(TransferLog(), LIMITS)
    for (query_lens, seed), more_tokens, more_sequences in drawn:
        inputs = make_inputs(query_lens, seed)
        sizes = BatchSizes(
            num_tokens=len(inputs.input_ids_T) + more_tokens,
            num_sequences=min(len(query_lens) + more_sequences, LIMITS.num_sequences),
            num_logits=min(len(inputs.rows) + more_sequences, LIMITS.num_sequences),
            num_decodes=0,
            max_query_len=6,
            max_seq_len=36,
        )
        fill(buffers, inputs, sizes)
        check(buffers, inputs, sizes)


def test_steps_of_the_same_sizes_stand_at_the_same_addresses() -> None:
    buffers = StepBuffers(TransferLog(), LIMITS)
    sizes = BatchSizes(16, 4, 4, 0, 6, 36)
    before = buffers.view(sizes)
    for seed in range(3):
        inputs = make_inputs([1, 2, 3], seed)
        fill(buffers, inputs, sizes)
        check(buffers, inputs, sizes)
    after = buffers.view(sizes)
    places = [
        [
            tensor.data_ptr()
            for tensor in (*each.attention[3:-3], *each.tokens[:3], *each[2:-1], *each.changes)
        ]
        for each in (before, after)
    ]
    assert places[0] == places[1]


def test_pinned_memory_is_written_again_only_when_the_device_has_read_it() -> None:
    device = TransferLog()
    buffers = StepBuffers(device, LIMITS)
    assert len(device.pinned_memory) == 2
    sizes = BatchSizes(16, 4, 4, 0, 6, 36)
    for seed in range(5):
        fill(buffers, make_inputs([1, 2], seed), sizes)
    assert device.waited == [1, 2, 3], "of five copies, those before the last two"


def test_the_step_before_can_still_be_on_its_way_while_one_is_packed() -> None:
    """Two pieces in turn: what was packed first is not written over by the second step."""
    device = TransferLog()
    buffers = StepBuffers(device, LIMITS)
    sizes = BatchSizes(16, 4, 4, 0, 6, 36)
    fill(buffers, make_inputs([1, 2], seed=1), sizes)
    first = [memory.clone() for memory in device.pinned_memory]
    fill(buffers, make_inputs([2, 3], seed=2), sizes)
    assert torch.equal(device.pinned_memory[0], first[0])
    assert not torch.equal(device.pinned_memory[1], first[1])


def test_a_step_of_padding_alone_writes_nothing_and_attends_to_nothing() -> None:
    buffers = StepBuffers(TransferLog(), LIMITS)
    sizes = BatchSizes(8, 4, 4, 0, 8, 36)
    fill(buffers, make_inputs([1, 2, 3], seed=3), sizes)
    buffers.fill_with_padding(sizes)
    batch = buffers.view(sizes)
    assert batch.attention.state_blocks_RF is not None
    assert not batch.attention.state_blocks_RF.any()
    assert batch.attention.slots_ST.tolist() == [[-1] * 8] * NUM_STRIPES
    assert batch.attention.seq_lens_R.tolist() == [0] * 4
    assert batch.attention.query_starts_R.tolist() == [0] * 5
    assert batch.rows_N.tolist() == [LIMITS.num_sequences] * 4
    assert batch.draws_NF[:, LINE].tolist() == [NOBODY] * 4
    assert not batch.changes.starts_X.any()
    assert not batch.tokens.input_ids_1T.any()
    assert not batch.tokens.logits_indices_N.any()


def test_the_memory_counted_beforehand_is_what_is_allocated() -> None:
    for limits in (LIMITS, Limits(2048, 256, 513, 16), Limits(8192, 512, 8193, 16)):
        buffers = StepBuffers(TransferLog(), limits)
        taken = buffers._memory.nbytes + buffers._tables_SCB.nbytes
        assert taken == StepBuffers.num_bytes(limits)


def step_of_rows(table: RowTable, rows: list[int]) -> StepInputs:
    """A decode of each row's last token, as the worker builds it."""
    sequence_ids = [
        next(each for each in range(100) if table.row_of(SequenceId(each)) == row) for row in rows
    ]
    plan = SchedulerOutput(
        step=0,
        released=(),
        new_sequences=(),
        new_blocks={},
        scheduled=tuple(
            ScheduledSequence(SequenceId(each), int(table.num_tokens_C[row]) - 1, 1, samples=False)
            for each, row in zip(sequence_ids, rows, strict=True)
        ),
        num_scheduled_tokens=len(rows),
    )
    inputs = build_inputs(plan, table, failures={})
    assert inputs is not None
    return inputs


def add(table: RowTable, sequence_id: int, blocks: list[int]) -> int:
    tokens = tuple(range(len(blocks) * LIMITS.block_size - 1))
    params = SamplingParams()
    return table.add(
        NewSequence(
            sequence_id=SequenceId(sequence_id),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            params=params,
            tables=(NewTable(tuple(BlockId(each) for each in blocks)),) * NUM_STRIPES,
        )
    )


def test_only_blocks_that_are_new_to_a_row_travel() -> None:
    buffers = StepBuffers(TransferLog(), LIMITS)
    groups = (CacheGroup(), CacheGroup(Lifetime(LifetimeKind.WINDOW, 8)))
    table = RowTable(max_num_seqs=6, max_model_len=35, block_size=4, num_blocks=99, groups=groups)
    sent = []

    def run(rows: list[int]) -> None:
        inputs = step_of_rows(table, rows)
        sizes = BatchSizes(6, 6, 6, 6, 1, 36)
        fill(buffers, inputs, sizes)
        check(buffers, inputs, sizes)
        sent.append(int(buffers.view(sizes).changes.starts_X[-1]))

    first, second = add(table, 1, [7, 8, 9]), add(table, 2, [5])
    run([second, first])
    run([first, second])
    table.grow(SequenceId(1), ((BlockId(20),), (BlockId(20),)))
    run([second])
    third = add(table, 3, [30, 31])
    run([third, second, first])
    table.release(SequenceId(1))
    assert add(table, 4, [40, 41]) == first, "another sequence, with other blocks, in the row of the first"
    run([first, second, third])
    table.release(SequenceId(4))
    add(table, 4, [50, 51])
    run([first])
    assert sent == [NUM_STRIPES * num for num in (4, 0, 0, 3, 2, 2)]
