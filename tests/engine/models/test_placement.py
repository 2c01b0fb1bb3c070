"""Models that leave so that another one fits: never one in use or pinned, and never in vain."""

import itertools
import random

from engine.models.placement import Guest, busy_victims, idle_victims


def guest(num_bytes: int, *, leases: int = 0, used_s: float = 0.0, **more) -> Guest:
    facts = {"device": "cpu", "budget_bytes": 10, "is_loaded": True, "is_pinned": False} | more
    return Guest(num_bytes=num_bytes, num_leases=leases, last_used_s=used_s, **facts)


def test_nothing_leaves_while_there_is_room_and_then_the_least_recently_used_idle_one() -> None:
    wanted = guest(4, is_loaded=False)
    assert idle_victims(0, [wanted, guest(3), guest(3)]) == []
    assert idle_victims(0, [wanted, guest(4, used_s=2), guest(4, used_s=1)]) == [2]
    assert idle_victims(0, [wanted, guest(4, used_s=2), guest(4, used_s=1, leases=1)]) == [1]
    assert idle_victims(0, [wanted, guest(4, is_pinned=True), guest(4, leases=1)]) is None
    assert idle_victims(0, [wanted, guest(9, device="cuda:0"), guest(9, is_loaded=False)]) == []


def test_of_models_that_are_used_those_leave_that_make_room_idle_ones_first() -> None:
    wanted = guest(8, is_loaded=False)
    guests = [wanted, guest(3, leases=1, used_s=1), guest(3, used_s=2), guest(4, leases=2, used_s=3)]
    assert idle_victims(0, guests) is None
    assert busy_victims(0, guests) == [2, 1, 3]
    assert busy_victims(0, [wanted, guest(4, is_pinned=True, leases=1)]) is None


def test_the_choice_makes_room_with_nobody_who_could_stay_and_finds_one_wherever_there_is_one() -> None:
    chance = random.Random(45)
    for _ in range(1000):
        guests = [guest(chance.randrange(1, 9), is_loaded=False)]
        for _ in range(chance.randrange(1, 5)):
            guests.append(
                guest(
                    chance.randrange(1, 5),
                    leases=chance.choice((0, 0, 1)),
                    used_s=chance.random(),
                    is_pinned=chance.random() < 0.2,
                )
            )

        def makes_room(leaving, guests=guests) -> bool:
            left = [each.num_bytes for place, each in enumerate(guests) if place not in leaving]
            return sum(left) <= 10

        may_leave = [
            place for place, each in enumerate(guests) if place and not each.num_leases and not each.is_pinned
        ]
        found = idle_victims(0, guests)
        if found is None:
            assert not makes_room(may_leave)
            continue
        assert {*found} <= {*may_leave}
        assert makes_room(found)
        if found:
            assert not any(makes_room(less) for less in itertools.combinations(found, len(found) - 1))
