"""Why things are as they are, for a person who asks.

Owns: the report on each live sequence. Built on request only; nothing here is touched by a step.
"""

from scheduler.messages import SequenceReport, WaitReason
from scheduler.sequence import Sequence, Status


def report_on(
    running: list[Sequence], waiting: list[Sequence], reason: WaitReason, *, now_s: float
) -> list[SequenceReport]:
    """The running line, then the waiting line by rank. O(n log n)."""
    line = sorted(waiting, key=lambda seq: seq.rank)
    return [
        _report(seq, place, "" if seq.status is Status.RUNNING else reason.value, now_s)
        for sequences in (running, line)
        for place, seq in enumerate(sequences)
    ]


def _report(seq: Sequence, place: int, reason: str, now_s: float) -> SequenceReport:
    return SequenceReport(
        sequence_id=seq.sequence_id,
        state=seq.status.value,
        place=place,
        priority=seq.priority,
        rank=seq.rank,
        tenant=seq.tenant,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_output_tokens=seq.num_output_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_blocks=len(seq.block_ids) - seq.num_passed_blocks,
        num_host_blocks=sum(1 for block in seq.host_block_ids if block),
        num_preemptions=seq.num_preemptions,
        num_bypasses=seq.num_bypasses,
        age_s=now_s - seq.admitted_s,
        wait_reason=reason,
    )
