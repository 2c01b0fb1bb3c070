"""Pauses of the neighbour's stream that are faults of the server, and those that are the machine's."""

import asyncio
from pathlib import Path

import pytest

from campaigns.servers.own_server import OwnServer
from campaigns.soak.acts import Pace
from campaigns.soak.attacks import Attacks
from server.edge.http.http_client import Target

NOWHERE = OwnServer(pid=0, target=Target.parse("http://127.0.0.1:1"), log=Path("log"))


def attacks_on(server: OwnServer) -> Attacks:
    return Attacks(server, seed=1, is_engine_gone=lambda: False, pace=Pace(num_silent=10))


@pytest.mark.parametrize(
    ("looks_late_s", "pause_s", "is_fault"),
    [
        ((), 2.1, True),
        ((), 1.9, False),
        ((0.08,) * 15, 3.0, True),  # a busy machine, and a server that stalls
        ((2.9,), 3.0, False),  # this process stood still, and all others with it
        ((0.6, 0.1, 0.7), 3.0, False),
    ],
)
def test_only_a_standstill_of_the_soak_itself_excuses_a_pause(
    looks_late_s: tuple[float, ...], pause_s: float, is_fault: bool
) -> None:
    attacks = attacks_on(NOWHERE)
    for late_s in looks_late_s:
        attacks._note_look(late_s=late_s)
    attacks._note_pause(pause_s, late_s=attacks._late_s)
    assert bool(attacks.faults()) == is_fault


async def test_the_time_for_which_a_process_was_stopped_excuses_a_pause_that_ends_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("campaigns.soak.attacks._STANDS_STILL_EVERY_S", 0.0)
    monkeypatch.setattr("campaigns.soak.attacks._STANDS_STILL_S", 0.02)
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    server = OwnServer(pid=sleeper.pid, target=NOWHERE.target, log=NOWHERE.log)
    monkeypatch.setattr(OwnServer, "engine_pid", sleeper.pid)
    attacks = attacks_on(server)
    await attacks._stand_still()
    sleeper.kill()
    await sleeper.wait()
    attacks._note_pause(2.02, late_s=attacks._late_s)
    assert not attacks.faults()


@pytest.mark.parametrize(("num_long", "is_fault"), [(1, False), (2, True)])
def test_of_a_hundred_pauses_one_may_be_longer_than_what_all_others_are_held_to(
    num_long: int, is_fault: bool
) -> None:
    attacks = attacks_on(NOWHERE)
    for place in range(100):
        attacks._note_pause(0.3 if place < num_long else 0.1, late_s=0.0)
    assert bool(attacks.faults()) == is_fault
    assert "100 pauses of the neighbour's stream" in attacks.report()
    assert "longest 300 ms (at most 200 and 2000; standstills left out)" in attacks.report()
