"""The choice of an engine for each request: one line, and an engine gets a request when it can begin soon.

Owns: the line, which engine has which request, and the choice.
Never: sends a request, or reads a clock; the API process and the simulator run this same code.

A request goes where it costs least: tokens to compute before its first token, those that wait there already
included, and the load of the other requests there. A prefix that an engine has is a saving of tokens and
nothing more; so a prefix of many requests spreads by itself, once load costs more than computing it.
With one engine there is nothing to choose, and no request waits here while that engine is ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, NamedTuple, TypeVar

from scheduler.config import Fairness, SchedulerOptions
from scheduler.policy import Rank, order_of_service
from scheduler.routing.call_line import CallLine
from scheduler.routing.engine_view import EngineSize, EngineView
from scheduler.tenant_ledger import GENERATED_TOKEN_COST, PROMPT_TOKEN_COST, TenantAccounts

OwnerT = TypeVar("OwnerT")


class CallNeeds(NamedTuple):
    """Facts about a request that decide its place in the line and its engine."""

    rank: Rank
    priority: int
    tenant: str
    num_sequences: int
    num_prompt_tokens: int
    keys: Sequence[bytes] = ()
    """Keys of the full blocks of its prompt; empty if it reads no prefix cache."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[OwnerT]):
    """One request, from its admission to its end."""

    owner: OwnerT
    needs: CallNeeds
    engine: int | None = None
    """Engine that has it; None while it is in the line."""
    view: EngineView | None = None
    """Counts of that engine's process; a later process has others."""
    num_live: int = 0
    num_unbegun: int = 0
    num_uncached_tokens: int = 0
    """Counted there as waiting, until its first output."""
    num_held_tokens: int = 0
    is_closed: bool = False

    @property
    def rank(self) -> Rank:
        return self.needs.rank

    @property
    def priority(self) -> int:
        return self.needs.priority

    @property
    def tenant(self) -> str:
        return self.needs.tenant


