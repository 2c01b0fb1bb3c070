"""Draft of a plan: a step while it is being planned."""

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


class PlanDraft:
    """Decisions of one step. They only grow: none is undone in the same step."""

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "decodes",
        "draft_choice",
        "draft_token_ids",
        "encoder_inputs",
        "encoder_slice_s",
        "new_blocks",
        "new_sequences",
        "now_s",
        "num_blocks_for_growth",
        "num_drafts_wanted",
        "preemptions",
        "released",
        "swap_in",
        "swap_out",
        "taps",
        "urgent",
    )

    def __init__(self, budget: SchedulingBudget, now_s: float) -> None:
        self.budget = budget
        self.now_s = now_s
        self.num_blocks_for_growth: int | None = None  # that drafts leave alone; counted when first asked
        self.decodes: list[ScheduledSequence] = []
        self.chunks: list[ScheduledSequence] = []
        self.urgent: set[SequenceId] = set()  # admitted before the queue was served: they have their share
        self.new_sequences: list[NewSequence] = []
        self.new_blocks: dict[SequenceId, GroupBlocks] = {}
        self.draft_token_ids: dict[SequenceId, tuple[int, ...]] = {}
        self.draft_choice: DraftChoice | None = None
        self.num_drafts_wanted: dict[SequenceId, int] = {}
        self.encoder_inputs: dict[SequenceId, tuple[EncoderInput, ...]] = {}
        self.encoder_slice_s = 0.0
        self.preemptions: list[Preemption] = []
        self.released: list[SequenceId] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.copies: list[BlockCopy] = []
        self.taps: list[StateTap] = []

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
