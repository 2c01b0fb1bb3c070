"""Drafts in the rows of a step that verifies them.

Owns: the check of a plan's drafts; a sequence with a wrong one fails alone.
Never: samples (sampling/row_sampler.py).
"""

from scheduler.messages import SchedulerOutput, SequenceId
from worker.steps.row_table import RowTable
from worker.worker_errors import SequenceRefused


def hold_drafts(
    plan: SchedulerOutput, rows: RowTable, vocab_size: int, failures: dict[SequenceId, str]
) -> dict[int, tuple[int, ...]]:
    """Append the plan's drafts to their rows; return them by row, for `RowTable.drop_drafts`."""
    held = {}
    for sequence_id, drafts in plan.draft_token_ids.items():
        try:
            _check(drafts, vocab_size)
            held[rows.hold_drafts(sequence_id, drafts)] = drafts
        except SequenceRefused as error:
            failures.setdefault(sequence_id, str(error))
    return held


def _check(drafts: tuple[int, ...], vocab_size: int) -> None:
    """Raise SequenceRefused for a draft that the model has no embedding for."""
    for draft in drafts:
        if not 0 <= draft < vocab_size:
            raise SequenceRefused(f"draft {draft}: the model knows tokens 0 to {vocab_size - 1}")
