"""What the parts of one scheduler share.

Owns: nothing of its own; it keeps together what they all read and write.
Never: decides.
"""

from dataclasses import dataclass

from scheduler.blocks.kv_cache_manager import KVCacheManager
from scheduler.config import SchedulerConfig
from scheduler.lines.request_lines import Lines
from scheduler.step.counters import Counters
from scheduler.step.plans_in_flight import PlansInFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """One for the life of a scheduler."""

    config: SchedulerConfig
    kv: KVCacheManager
    lines: Lines
    in_flight: PlansInFlight
    counters: Counters
