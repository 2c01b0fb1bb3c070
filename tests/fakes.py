"""Stand-ins that behave: a worker without a model that still notices every misplaced block."""

from dataclasses import dataclass, field

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    ServiceTerms,
)
from scheduler.sequence import Sequence

FAKE_VOCAB = 97


def next_token(token_ids: list[int]) -> int:
    """The fake model: any token anywhere in the prefix changes what comes next."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % 1_000_003
    return state % FAKE_VOCAB


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """What the fake model generates for a prompt that is alone in the world."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


class WorkerExploded(Exception):
    """Injected."""


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[BlockId]


@dataclass
class FakeWorker:
    """Obeys plans as the real worker does, over a cache whose slots hold (token, position).

    Before a token attends, every slot before it must hold the token that belongs there: a block that was
    freed too early, shared wrongly or never computed is found at once.
    """

    block_size: int
    slots: dict[tuple[BlockId, int], tuple[int, int]] = field(default_factory=dict)
    host_slots: dict[tuple[BlockId, int], tuple[int, int] | None] = field(default_factory=dict)
    rows: dict[SequenceId, _Row] = field(default_factory=dict)
    plans: list[SchedulerOutput] = field(default_factory=list)
    explode_next: bool = False
    poisoned: set[SequenceId] = field(default_factory=set)
    """Sequences that fail alone when they next sample."""
    silent: set[SequenceId] = field(default_factory=set)
    """Sequences for which the worker forgets to answer."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        for sequence_id in plan.released:
            self.rows.pop(sequence_id, None)
        if self.explode_next:
            self.explode_next = False
            raise WorkerExploded
        self._copy(plan)
        for new in plan.new_sequences:
            self._add_row(new)
        for sequence_id, blocks in plan.new_blocks.items():
            self.rows[sequence_id].block_ids.extend(blocks)
        for share in plan.scheduled:
            self._write(self.rows[share.sequence_id], share.start, share.num_tokens)
        token_ids: dict[SequenceId, tuple[int, ...]] = {}
        failures: dict[SequenceId, str] = {}
        for share in plan.scheduled:
            row = self.rows[share.sequence_id]
            end = share.start + share.num_tokens
            self._check_prefix(row, end)
            assert share.samples == (end == len(row.token_ids)), "samples exactly at the end of what is known"
            if not share.samples or share.sequence_id in self.silent:
                continue
            if share.sequence_id in self.poisoned:
                failures[share.sequence_id] = "poisoned"
                continue
            row.token_ids.append(next_token(row.token_ids))
            token_ids[share.sequence_id] = (row.token_ids[-1],)
        return ModelRunnerOutput(token_ids=token_ids, logprobs={}, failures=failures)

    def _copy(self, plan: SchedulerOutput) -> None:
        for source, target in plan.swap_out:
            for offset in range(self.block_size):
                self.host_slots[target, offset] = self.slots.get((source, offset))
        for source, target in plan.swap_in:
            for offset in range(self.block_size):
                held = self.host_slots[source, offset]
                self.slots.pop((target, offset), None)
                if held is not None:
                    self.slots[target, offset] = held

    def _add_row(self, new: NewSequence) -> None:
        assert new.sequence_id not in self.rows, "the row was never released"
        self.rows[new.sequence_id] = _Row(list(new.token_ids), list(new.block_ids))

    def _write(self, row: _Row, start: int, num_tokens: int) -> None:
        for position in range(start, start + num_tokens):
            self.slots[self._slot(row, position)] = (row.token_ids[position], position)

    def _check_prefix(self, row: _Row, end: int) -> None:
        for position in range(end):
            held = self.slots.get(self._slot(row, position))
            assert held == (row.token_ids[position], position), f"slot of position {position} holds {held}"

    def _slot(self, row: _Row, position: int) -> tuple[BlockId, int]:
        return row.block_ids[position // self.block_size], position % self.block_size


def make_sequence(
    sequence_id: int, prompt: list[int], *, max_tokens: int = 4, client_index: int = 0, **changes: object
) -> Sequence:
    """`changes` are fields of SamplingParams or of ServiceTerms."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__slots__}
    params = SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | sampling))
    terms = ServiceTerms(**changes)
    return Sequence(SequenceId(sequence_id), tuple(prompt), params, terms, client_index=client_index)
