"""One line before the replicas: requests wait there until a replica can begin them soon.

Owns: nothing but the notes that the API process would take, for the very same choice between engines.
Source: scheduler/routing, which `tokenyard serve --data-parallel-size` runs.
"""

from collections.abc import Iterator, Sequence

from bench.simulate.replica import Replica
from bench.simulate.requests.arrivals import RequestUnderWay
from scheduler.config import PrefixCaching, SchedulerConfig
from scheduler.group_places import places_of
from scheduler.policy import Standing, order_of_service
from scheduler.prefix_keys import JournalContent, PrefixJournal, prompt_keys, root_key
from scheduler.routing.dispatcher import CallNeeds, Dispatcher, Ticket
from scheduler.routing.engine_view import EngineSize


class OneLine:
    """`arrive` and `look` take notes; `bind` yields what can begin."""

    def __init__(self, config: SchedulerConfig, replicas: Sequence[Replica]) -> None:
        self.dispatcher: Dispatcher[RequestUnderWay] = Dispatcher(len(replicas), config)
        self._config = config
        self._order = order_of_service(config)
        self._replicas = replicas
        self._tickets: dict[int, Ticket[RequestUnderWay]] = {}
        size = EngineSize(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            groups=places_of(config),
        )
        for place, replica in enumerate(replicas):
            self.dispatcher.open(place, size)
            replica.outputs = []
            replica.scheduler.kv.keep_journal(PrefixJournal(JournalContent.KEYS))

    @property
    def num_waiting(self) -> int:
        return len(self.dispatcher.line)

    def arrive(self, waiting: RequestUnderWay) -> None:
        """Put a request into the line."""
        request = waiting.request
        standing = Standing(request.priority, request.arrival_s, waiting.number)
        keys: list[bytes] = []
        if self._config.prefix_caching is PrefixCaching.ON:
            num_keys = (len(waiting.token_ids) - 1) // self._config.block_size
            keys = waiting.block_keys[:num_keys]
            if len(keys) < num_keys:
                keys = prompt_keys(waiting.token_ids, self._config.block_size, root_key(""))
        needs = CallNeeds(
            self._order.rank(standing), request.priority, request.tenant, 1, len(waiting.token_ids), keys
        )
        self._tickets[waiting.number] = self.dispatcher.add(waiting, needs)

    def bind(self) -> Iterator[tuple[int, RequestUnderWay]]:
        """Yield the requests that can begin, each with the place of its replica."""
        while (ticket := self.dispatcher.next()) is not None:
            assert ticket.engine is not None
            yield ticket.engine, ticket.owner
            self._note_outputs(ticket.engine)  # one that never fits has ended already

    def look(self, place: int) -> None:
        """Take note of a step that a replica has ended."""
        self._note_outputs(place)
        kv, view = self._replicas[place].scheduler.kv, self.dispatcher.views[place]
        view.num_free_blocks = kv.pool.num_blocks - kv.pool.num_used
        journal = kv.index.main_cache.journal
        if journal is not None:
            view.note_prefixes(journal.take())

    def _note_outputs(self, place: int) -> None:
        outputs, self._replicas[place].outputs = self._replicas[place].outputs or [], []
        for output in outputs:
            ticket = self._tickets[output.sequence_id]
            if output.start is not None:
                self.dispatcher.note_start(ticket)
            self.dispatcher.note_output(ticket, len(output.token_ids))
            if output.finish_reason is not None:
                self.dispatcher.close(self._tickets.pop(output.sequence_id))
