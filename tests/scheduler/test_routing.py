"""One line before several engines: who is served, where, and what becomes of a lost engine's requests."""

import random
from math import inf

import pytest

from scheduler.config import Fairness, SchedulerOptions, SchedulingPolicy
from scheduler.policy import Standing, order_of_service
from scheduler.prefix_keys import ChangeKind, PrefixChange
from scheduler.routing.dispatcher import CallNeeds, Dispatcher, Ticket
from scheduler.routing.engine_view import EngineSize, EngineView

SIZE = EngineSize(num_blocks=100, block_size=16, max_num_seqs=4, step_tokens=256)


class Desk:
    """A dispatcher with engines that are ready; requests are named by numbers."""

    def __init__(self, num_engines: int = 2, **options: object) -> None:
        self.options = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=256, **options)
        self.dispatcher: Dispatcher[int] = Dispatcher(num_engines, self.options)
        self.order = order_of_service(self.options)
        self.num_asked = 0
        for engine in range(num_engines):
            self.dispatcher.open(engine, SIZE)

    def ask(
        self, num_tokens: int = 50, *, priority: int = 0, tenant: str = "", n: int = 1, keys: tuple = ()
    ) -> Ticket[int]:
        self.num_asked += 1
        standing = Standing(priority, float(self.num_asked), self.num_asked)
        needs = CallNeeds(self.order.rank(standing), priority, tenant, n, num_tokens, keys)
        return self.dispatcher.add(self.num_asked, needs)

    def bind(self) -> list[tuple[int, int | None]]:
        return [(ticket.owner, ticket.engine) for ticket in iter(self.dispatcher.next, None)]

    def finish(self, ticket: Ticket[int]) -> None:
        for _ in range(ticket.needs.num_sequences):
            self.dispatcher.note_start(ticket)
            self.dispatcher.note_output(ticket, 3)
            self.dispatcher.note_end(ticket)
        self.dispatcher.close(ticket)


def test_equal_requests_take_turns_and_the_rest_wait() -> None:
    desk = Desk()
    tickets = [desk.ask(200) for _ in range(9)]
    assert desk.bind() == [(1, 0), (2, 1), (3, 0), (4, 1)], "two steps of each are on their way"
    for ticket in tickets[:4]:
        desk.dispatcher.note_start(ticket)
    assert [engine for _, engine in desk.bind()] == [0, 1, 0, 1], "each has four sequences at most"
    assert [ticket.owner for ticket in desk.dispatcher.line] == [9]
    for ticket in tickets[4:8]:
        desk.dispatcher.note_start(ticket)
    assert not desk.bind()
    desk.finish(tickets[1])
    assert desk.bind() == [(9, 1)]


