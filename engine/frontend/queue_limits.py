"""Limits on the queue as a whole, and on the prompt tokens that one tenant has in it."""

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from engine.errors import Overloaded, OverloadReason, TenantOverloaded
from engine.frontend.waiting_calls import CallTerms, WaitingCall, WaitingCalls
from engine.journal import Journal
from scheduler.config import SchedulingPolicy
from scheduler.messages import SequenceId
from scheduler.routing.start_forecast import StartForecast

if TYPE_CHECKING:
    from engine.options.engine_config import EngineConfig

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_UNKNOWN_RETRY_S = 10.0
_PREPARED_WITHIN_S = 0.25
"""Time for which a call keeps a place while it is tokenized. One that takes longer competes again."""


Freed = tuple[Counter[object], Counter[object]]
"""Sequences and prompt tokens of calls that are to leave, by the limits of their model; below 0: to come."""
NONE_FREED: Freed = (Counter(), Counter())


def num_free(bound: int, own: int, others: Sequence[int]) -> int:
    """Places that one of several may still take: half of the bound is kept for all, in even parts."""
    part = bound // (2 * len(others) + 2)
    return bound - own - sum(max(each, part) for each in others)


class QueueLimits:
    """Bounds on the whole queue; beyond them a client is refused and given a time to come back.

    A sequence starts with its first output, so sequences in prefill still count as waiting.
    """

    def __init__(self, *, max_queued: int, max_queued_tokens: int, has_priorities: bool = False) -> None:
        self._max_queued = max_queued
        self._max_queued_tokens = max_queued_tokens
        self.has_priorities = has_priorities
        self._forecast = StartForecast(has_priorities=has_priorities)
        self._num_own = self._num_own_tokens = 0
        self.all = [self]
        """The limits of all models in the queue."""
        self._num_by_priority = Counter[int]()

    def beside(self) -> "QueueLimits":
        """Return the limits of one more model in the same queue."""
        added = copy(self)
        added._num_own = added._num_own_tokens = 0
        self.all.append(added)
        return added

    @property
    def num_queued(self) -> int:
        """Sequences that wait for any model."""
        return sum(each._num_own for each in self.all)

    @property
    def num_queued_tokens(self) -> int:
        return sum(each._num_own_tokens for each in self.all)

    def take_in(self, num_sequences: int, num_tokens: int, *, now_s: float, priority: int = 0) -> None:
        """Count the sequences of a call, for which there is room."""
        for _ in range(num_sequences):
            self._forecast.note_arrival(priority, now_s=now_s)
        self._num_own += num_sequences
        self._num_by_priority[priority] += num_sequences
        self._num_own_tokens += num_tokens

    def refusal(self, num_sequences: int, *, now_s: float, freed: Freed = NONE_FREED) -> Overloaded:
        """Make the error for sequences that do not fit."""
        lacks_places, _ = self.lack(num_sequences, 0, freed)
        of_all = "" if len(self.all) == 1 else ", of which each model has a part"
        num_queued = self.num_queued - freed[0].total()
        return Overloaded(
            f"{num_queued} sequences with {self.num_queued_tokens} prompt tokens have not started; "
            f"at most {self._max_queued} and {self._max_queued_tokens} may wait{of_all}; try again later",
            retry_after_s=self.retry_after_s(now_s=now_s),
            reason=OverloadReason.REQUESTS if lacks_places else OverloadReason.TOKENS,
        )

    def has_room(self, num_sequences: int, num_tokens: int, *, freed: Freed = NONE_FREED) -> bool:
        """Whether sequences fit, assuming that the `freed` ones have left.

        A request larger than the queue fits if nothing waits at all; otherwise it would never fit.
        """
        fits = not any(self.lack(num_sequences, num_tokens, freed))
        return fits or self.num_queued == freed[0].total()

    def lack(self, num_sequences: int, num_tokens: int, freed: Freed = NONE_FREED) -> tuple[int, int]:
        """Return the sequences and the tokens that do not fit once the `freed` ones have left.

        Those of another model free nothing where it has no more than the places that are kept for it.
        """
        others = [each for each in self.all if each is not self]
        sequences, tokens = freed
        own = self._num_own - sequences[self]
        own_tokens = self._num_own_tokens - tokens[self]
        kept = [each._num_own - sequences[each] for each in others]
        kept_tokens = [each._num_own_tokens - tokens[each] for each in others]
        return (
            max(0, num_sequences - num_free(self._max_queued, own, kept)),
            max(0, num_tokens - num_free(self._max_queued_tokens, own_tokens, kept_tokens)),
        )

    def leave(self, num_sequences: int, num_tokens: int, *, priority: int = 0) -> None:
        """Remove sequences that ended before they started."""
        self._num_own -= num_sequences
        self._num_own_tokens -= num_tokens
        self._num_by_priority[priority] -= num_sequences
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]

    def time_to_start_of_last(self, num_sequences: int, priority: int, *, now_s: float) -> float | None:
        """Estimate the seconds until the call begins that came last, without a walk through the line."""
        num_queued = self.num_queued
        if self.has_priorities:
            num_queued = sum(num for each, num in self._num_by_priority.items() if each <= priority)
        return self.time_to_start(num_queued - num_sequences, priority, now_s=now_s)

    def start(self, num_tokens: int, *, now_s: float, priority: int = 0) -> None:
        """Remove a sequence that has started, and `num_tokens` prompt tokens with it."""
        self.leave(1, num_tokens, priority=priority)
        self._forecast.note_start(num_waiting=self.num_queued, now_s=now_s)

    def retry_after_s(self, *, now_s: float) -> float:
        """Estimate how long the queue takes to empty, from the last starts."""
        if not self.num_queued:
            return _MIN_RETRY_S
        empty_s = self._forecast.expected_s(self.num_queued, 0, now_s=now_s)
        return min(max(_UNKNOWN_RETRY_S if empty_s is None else empty_s, _MIN_RETRY_S), _MAX_RETRY_S)

    def time_to_start(self, num_ahead: int, priority: int, *, now_s: float) -> float | None:
        """Estimate the seconds until one more sequence begins; None without starts to tell from."""
        return self._forecast.expected_s(num_ahead, priority, now_s=now_s)


