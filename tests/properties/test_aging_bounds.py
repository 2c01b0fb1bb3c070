"""Aging and displacement together: nobody starves, and the urgent wait for one turn at most.

Urgent users send one request after the other until the last low one has ended. Invariants are checked after
every step (tests/world.py).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from scheduler.config import Fairness, SchedulingPolicy
from scheduler.messages import SequenceId
from scheduler.step.preemption import PROTECTED_TOKENS
from tests.fakes import continuation, make_sequence
from tests.properties.lengths import histories
from tests.world import World, shares, small_config

PROMPT_TOKENS = 5
FIRST_URGENT = 1000


@dataclass(frozen=True)
class Low:
    priority: int
    num_tokens: int
    since: int
    """Step before which it comes."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Low requests, and users who send an urgent one, and the next when it has ended, at once or soon."""

    num_places: int
    aging_s: float
    low: tuple[Low, ...]
    users_a_place: int
    urgent_tokens: int
    pauses: tuple[int, ...]
    spare_blocks: int
    max_bypasses: int
    fairness: Fairness

    @property
    def num_users(self) -> int:
        return self.users_a_place * self.num_places

    @property
    def turn(self) -> int:
        """Steps of a turn: the protected tokens, and what was known is computed again."""
        return PROTECTED_TOKENS + 2 * self.num_places

    @property
    def round(self) -> int:
        """Steps in which every user is served once."""
        return self.users_a_place * (self.urgent_tokens + 1)

    @property
    def urgent_bound(self) -> int:
        return self.turn + self.round

    def low_bound(self, low: Low) -> int:
        """Steps to its end.

        For each turn it grows old; then the others of its kind have one, and after each the urgent as long.
        """
        num_turns = 1 + -(-low.num_tokens // PROTECTED_TOKENS)  # the first is not protected
        turns_of_all = len(self.low) * (2 * self.turn + self.round)
        return num_turns * (int(low.priority * self.aging_s) + turns_of_all)

    def world(self) -> World:
        blocks_each = -(-(PROMPT_TOKENS + max(low.num_tokens for low in self.low) + 1) // 4)
        config = small_config(
            policy=SchedulingPolicy.PRIORITY,
            priority_aging_s=self.aging_s,
            num_blocks=self.num_places * blocks_each + self.spare_blocks,
            max_num_seqs=self.num_places,
            max_num_batched_tokens=48,
            max_bypasses=self.max_bypasses,
            fairness=self.fairness,
        )
        return World(config)


LOWS = st.builds(
    Low, priority=st.integers(1, 4), num_tokens=st.sampled_from([1, 20, 36]), since=st.integers(0, 40)
)
LOADS = st.builds(
    Load,
    num_places=st.integers(1, 3),
    aging_s=st.sampled_from([1.0, 5.0, 12.0]),
    low=st.lists(LOWS, min_size=1, max_size=9).map(tuple),
    users_a_place=st.integers(1, 2),
    urgent_tokens=st.integers(1, 3),
    pauses=st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple),
    spare_blocks=st.sampled_from([0, 100]),
    max_bypasses=st.sampled_from([0, 3]),
    fairness=st.sampled_from(Fairness),
)


def prompt(number: int) -> list[int]:
    return [(number * 13 + place * 7 + 1) % 89 for place in range(PROMPT_TOKENS)]


class UrgentUsers:
    """Urgent requests that never cease, each by its number, with the step since which it waits."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._pauses: Iterator[int] = cycle(load.pauses)
        self._due = deque(range(load.num_users))  # steps, unordered
        self._next = FIRST_URGENT
        self.live: set[int] = set()
        self.waiting: dict[int, int] = {}

    def send(self, world: World, step: int) -> None:
        for each in [each for each in self.live if each in world.ended]:
            self.live.remove(each)
            self._due.append(step + next(self._pauses))
        for _ in range(len(self._due)):
            due = self._due.popleft()
            if due > step:
                self._due.append(due)
                continue
            number, self._next = self._next, self._next + 1
            self.live.add(number)
            self.waiting[number] = step
            world.add(
                make_sequence(
                    number, prompt(number), max_tokens=self._load.urgent_tokens, tenant=f"tenant {number % 3}"
                )
            )


@histories(20)
@given(LOADS)
def test_nobody_starves_and_the_urgent_wait_for_one_turn_at_most(load: Load) -> None:
    world, users = load.world(), UrgentUsers(load)
    step = 0
    while not world.ended.keys() >= set(range(len(load.low))):
        for number, low in enumerate(load.low):
            if low.since == step:
                tokens = {"max_tokens": low.num_tokens, "priority": low.priority}
                world.add(make_sequence(number, prompt(number), tenant=f"tenant {number % 2}", **tokens))
            elif number not in world.ended:
                assert step <= low.since + load.low_bound(low), "it starves"
        users.send(world, step)
        for number in shares(world.step()):
            users.waiting.pop(number, None)
        longest = step - min(users.waiting.values(), default=step)
        assert longest <= load.urgent_bound, "an urgent one waits for more than a turn"
        step += 1
    for number, low in enumerate(load.low):
        assert world.tokens[SequenceId(number)] == continuation(prompt(number), low.num_tokens)
