"""The line before the engines: requests that no engine has yet, and the choice of an engine for each.

Owns: the needs of a request, as the choice weighs them, and the load of each engine as its beats report it.
"""

from collections.abc import Iterable

from engine.frontend.active_request import ActivePooling
from engine.frontend.active_text import ActiveText
from engine.frontend.waiting_calls import CallTerms
from engine.reports.live_load import LiveCounts
from engine.types import GenerationRequest, PoolingRequest
from scheduler.cache_groups import CacheGroup
from scheduler.config import PrefixCaching, SchedulerOptions
from scheduler.counters import SchedulerStats
from scheduler.group_places import places_by
from scheduler.prefix_keys import PrefixChange, prompt_keys, root_key
from scheduler.routing.dispatcher import CallNeeds, Dispatcher, Ticket
from scheduler.routing.engine_view import EngineSize

AnyActive = ActiveText | ActivePooling


class EngineLine(Dispatcher[AnyActive]):
    """A dispatcher that reads needs and loads from requests and messages."""

    def __init__(self, num_engines: int, options: SchedulerOptions) -> None:
        super().__init__(num_engines, options)
        self._options = options
        self.are_several = num_engines > 1
        if not self.are_several:
            # It gets all that is admitted, whatever its size; the client asks whether it is ready.
            self.begin(0, num_blocks=1, block_size=1)

    def begin(
        self,
        engine: int,
        *,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...] = (),
        max_model_len: int = 0,
    ) -> None:
        """Let a new engine process have requests. Without groups of layers, one keeps all tokens."""
        options = self._options
        places = places_by(options, groups, block_size=block_size, max_model_len=max_model_len)
        limits = options.max_num_seqs, options.max_num_batched_tokens
        self.open(engine, EngineSize(num_blocks, block_size, *limits, places))

    def enter(self, active: AnyActive, terms: CallTerms) -> Ticket[AnyActive]:
        needs = CallNeeds(
            rank=self._order.rank(terms.standing(active.first_id)),
            priority=terms.priority,
            tenant=terms.tenant,
            num_sequences=len(active.choices),
            num_prompt_tokens=active.num_prompt_tokens,
            keys=self._keys(active.request),
        )
        return self.add(active, needs)

    def note_load(self, engine: int, stats: SchedulerStats) -> None:
        """Note the free KV blocks of an engine."""
        self.views[engine].num_free_blocks = stats.num_blocks - stats.num_used_blocks

    def note_prefixes(self, engine: int, changes: Iterable[PrefixChange]) -> None:
        """Note prefixes that an engine's cache has gained and lost."""
        self.views[engine].note_prefixes(changes)

    def live_counts(self, engine: int) -> LiveCounts:
        """Count the sequences of an engine, and its part of the line; the parts add up to the whole."""
        num_in_line = sum(ticket.needs.num_sequences for ticket in self.line)
        views = self.views
        share, rest = divmod(num_in_line, len(views))
        return LiveCounts(views[engine].num_live, share + (engine < rest))

    @property
    def are_full(self) -> bool:
        """Whether what the engines have takes all their places."""
        num_live = sum(view.num_live for view in self.views)
        return num_live >= len(self.views) * self._options.max_num_seqs

    def owners(self) -> list[AnyActive]:
        """Requests that no engine has, in the order of service."""
        return [ticket.owner for ticket in self.line]

    def _keys(self, request: GenerationRequest | PoolingRequest) -> list[bytes]:
        """Keys of the prompt's blocks, where they help to choose an engine."""
        if not self.are_several or isinstance(request, PoolingRequest):
            return []
        sizes = [view.size for view in self.views if view.size is not None]
        if self._options.prefix_caching is PrefixCaching.OFF or not sizes:
            return []
        adapter = "" if request.adapter is None else request.adapter.identity
        root = root_key(request.terms.cache_salt, adapter)
        return prompt_keys(request.prompt_token_ids, sizes[0].block_size, root)
