"""The worker's sequences, and a plan's changes to them before a step is computed.

Owns: the order: release, copy, add, grow; the failure of a sequence whose blocks did not arrive.
Never: decides; a plan that is wrong about one sequence fails that sequence.
"""

from itertools import chain
from typing import Protocol

from scheduler.messages import BlockId, NewSequence, SchedulerOutput, SequenceId
from worker.adapters.store import AdapterStore
from worker.steps.row_table import RowTable
from worker.worker_errors import SequenceRefused


class SequenceTable(Protocol):
    """Sequences that a worker knows, and their blocks."""

    rows: RowTable

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """Carry out the plan's copies. Returns the blocks whose content did not arrive, with the reason."""

    def add(self, new: NewSequence) -> None:
        """Admit a sequence. Raises SequenceRefused."""

    def release(self, sequence_id: SequenceId) -> None:
        """Forget a sequence; an unknown one is ignored."""


def apply_changes(plan: SchedulerOutput, table: SequenceTable, failures: dict[SequenceId, str]) -> None:
    """Bring the table to the state that the plan computes on; sequences that cannot get there fail."""
    for sequence_id in plan.released:
        table.release(sequence_id)
    # Before any other write: blocks that are swapped out may belong to other sequences from this step on.
    lost_blocks = table.copy_blocks(plan)
    for new in plan.new_sequences:
        # A step that failed half-way may have left a row behind.
        table.release(new.sequence_id)
        try:
            _check_copied(new, lost_blocks)
            table.add(new)
        except SequenceRefused as error:
            failures[new.sequence_id] = str(error)
    for sequence_id, blocks in plan.new_blocks.items():
        try:
            table.rows.grow(sequence_id, blocks)
        except SequenceRefused as error:
            failures.setdefault(sequence_id, str(error))


def add_row(rows: RowTable, adapters: AdapterStore | None, new: NewSequence) -> int:
    """Give a sequence a row, and the row its adapter. Raises SequenceRefused and changes nothing."""
    if adapters is None and new.adapter:
        raise SequenceRefused(f"adapter {new.adapter}: this model is computed without adapters")
    row = rows.add(new)
    if adapters is not None:
        try:
            adapters.seat(row, new.adapter)
        except SequenceRefused:
            rows.release(new.sequence_id)
            raise
    return row


def _check_copied(new: NewSequence, lost_blocks: dict[BlockId, str]) -> None:
    """Raise SequenceRefused for a sequence whose keys and values did not arrive."""
    for block_id in chain.from_iterable([each.block_ids for each in new.tables]) if lost_blocks else ():
        if block_id in lost_blocks:
            raise SequenceRefused(f"block {block_id}: {lost_blocks[block_id]}")
