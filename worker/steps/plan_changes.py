"""What a plan changes before anything is computed, whatever is computed then.

Owns: the order: release, copy, add, grow; and who fails because a block of theirs did not arrive.
Never: decides; a plan that is wrong about one sequence fails that one.
"""

from typing import Protocol

from scheduler.messages import BlockId, NewSequence, SchedulerOutput, SequenceId
from worker.steps.row_table import RowTable
from worker.worker_errors import SequenceRefused


class Table(Protocol):
    """The sequences that a worker knows, and the blocks that are theirs."""

    rows: RowTable

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """Carry out the plan's copies. Returns the blocks whose content did not arrive, with the reason."""

    def add(self, new: NewSequence) -> None:
        """Raises SequenceRefused."""

    def release(self, sequence_id: SequenceId) -> None:
        """Forget it; a sequence that is not known is passed over."""


def apply_changes(plan: SchedulerOutput, table: Table, failures: dict[SequenceId, str]) -> None:
    """Bring the table to what the plan computes on. Explains in `failures` who cannot be in it."""
    for sequence_id in plan.released:
        table.release(sequence_id)
    # Before anything else is written: blocks that go out may belong to others from this step on.
    lost_blocks = table.copy_blocks(plan)
    for new in plan.new_sequences:
        # A step that failed half-way may have left a row behind.
        table.release(new.sequence_id)
        try:
            _check_copied(new, lost_blocks)
            table.add(new)
        except SequenceRefused as error:
            failures[new.sequence_id] = str(error)
    for sequence_id, block_ids in plan.new_blocks.items():
        try:
            table.rows.grow(sequence_id, block_ids)
        except SequenceRefused as error:
            failures.setdefault(sequence_id, str(error))


def _check_copied(new: NewSequence, lost_blocks: dict[BlockId, str]) -> None:
    """Raise SequenceRefused for a sequence whose keys and values did not arrive."""
    for block_id in new.block_ids if lost_blocks else ():
        if block_id in lost_blocks:
            raise SequenceRefused(f"block {block_id}: {lost_blocks[block_id]}")