class Dispatcher(Generic[OwnerT]):
    """Line before several engines: after `add` or a note of a request, call `next` until it returns None."""

    def __init__(self, num_engines: int, options: SchedulerOptions) -> None:
        self.views = [EngineView() for _ in range(num_engines)]
        self._order = order_of_service(options)
        self._accounts: TenantAccounts | None = None
        if options.fairness is Fairness.TENANT:
            self._accounts = TenantAccounts(dict(options.tenant_weights), self._order.level)
        self.line: CallLine[Ticket[OwnerT]] = CallLine(self._order, self._accounts)
        self._num_choices = 0

    # Engines.

    def open(self, engine: int, size: EngineSize) -> None:
        """Note that an engine is ready; it knows nothing yet."""
        self.views[engine] = EngineView(size)

    def shut(self, engine: int) -> None:
        """Note that an engine is gone. The caller closes each of its requests, or takes it back."""
        self.views[engine] = EngineView()

    # Requests.

    def add(self, owner: OwnerT, needs: CallNeeds) -> Ticket[OwnerT]:
        """Put a request into the line, at the place of its rank."""
        ticket = Ticket(owner, needs)
        if self._accounts is not None:
            self._accounts.join(ticket)
        self.line.add(ticket)
        return ticket

    def next(self) -> Ticket[OwnerT] | None:
        """Take the first of the line, and set its engine; None if there is none or no engine can begin it."""
        first = self.line.first()
        if first is None:
            return None
        engine = self._choose(first.needs)
        if engine is None:
            return None
        self.line.remove(first)
        self._bind(first, engine)
        return first

    def note_output(self, ticket: Ticket[OwnerT], num_tokens: int) -> None:
        """Count new tokens of one of its sequences."""
        if ticket.view is None:
            return
        ticket.num_held_tokens += num_tokens
        ticket.view.num_held_tokens += num_tokens
        if self._accounts is not None:
            self._accounts.charge(ticket, GENERATED_TOKEN_COST * num_tokens)

    def note_start(self, ticket: Ticket[OwnerT]) -> None:
        """Record a first output of the request: with the earliest of them its prompt is computed."""
        view = ticket.view
        if view is None or not ticket.num_unbegun:
            return
        ticket.num_unbegun -= 1
        view.num_unbegun -= 1
        view.num_unbegun_tokens -= ticket.num_uncached_tokens
        view.num_unbegun_blocks -= view.num_blocks(ticket.num_uncached_tokens)
        ticket.num_uncached_tokens = 0

    def note_end(self, ticket: Ticket[OwnerT]) -> None:
        """Count the end of one of its sequences, whether it has begun or not."""
        view = ticket.view
        if view is None or not ticket.num_live:
            return
        ticket.num_live -= 1
        view.num_live -= 1
        if ticket.num_unbegun > ticket.num_live:
            ticket.num_unbegun -= 1
            view.num_unbegun -= 1
        if not ticket.num_live:
            self._release(ticket)

    def close(self, ticket: Ticket[OwnerT]) -> None:
        """Remove a request, wherever it is. May be called twice."""
        if ticket.is_closed:
            return
        ticket.is_closed = True
        if ticket.engine is None:
            self.line.remove(ticket)
        else:
            self._release(ticket)
        if self._accounts is not None:
            self._accounts.leave(ticket)

    def take_back(self, ticket: Ticket[OwnerT]) -> None:
        """Return a request of an engine that is gone to its place in the line. It must not be closed."""
        assert not ticket.is_closed, "it has left the line for good"
        ticket.needs = ticket.needs._replace(num_sequences=ticket.num_live)
        self._release(ticket)
        ticket.engine = None
        self.line.add(ticket)

    # The choice.

    def _choose(self, needs: CallNeeds) -> int | None:
        """Choose the engine that costs least; of equal ones the least recently chosen."""
        if len(self.views) == 1:
            return None if self.views[0].size is None else 0
        priority = needs.priority if self._order.displaces else inf
        best: int | None = None
        best_cost = (inf, 0)
        for engine, view in enumerate(self.views):
            # Most engines of many are seen to be dearer without a look at more than the first key.
            if view.size is None or view.burden >= best_cost[0]:
                continue
            if (view.least_cost(needs.num_prompt_tokens, needs.keys), view.last_chosen) >= best_cost:
                continue
            num_tokens = max(needs.num_prompt_tokens - view.num_cached_tokens(needs.keys), 1)
            if not view.can_begin(num_tokens, priority=priority):
                continue
            cost = (view.cost(num_tokens), view.last_chosen)
            if cost < best_cost:
                best, best_cost = engine, cost
        return best

    def _bind(self, ticket: Ticket[OwnerT], engine: int) -> None:
        needs, view = ticket.needs, self.views[engine]
        self._num_choices += 1
        view.last_chosen = self._num_choices
        ticket.engine, ticket.view = engine, view
        ticket.num_live = ticket.num_unbegun = needs.num_sequences
        num_cached = view.num_cached_tokens(needs.keys)
        ticket.num_uncached_tokens = max(needs.num_prompt_tokens - num_cached, 1)
        ticket.num_held_tokens = needs.num_prompt_tokens * needs.num_sequences
        view.num_live += ticket.num_live
        view.num_unbegun += ticket.num_unbegun
        view.num_unbegun_tokens += ticket.num_uncached_tokens
        view.num_unbegun_blocks += view.num_blocks(ticket.num_uncached_tokens)
        view.num_held_tokens += ticket.num_held_tokens
        view.priorities[needs.priority] += 1
        if self._accounts is not None:
            self._accounts.charge(ticket, PROMPT_TOKEN_COST * ticket.num_uncached_tokens)

    def _release(self, ticket: Ticket[OwnerT]) -> None:
        """Take a request out of the counts of its engine."""
        view, ticket.view = ticket.view, None
        if view is None:
            return
        view.num_live -= ticket.num_live
        view.num_unbegun -= ticket.num_unbegun
        view.num_unbegun_tokens -= ticket.num_uncached_tokens
        view.num_unbegun_blocks -= view.num_blocks(ticket.num_uncached_tokens)
        view.num_held_tokens -= ticket.num_held_tokens
        view.priorities[ticket.priority] -= 1
        if not view.priorities[ticket.priority]:
            del view.priorities[ticket.priority]
        ticket.num_live = ticket.num_unbegun = ticket.num_uncached_tokens = ticket.num_held_tokens = 0
