"""Draft of a plan: a step while it is being planned."""

from dataclasses import dataclass, field

from scheduler.draft_messages import DraftChoice
from scheduler.input_messages import EncoderInput
from scheduler.messages import (
    BlockCopy,
    GroupBlocks,
    NewSequence,
    Preemption,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    StateTap,
)
from scheduler.step.budget import SchedulingBudget


@dataclass(slots=True, eq=False)
class PlanDraft:
    """Decisions of one step. They only grow: none is undone in the same step."""

    budget: SchedulingBudget
    now_s: float
    num_blocks_for_growth: int | None = None
    """Blocks that drafts leave alone; counted when first asked."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    chunks: list[ScheduledSequence] = field(default_factory=list)
    urgent: set[SequenceId] = field(default_factory=set)
    """Sequences that were admitted before the queue was served: they have their share."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    new_blocks: dict[SequenceId, GroupBlocks] = field(default_factory=dict)
    draft_token_ids: dict[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    draft_choice: DraftChoice | None = None
    num_drafts_wanted: dict[SequenceId, int] = field(default_factory=dict)
    encoder_inputs: dict[SequenceId, tuple[EncoderInput, ...]] = field(default_factory=dict)
    encoder_slice_s: float = 0.0
    preemptions: list[Preemption] = field(default_factory=list)
    released: list[SequenceId] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    taps: list[StateTap] = field(default_factory=list)

    def add_blocks(self, sequence_id: SequenceId, blocks: GroupBlocks) -> None:
        """Note blocks for a sequence that the worker knows, behind those that it was given in this plan."""
        before = self.new_blocks.get(sequence_id)
        if before is not None:
            blocks = tuple([known + more for known, more in zip(before, blocks, strict=True)])
        self.new_blocks[sequence_id] = blocks

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.swap_out or self.encoder_inputs)

    def finished(self, step: int, released: tuple[SequenceId, ...]) -> SchedulerOutput:
        chunks = self.chunks
        return SchedulerOutput(  # in the order of its fields: by name it takes twice as long
            step,
            released,
            tuple(self.new_sequences),
            self.new_blocks,
            tuple(self.decodes + chunks) if chunks else tuple(self.decodes),
            len(self.decodes) + sum([share.num_tokens for share in chunks]),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.copies),
            tuple(self.preemptions),
            self.draft_token_ids,
            self.encoder_inputs,
            self.draft_choice,
            tuple(self.taps),
            self.num_drafts_wanted,
            self.encoder_slice_s,
        )


def plan_of_decodes(
    step: int,
    released: tuple[SequenceId, ...],
    shares: tuple[ScheduledSequence, ...],
    grown: dict[SequenceId, GroupBlocks],
) -> SchedulerOutput:
    """Build a plan with nothing in it but shares and blocks, in half the time of the class's constructor."""
    return tuple.__new__(SchedulerOutput, (step, released, (), grown, shares, len(shares), *_NOTHING_ELSE))


_NOTHING_ELSE = tuple(SchedulerOutput._field_defaults.values())
