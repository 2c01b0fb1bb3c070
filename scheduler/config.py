"""Settings of the scheduler: the operator's decisions, and facts of the loaded model."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from scheduler.cache_groups import CacheGroup


class SchedulingPolicy(StrEnum):
    """Order of service; see policy.py."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class PrefixCaching(StrEnum):
    """Reuse of full blocks, found again by their content."""

    ON = "on"
    OFF = "off"


class PreemptionMode(StrEnum):
    """Treatment of the KV of a preempted sequence."""

    RECOMPUTE = "recompute"  # thrown away
    SWAP = "swap"  # copied to host memory, as long as there is room
    AUTO = "auto"  # the one that is expected to cost less time, for each victim


class Batching(StrEnum):
    """Kinds of work that may share a step."""

    MIXED = "mixed"  # decodes first, then chunks of prefill
    SEPARATE = "separate"  # prefill or decodes


class HostTier(StrEnum):
    """Use of the swap space for blocks that the prefix cache on the device must give up."""

    ON = "on"
    OFF = "off"


class Displacement(StrEnum):
    """Permission for a waiting sequence to take the place of a less urgent running one."""

    ON = "on"
    OFF = "off"


class DraftAdmission(StrEnum):
    """Choice among the drafts that are offered to a step."""

    ALL = "all"  # as many as have room
    PAYING = "paying"  # those that are expected to raise the tokens of a second; see draft_rule.py


class DraftSupply(StrEnum):
    """Source of the worker's drafts."""

    FREE = "free"  # it offers what it finds: a search takes no time that counts
    ASKED = "asked"  # it computes them with a model, for sequences for which a plan asks


