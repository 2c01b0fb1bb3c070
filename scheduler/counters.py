"""Counters and gauges of a scheduler, for the metrics."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.messages import Preemption, PreemptionCause, WaitReason


def _exported(name: str, text: str) -> int:
    """Declare a counter that is exported, with a text for its readers."""
    number: int = field(default=0, metadata={"name": name, "text": text})
    return number


@dataclass(slots=True, kw_only=True)
class Counters:
    """Events since the start. Counters only grow."""

    num_added: int = 0
    """Sequences."""
    num_steps: int = _exported("engine_steps", "Steps that computed something")
    num_scheduled_tokens: int = 0
    """Tokens of all steps."""
    num_preemptions: dict[tuple[PreemptionCause, bool], int] = field(
        default_factory=lambda: {(cause, swap): 0 for cause in PreemptionCause for swap in (False, True)}
    )
    """Preemptions by their cause, and by whether the sequence was swapped."""
    num_swap_space_full: int = _exported(
        "swap_space_full", "Preemptions that recompute only because there was no room to swap"
    )
    num_stalls: int = _exported(
        "scheduler_stalls", "Requests failed because the scheduler found no way to serve them"
    )
    num_out_of_memory: int = _exported(
        "step_out_of_memory", "Steps made again in parts: the device had too little memory for the whole"
    )
    num_prefix_queries: int = _exported("prefix_cache_queries", "Prompt tokens looked up")
    num_prefix_hits: int = _exported("prefix_cache_hits", "Prompt tokens found, and so not computed")
    num_prefix_host_hits: int = _exported(
        "prefix_cache_host_hits", "Prompt tokens found in the swap space only, and copied back"
    )
    num_restore_lost_tokens: int = _exported(
        "restore_lost_tokens", "Prompt tokens computed again because a window or a state behind them was gone"
    )
    num_restore_points: int = _exported(
        "restore_points", "States that were kept in the middle of a prompt, for later ones"
    )
    num_kept_host_blocks: int = _exported(
        "prefix_cache_host_stores", "Blocks copied to the swap space when the device gave them up"
    )
    num_recomputed_tokens: int = _exported("recomputed_tokens", "Tokens computed again after a preemption")
    num_draft_tokens: int = _exported("draft_tokens", "Guessed tokens that were verified")
    num_accepted_tokens: int = _exported("accepted_draft_tokens", "Of these, those that held")
    num_verified_shares: int = _exported("verified_shares", "Sequences in steps, with guesses for them")
    num_encoded: int = _exported("encoder_inputs", "Pictures of prompts that were encoded")
    num_encoder_hits: int = _exported(
        "encoder_cache_hits", "Pictures of prompts that had been encoded before, and were found"
    )
    encoder_s: float = _exported("encoder_seconds", "Time that encoding pictures took of steps")
    num_accepted_by_place: list[int] = field(default_factory=list)
    """Accepted tokens by their place among the drafts of their share."""

    def note_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a share whose first `num_accepted` drafts were right."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_verified_shares += num_drafts > 0
        by_place = self.num_accepted_by_place
        by_place += [0] * (num_accepted - len(by_place))
        for place in range(num_accepted):
            by_place[place] += 1

    def note_preemption(self, preemption: Preemption) -> None:
        self.num_preemptions[preemption.cause, preemption.was_swapped] += 1


@dataclass(slots=True, kw_only=True)
class SchedulerStats(Counters):
    """Gauges of this moment, and a copy of the counters."""

    num_running: int = 0
    num_waiting: int = 0
    wait_reason: WaitReason = WaitReason.STEP
    num_swapped: int = 0
    num_used_blocks: int = 0
    num_blocks: int
    num_used_host_blocks: int = 0
    num_host_blocks: int = 0


class GroupUse(NamedTuple):
    """Use of the blocks by one group of layers."""

    name: str
    num_held: int
    """Blocks that sequences hold."""
    num_findable: int
    """Blocks whose content can be found, those that sequences hold included."""