class TenantTokens:
    """Waiting prompt tokens by tenant, counted from admission to the first output."""

    def __init__(self) -> None:
        self._num_queued: Counter[str] = Counter()

    def require_room(
        self, tenant: str, num_tokens: int, limit: int | None, *, retry_after_s: Callable[[], float]
    ) -> None:
        """Raise TenantOverloaded if the tokens do not fit. `limit` None is no limit.

        A request larger than its tenant's limit is taken in if the tenant has nothing waiting.
        """
        num_queued = self._num_queued[tenant]
        if limit is None or not num_queued or num_queued + num_tokens <= limit:
            return
        raise TenantOverloaded(
            f"this key has {num_queued} prompt tokens waiting, and may have {limit}; try again when some of"
            " its requests have begun",
            retry_after_s=retry_after_s(),
        )

    def admit(self, tenant: str, num_tokens: int) -> None:
        """Count prompt tokens that wait from now on."""
        self._num_queued[tenant] += num_tokens

    def leave(self, tenant: str, num_tokens: int) -> None:
        """Remove prompt tokens of a request that has started, or ended before."""
        self._num_queued[tenant] -= num_tokens
        if self._num_queued[tenant] <= 0:  # names come from clients: unused ones must not pile up
            del self._num_queued[tenant]


class Desk:
    """The queue of one server, before all of its models: limits, tenants, the order, and ids of sequences."""

    def __init__(self, config: "EngineConfig") -> None:
        """`config` is that of any model: they are alike in what concerns the queue."""
        self.limits = QueueLimits(
            max_queued=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            has_priorities=config.scheduler.policy is SchedulingPolicy.PRIORITY,
        )
        self._joined: list[QueueLimits] = []
        self.tenant_tokens = TenantTokens()
        self.waiting: WaitingCalls[Any] = WaitingCalls(config.scheduler)
        self.next_id = 1
        """The first id of the next call; later calls have higher ones."""
        self.kept: dict[str, tuple[Journal, QueueLimits, float]] = {}
        """Calls by reply id that keep a place of a model while they are prepared, and the ends of that."""

    def join(self) -> QueueLimits:
        """Return the limits of one more model."""
        self._joined.append(self.limits.beside() if self._joined else self.limits)
        return self._joined[-1]

    def keep_place(self, journal: Journal, room: QueueLimits, *, now_s: float) -> None:
        """Keep a place for a call; with priorities none, since the next that comes may be more urgent."""
        if not self.limits.has_priorities:
            self.kept[journal.reply_id] = journal, room, now_s + _PREPARED_WITHIN_S

    def kept_places(self, *, now_s: float) -> Freed:
        """Count the places that are kept for calls under way, as sequences to come."""
        if not self.kept:
            return NONE_FREED
        self.kept = {
            reply_id: (journal, room, until_s)
            for reply_id, (journal, room, until_s) in self.kept.items()
            if until_s > now_s and not journal.is_over
        }
        if not self.kept:
            return NONE_FREED
        places = Counter[object]()
        for _, room, _ in self.kept.values():
            places[room] -= 1
        return places, Counter()

    def new_ids(self, num: int) -> tuple[SequenceId, ...]:
        ids = tuple(SequenceId(self.next_id + index) for index in range(num))
        self.next_id += num
        return ids

    def displaceable(
        self, num_sequences: int, num_tokens: int, terms: CallTerms | None, room: QueueLimits
    ) -> list[WaitingCall[Any]]:
        """List the calls to displace; empty if even that would not make room in `room`."""
        leaving: list[WaitingCall[Any]] = []
        sequences, tokens = freed = Counter[object](), Counter[object]()
        lack = room.lack(num_sequences, num_tokens)
        for call in self.waiting.displaceable(terms, next_id=self.next_id):
            sequences[call.room] += call.num_sequences
            tokens[call.room] += call.num_tokens
            before, lack = lack, room.lack(num_sequences, num_tokens, freed)
            if lack == before:  # it gains nothing: its model has no more than the places that are kept for it
                sequences[call.room] -= call.num_sequences
                tokens[call.room] -= call.num_tokens
                continue
            leaving.append(call)
            if room.has_room(num_sequences, num_tokens, freed=freed):
                return leaving
        return []