class Fairness(StrEnum):
    """Equal service for tenants that wait at the same time; see fairness.py."""

    NONE = "none"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Decisions of the operator, before any model is loaded.

    Raises ValueError for a value out of bounds, and for options that contradict each other.
    """

    max_num_seqs: int
    """Most sequences that run at once, and so take part in a step."""
    max_num_batched_tokens: int
    """Most tokens that are computed in a step."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    priority_aging_s: float = inf
    """Under the priority policy: seconds of waiting that make up for one level of priority, so that no
    request waits for ever. inf is strict priority."""
    displacement: Displacement = Displacement.ON
    """Under the priority policy only."""
    fairness: Fairness = Fairness.NONE
    """Inside each priority, if the policy has priorities."""
    tenant_weights: tuple[tuple[str, float], ...] = ()
    """Tenants with a share other than 1."""
    prefix_caching: PrefixCaching = PrefixCaching.ON
    host_tier: HostTier = HostTier.ON
    """Without a swap space, or without a prefix cache, there is none."""
    watermark: float = 0.01
    """Share of the blocks that an admission leaves free while others run, so that those can grow before a
    sequence has to be preempted."""
    max_bypasses: int = 0
    """Most later sequences that are admitted before a head of the queue for which there are too few free
    blocks; then blocks are kept for it. 0 keeps the order strictly."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    batching: Batching = Batching.MIXED
    prefill_delay_factor: float = 0.0
    """Under SEPARATE: new prompts interrupt decoding only after they have waited for this many times the
    latest prefill step. 0: at once."""
    target_itl_s: float | None = inf
    """While sequences decode, prefill gets so few tokens of a step that it takes about this long. None: what
    costs the device little, which is known when the model is loaded."""
    least_prefill_share: float = 0.0
    """Part of the time of such a step that prefill gets all the same, once decodes alone take more than two
    thirds of the target, without headroom. Also once a prompt that is being computed, or is the first in the
    queue, has waited for `prefill_patience_s`."""
    large_crowd_prefill_share: float | None = None
    """The same once twelve sequences run and wait. `least_prefill_share` holds up to eight; between, the
    share grows in proportion. Cut where it makes steps too long (step/pace.py). None: it does not grow."""
    prefill_patience_s: float = 0.0
    """Before that, prefill gets a part of its share in proportion to the wait. 0: all of it at once."""
    max_prefill_tokens: int | None = 0
    """Most tokens of a step that prompts get, all together. 0 is no limit; None: as many as the device
    computes best, which is known when the model is loaded. Where the time of a step is linear in its tokens,
    more only makes the first of a crowd wait for the last."""
    max_chunk_tokens: int = 0
    """Most tokens of a step that one prefill gets while it is not alone. 0 is no limit."""
    max_plans_in_flight: int = 1
    """Most plans that may be made before the result of the first must come."""
    draft_admission: DraftAdmission = DraftAdmission.ALL
    encoder_cache_tokens: int = 0
    """Room for encoder outputs that wait for their positions to be computed, in tokens; 0: no prompt has
    any."""
    max_adapters: int = 0
    """Most different adapters that running sequences use. 0: none is served."""

    def __post_init__(self) -> None:
        _check_least(self, 1, ("max_num_seqs", "max_num_batched_tokens", "max_plans_in_flight"))
        _check_least(self, 0, _AT_LEAST_ZERO)
        for name in ("priority_aging_s", "target_itl_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}")
        most_share = self.large_crowd_prefill_share
        if most_share is None:
            most_share = self.least_prefill_share
        if not 0 <= self.least_prefill_share <= most_share < 1:
            raise ValueError(
                f"least_prefill_share ({self.least_prefill_share}) must be at least 0 and at most "
                f"large_crowd_prefill_share ({most_share}), and both below 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs a token of each step"
            )
        if any(weight <= 0 for _, weight in self.tenant_weights):
            raise ValueError("the weight of a tenant must be above 0")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, not {self.watermark}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(SchedulerOptions):
    """Options with nothing left open, and the facts about the loaded model that the scheduler plans by."""

    num_blocks: int
    """Blocks that sequences can use; their ids are 1 to num_blocks."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Prompt and generated tokens of one sequence together."""
    max_prefill_tokens: int = 0
    """Limit as in the options, decided; 0 is none."""
    target_itl_s: float = inf
    """Target as in the options, decided; inf is none."""
    max_scored_tokens: int = 0
    """Most tokens of a step that a prompt gets whose log-probabilities are reported, while another reply
    is under way: each of them costs an output layer. 0 is no limit."""
    uncrowded_itl_s: float = 0.0
    """Takes the place of a shorter target while the sequences that run and wait are too few for a crowd
    (step/pace.py). 0: none does."""
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    """Groups of layers. The scheduler keeps the blocks of one."""
    num_host_blocks: int = 0
    """Blocks of the swap space, ids 1 to num_host_blocks."""
    max_drafts: int = 0
    """Most drafts of a sequence that the worker verifies in a step; 0: unknown, and no limit."""
    draft_supply: DraftSupply = DraftSupply.FREE
    """Predictions of clients are offered either way."""
    num_stages: int = 1
    """Groups of layers that work on different plans at the same time. With several, no sequence is planned
    while a token of it is being sampled, and a plan takes a stage's part of the running ones."""
    max_compiling_s: float = 0.0
    """Processor time of all grammars that are compiled during steps at once; the first may take more. A
    sequence with another one waits that long at most before its own begins. 0: sequences do not wait for
    grammars."""
    inputs_at_once: bool = False
    """An encoder input's positions are computed in one step: each of its tokens attends to all others."""
    copy_s_per_block: float = 0.0
    """Measured: seconds to copy a block between device and host, one way. Read by AUTO."""

    def __post_init__(self) -> None:
        SchedulerOptions.__post_init__(self)  # super() finds no such class: slots=True makes it anew
        _check_least(self, 1, ("num_blocks", "block_size", "max_model_len", "num_stages"))
        _check_least(self, 0, ("num_host_blocks", "max_drafts", "max_compiling_s", "uncrowded_itl_s"))
        if self.max_plans_in_flight < self.num_stages:
            raise ValueError(
                f"max_plans_in_flight must be at least num_stages ({self.num_stages}), or stages idle, not "
                f"{self.max_plans_in_flight}"
            )


_AT_LEAST_ZERO = (
    *("max_bypasses", "max_chunk_tokens", "max_prefill_tokens", "prefill_delay_factor", "prefill_patience_s"),
    *("encoder_cache_tokens", "max_adapters"),
)


def _check_least(settings: SchedulerOptions, least: int, names: tuple[str, ...]) -> None:
    """Raise ValueError for a number that is too small; None is an open setting."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
