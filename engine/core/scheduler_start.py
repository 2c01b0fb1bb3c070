"""The scheduler of an engine process, made of the operator's options and the facts that the worker found."""

from dataclasses import fields, replace
from typing import Any

from engine.core.interfaces import BesideSteps
from engine.options.engine_config import EngineConfig
from scheduler.cache_groups import CacheGroup
from scheduler.config import DraftAdmission, DraftSupply, PrefixCaching, SchedulerConfig, SchedulerOptions
from scheduler.prefix_keys import PrefixJournal
from scheduler.scheduler import Scheduler
from worker.worker_config import ModelFacts

# Without a target of the operator's: a pause that a reader hardly minds. Where few tokens are computed at the
# best rate already, shorter ones cost prompts next to nothing.
_TARGET_ITL_S = 0.2
_TARGET_ITL_OF_SMALL_CHUNKS_S = 0.07

# Instead of the shorter one while few are there: a prompt of usual length goes whole.
_UNCROWDED_ITL_S = 0.5

_SCORED_PART = 8
"""A token whose log-probability is reported costs an output layer, as much as several others."""

# As long as the dearest grammar that is accepted.
_MAX_COMPILING_S = 0.05


def open_scheduler(config: EngineConfig, facts: ModelFacts, beside: BesideSteps) -> Scheduler:
    options = scheduler_config(config.scheduler, facts)
    if beside.grammars is not None:
        options = replace(options, max_compiling_s=_MAX_COMPILING_S)
    scheduler = Scheduler(options)
    if config.prefix_journal is not None:
        scheduler.kv.keep_journal(PrefixJournal(config.prefix_journal))
    return scheduler


def scheduler_config(options: SchedulerOptions, facts: ModelFacts) -> SchedulerConfig:
    """The operator's options, with what the worker found; the only place where a configuration is made."""
    asked = {each.name: getattr(options, each.name) for each in fields(options)}
    max_prefill_tokens = options.max_prefill_tokens
    if max_prefill_tokens is None:
        max_prefill_tokens = facts.saturating_tokens
    decided: dict[str, Any] = {
        "max_prefill_tokens": max_prefill_tokens,
        "target_itl_s": _target_itl_s(options, facts),
        "uncrowded_itl_s": _UNCROWDED_ITL_S if _has_short_pauses(options, facts) else 0.0,
        "max_chunk_tokens": _chunk_limit(options.max_chunk_tokens, max_prefill_tokens),
        "max_scored_tokens": -(-facts.saturating_tokens // _SCORED_PART),
        "max_plans_in_flight": _plans_in_flight(options, facts),
        "draft_admission": DraftAdmission.PAYING,
        "prefix_caching": options.prefix_caching if facts.is_paged else PrefixCaching.OFF,
    }
    if facts.vision is not None:
        decided["encoder_cache_tokens"] = facts.vision.num_cache_tokens
    return SchedulerConfig(
        **(asked | decided),
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        groups=facts.groups or (CacheGroup(),),
        inputs_at_once=facts.vision is not None and facts.vision.computes_at_once,
        num_host_blocks=facts.num_host_blocks,
        copy_s_per_block=facts.copy_s_per_block,
        max_drafts=facts.max_drafts,
        draft_supply=DraftSupply.ASKED if facts.has_draft_model else DraftSupply.FREE,
        num_stages=facts.num_stages,
    )


def _target_itl_s(options: SchedulerOptions, facts: ModelFacts) -> float:
    if options.target_itl_s is not None:
        return options.target_itl_s
    return _TARGET_ITL_OF_SMALL_CHUNKS_S if _has_short_pauses(options, facts) else _TARGET_ITL_S


def _has_short_pauses(options: SchedulerOptions, facts: ModelFacts) -> bool:
    """Whether the operator set no target, and the device saturates with few tokens."""
    return options.target_itl_s is None and bool(facts.saturating_tokens)


def _plans_in_flight(options: SchedulerOptions, facts: ModelFacts) -> int:
    if facts.num_stages > 1:
        return facts.num_stages + 1  # one waits, so that the first stage does not
    return options.max_plans_in_flight if facts.runs_ahead else 1


def _chunk_limit(asked: int, max_prefill_tokens: int) -> int:
    """Limit of one prompt; 0 is none.

    One that leaves nothing of what all prompts get is lowered to half of that.
    """
    if 0 < max_prefill_tokens <= asked:
        return max(max_prefill_tokens // 2, 1)
    return asked
