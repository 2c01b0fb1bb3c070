"""What the scheduler is told once, at its birth."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isinf


class SchedulingPolicy(StrEnum):
    """By which rank sequences are served; see policy.py."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class OrderAmongEquals(StrEnum):
    """Who of equal priority is first; under FCFS all are equal."""

    ARRIVAL = "arrival"
    DEADLINE = "deadline"  # whose nearest time limit runs out first


class PrefixCaching(StrEnum):
    """Whether full blocks are kept and found again by their content."""

    ON = "on"
    OFF = "off"


class PreemptionMode(StrEnum):
    """What becomes of the KV of a preempted sequence."""

    RECOMPUTE = "recompute"  # thrown away
    SWAP = "swap"  # copied to host memory, as long as there is room
    AUTO = "auto"  # whichever is expected to cost less time, for each victim


class VictimChoice(StrEnum):
    """Which of the least urgent makes room when another one grows."""

    LAST = "last"  # the newest
    CHEAPEST = "cheapest"  # of the last few, the one that loses the fewest tokens


class Batching(StrEnum):
    """What may share a step."""

    MIXED = "mixed"  # decodes first, then chunks of prefill
    SEPARATE = "separate"  # prefill or decodes


class HostTier(StrEnum):
    """Whether the swap space also keeps what the prefix cache on the device must give up."""

    ON = "on"
    OFF = "off"


class Displacement(StrEnum):
    """Whether a waiting sequence may take the place of a less urgent running one."""

    ON = "on"
    OFF = "off"


class Fairness(StrEnum):
    """Whether tenants who wait at the same time get equal service; see fairness.py."""

    NONE = "none"
    TENANT = "tenant"


_AT_LEAST_ONE = (
    *("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    "max_plans_in_flight",
)
_AT_LEAST_ZERO = (
    *("max_bypasses", "max_chunk_tokens", "max_prefill_tokens", "prefill_delay_factor", "num_host_blocks"),
    *("max_encoder_tokens", "encoder_cache_tokens", "max_adapters"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the block pool. Raises ValueError where they contradict each other."""

    num_blocks: int
    """Blocks that sequences can use; their ids are 1 to num_blocks."""
    block_size: int
    """Tokens per block."""
    max_num_seqs: int
    """At most so many sequences run at once, and so take part in a step."""
    max_num_batched_tokens: int
    """At most so many tokens are computed in a step."""
    max_model_len: int
    """Prompt and generated tokens of one sequence together."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    prefix_caching: PrefixCaching = PrefixCaching.ON
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free while others run, so that those can grow
    before somebody has to be preempted."""

    priority_aging_s: float = inf
    """Under the priority policy: so many seconds of waiting make up for one level of priority, and so
    nobody waits for ever. inf is strict priority."""
    order_among_equals: OrderAmongEquals = OrderAmongEquals.ARRIVAL
    displacement: Displacement = Displacement.ON
    """Under the priority policy only."""
    fairness: Fairness = Fairness.NONE
    """Inside each priority, if the policy has priorities."""
    tenant_weights: tuple[tuple[str, float], ...] = ()
    """Tenants with a share other than 1."""
    batching: Batching = Batching.MIXED
    prefill_delay_factor: float = 0.0
    """Under SEPARATE: newcomers interrupt decoding only after they have waited for so many times the latest
    prefill step. 0: at once."""
    target_itl_s: float = inf
    """While sequences decode, prefill gets so few tokens of a step that it takes about this long."""
    max_prefill_tokens: int = 0
    """Prompts get at most so many tokens of a step, all together. 0 is no limit. Where the time of a step is
    linear in its tokens, more only makes the first of a crowd wait for the last."""
    max_chunk_tokens: int = 0
    """A prefill gets at most so many tokens of a step while it is not alone. 0 is no limit."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    victim_choice: VictimChoice = VictimChoice.CHEAPEST
    num_host_blocks: int = 0
    """Blocks of the swap space, ids 1 to num_host_blocks."""
    copy_s_per_block: float = 0.0
    """Measured: seconds to copy a block between device and host, one way. Read by AUTO."""
    max_plans_in_flight: int = 1
    """So many plans may be made before the result of the first must come."""
    max_encoder_tokens: int = 0
    """Of a step, for the encoder inputs of prompts; 0: no prompt has any."""
    encoder_cache_tokens: int = 0
    """Encoder outputs that wait for their positions to be computed have so many tokens at most."""
    max_adapters: int = 0
    """Running sequences use at most so many different adapters. 0: none is served."""
    max_grammar_s: float = 0.05
    """Sequences with a grammar are admitted to a step, whether for the first time or again, as long as
    compiling all of theirs takes no longer; the first may alone. The worker does so while everybody's tokens
    wait."""
    host_tier: HostTier = HostTier.ON
    """Without a swap space, or without a prefix cache, there is none."""
    sliding_window: int | None = None
    """If every layer has a window, the largest of them: tokens that a token sees, itself included."""
    max_bypasses: int = 0
    """How many later sequences may be admitted before a head of the queue for which there are too few
    free blocks; then blocks are kept for it. 0 keeps the order strictly."""

    def __post_init__(self) -> None:
        self._check_bounds()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs a token of each step"
            )
        if any(weight <= 0 for _, weight in self.tenant_weights):
            raise ValueError("the weight of a tenant must be above 0")
        if self.order_among_equals is OrderAmongEquals.DEADLINE and not isinf(self.priority_aging_s):
            raise ValueError("aging makes all ranks different: there are no equals to order by deadline")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, not {self.watermark}")

    def _check_bounds(self) -> None:
        """Of single numbers; contradictions between them come after."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("priority_aging_s", "target_itl_s", "max_grammar_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {self.sliding_window}")
        for name in _AT_LEAST_ZERO:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
