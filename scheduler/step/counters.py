"""What the scheduler has counted since its start; the metrics are made of it."""

from dataclasses import dataclass, field

from scheduler.messages import Preemption, PreemptionCause, PreemptionCount


@dataclass(slots=True)
class Counters:
    """Only grow."""

    num_added: int = 0
    num_steps: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_host_hits: int = 0
    num_recomputed_tokens: int = 0
    num_stalls: int = 0
    num_out_of_memory: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: dict[tuple[PreemptionCause, bool], int] = field(
        default_factory=lambda: {(cause, swap): 0 for cause in PreemptionCause for swap in (False, True)}
    )

    def note_preemption(self, preemption: Preemption) -> None:
        self.num_preemptions[preemption.cause, preemption.was_swapped] += 1

    def preemptions(self) -> tuple[PreemptionCount, ...]:
        return tuple(PreemptionCount(*key, num) for key, num in self.num_preemptions.items())
