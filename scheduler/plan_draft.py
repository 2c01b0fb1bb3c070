"""A step while it is being planned.

Owns: what was decided so far, and the budget that is left.
Never: decides.
"""

from scheduler.budget import SchedulingBudget
from scheduler.messages import (
    BlockCopy,
    BlockId,
    NewSequence,
    Preemption,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)


class PlanDraft:
    """Only grows: nothing that is in it is undone in the same step."""

    __slots__ = (
        "budget",
        "chunks",
        "decodes",
        "new_blocks",
        "new_sequences",
        "now_s",
        "preemptions",
        "released",
        "swap_in",
        "swap_out",
        "urgent",
    )

    def __init__(self, budget: SchedulingBudget, now_s: float) -> None:
        self.budget = budget
        self.now_s = now_s
        self.decodes: list[ScheduledSequence] = []
        self.chunks: list[ScheduledSequence] = []
        self.urgent: set[SequenceId] = set()  # admitted before the line was served: they have their share
        self.new_sequences: list[NewSequence] = []
        self.new_blocks: dict[SequenceId, tuple[BlockId, ...]] = {}
        self.preemptions: list[Preemption] = []
        self.released: list[SequenceId] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.swap_out)

    def finished(self, step: int, released: tuple[SequenceId, ...]) -> SchedulerOutput:
        return SchedulerOutput(
            step=step,
            released=released,
            new_sequences=tuple(self.new_sequences),
            new_blocks=self.new_blocks,
            scheduled=tuple(self.decodes + self.chunks),
            num_scheduled_tokens=len(self.decodes) + sum(share.num_tokens for share in self.chunks),
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            preemptions=tuple(self.preemptions),
        )