def test_a_prefix_is_worth_its_tokens_and_no_more() -> None:
    desk = Desk()
    keys = tuple(bytes([number]) for number in range(10))
    desk.dispatcher.views[1].note_prefixes([PrefixChange(ChangeKind.STORED, key) for key in keys])
    assert desk.dispatcher.views[1].num_cached_tokens((*keys[:4], b"x", *keys[5:])) == 64
    for _ in range(3):
        desk.ask(170, keys=keys)
    bound = desk.bind()
    assert bound[0] == (1, 1)
    assert (3, 0) in bound, "two beside cost more than to compute it"
    desk.dispatcher.views[1].note_prefixes([PrefixChange(ChangeKind.FORGOTTEN, keys[0])])
    assert not desk.dispatcher.views[1].num_cached_tokens(keys)


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_of_many_engines_is_found_with_a_look_at_few(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, desk = random.Random(seed), Desk(64)
    keys = [tuple(bytes([group, place]) for place in range(6)) for group in range(4)]
    looks: list[EngineView] = []
    can_begin = EngineView.can_begin

    def counted(self: EngineView, num_tokens: int, *, priority: float) -> bool:
        looks.append(self)
        return can_begin(self, num_tokens, priority=priority)

    for number in range(200):
        view = desk.dispatcher.views[rng.randrange(64)]
        view.note_prefixes(
            [PrefixChange(ChangeKind.STORED, key) for key in rng.choice(keys)[: rng.randrange(7)]]
        )
        ticket = desk.ask(rng.randrange(97, 200), keys=rng.choice(keys) if number % 2 else ())
        needs = ticket.needs
        costs = []
        for engine, each in enumerate(desk.dispatcher.views):
            num_tokens = needs.num_prompt_tokens - each.num_cached_tokens(needs.keys)
            if each.can_begin(num_tokens, priority=inf):
                costs.append((each.cost(num_tokens), each.last_chosen, engine))
        monkeypatch.setattr(EngineView, "can_begin", counted)
        assert desk.bind() == [(ticket.owner, min(costs)[2])]
        monkeypatch.setattr(EngineView, "can_begin", can_begin)
        if rng.random() < 0.7:
            desk.finish(ticket)
    assert len(looks) / 200 < 64 / 2


def test_an_urgent_request_does_not_wait_for_a_place_among_less_urgent_ones() -> None:
    desk = Desk(policy=SchedulingPolicy.PRIORITY)
    for _ in range(12):
        desk.ask(10, priority=5)
    desk.bind()
    urgent, equal = desk.ask(10, priority=0), desk.ask(10, priority=5)
    desk.bind()
    assert urgent.engine is not None
    assert equal.engine is None


def test_tenants_that_wait_are_served_equally_over_all_engines() -> None:
    desk = Desk(fairness=Fairness.TENANT)
    tickets = [desk.ask(100, tenant="flood") for _ in range(40)]
    tickets += [desk.ask(100, tenant="calm") for _ in range(10)]
    served: list[str] = []
    for _ in range(10):
        live = [desk.dispatcher.next() for _ in range(3)]
        for ticket in live:
            assert ticket is not None
            served.append(ticket.tenant)
            desk.finish(ticket)
    assert served.count("calm") == 10


def test_what_a_lost_engine_had_returns_to_its_place_at_once() -> None:
    desk = Desk()
    tickets = [desk.ask(200) for _ in range(9)]
    desk.bind()
    desk.dispatcher.shut(0)
    for ticket in (tickets[0], tickets[2]):
        desk.dispatcher.take_back(ticket)
    assert [ticket.owner for ticket in desk.dispatcher.line] == [1, 3, 5, 6, 7, 8, 9]
    assert desk.bind() == [], "the other is as full as before"
    desk.finish(tickets[1])
    desk.finish(tickets[3])
    assert desk.bind() == [(1, 1), (3, 1)]


def test_what_has_ended_does_not_return() -> None:
    desk = Desk()
    ticket = desk.ask()
    desk.bind()
    desk.dispatcher.close(ticket)
    with pytest.raises(AssertionError):
        desk.dispatcher.take_back(ticket)
    assert list(desk.dispatcher.line) == []


def test_one_engine_gets_everything_at_once() -> None:
    desk = Desk(num_engines=1)
    for _ in range(50):
        desk.ask(500)
    assert len(desk.bind()) == 50
    desk.dispatcher.shut(0)
    desk.ask()
    assert desk.bind() == []


class Crowd(Desk):
    """Requests and engines that come and go at random."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(
            num_engines=3, policy=rng.choice(list(SchedulingPolicy)), fairness=rng.choice(list(Fairness))
        )
        self.rng = rng
        self.live: list[Ticket[int]] = []

    def happen(self) -> None:
        act = self.rng.choice([self._arrive, self._arrive, self._start, self._go_on, self._leave, self._lose])
        if self.live or act == self._arrive:
            act()
        self.bind()

    def _arrive(self) -> None:
        pick = self.rng.randrange
        self.live.append(
            self.ask(pick(1, 600), priority=pick(3), tenant=self.rng.choice("abc"), n=pick(1, 3))
        )

    def _start(self) -> None:
        self.dispatcher.note_start(self.rng.choice(self.live))

    def _go_on(self) -> None:
        self.dispatcher.note_output(self.rng.choice(self.live), 2)

    def _leave(self) -> None:
        self.dispatcher.close(self.live.pop(self.rng.randrange(len(self.live))))

    def _lose(self) -> None:
        if self.rng.random() < 0.1:
            lost = self.rng.randrange(3)
            self.dispatcher.shut(lost)
            for ticket in self.live:
                if ticket.engine == lost:
                    self.dispatcher.take_back(ticket)
            self.dispatcher.open(lost, SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_waits_while_an_engine_could_begin_it_and_no_count_is_lost(seed: int) -> None:
    crowd = Crowd(random.Random(seed))
    views = crowd.dispatcher.views
    for _ in range(400):
        crowd.happen()
        first = crowd.dispatcher.line.first()
        if first is not None:
            priority = first.priority if crowd.order.displaces else float("inf")
            num_tokens = first.needs.num_prompt_tokens
            assert not any(view.can_begin(num_tokens, priority=priority) for view in views)
    for ticket in crowd.live:
        crowd.dispatcher.close(ticket)
    assert not len(crowd.dispatcher.line)
    for view in views:
        counts = (view.num_live, view.num_unbegun, view.num_unbegun_tokens, view.num_held_tokens)
        assert (*counts, view.num_unbegun_blocks) == (0, 0, 0, 0, 0)
        assert not view.priorities
