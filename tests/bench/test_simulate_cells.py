"""Cells: replicas with a router of their own, which give the same result in whichever process they run."""

from dataclasses import replace
from random import Random

import pytest

from bench.simulate.cells import from_json, simulate_cells, to_json
from bench.simulate.command import main
from bench.simulate.router import RouterKind
from bench.simulate.run import simulate
from bench.simulate.setup import Setup, SetupError, variant
from tests.bench.test_leaps import drawn_setup, drawn_workload, history

SMALL = ("--num-requests", "80", "--request-rate", "300", "--replicas", "4", "--num-blocks", "300")
WORDS = (*SMALL, "--prompt-len", "uniform:5:40", "--output-len", "uniform:1:20")


@pytest.fixture(scope="module")
def setup() -> Setup:
    return replace(drawn_setup(Random(3)), num_replicas=4, router=RouterKind.ROUND_ROBIN)


def test_cells_of_one_replica_are_replicas_in_turn(setup: Setup) -> None:
    workload = drawn_workload(Random(8))
    together, apart = simulate(workload, setup), simulate(workload, replace(setup, cells=4))
    of_one, of_other = history(together), history(apart)
    for facts in (of_one, of_other):
        # A queue of four lines is thinned in another order; a class lists its requests by cell.
        del facts["queue"]
        for tally in facts["classes"]:
            tally.update(ttft_s=sorted(tally["ttft_s"]), e2e_s=sorted(tally["e2e_s"]), first_tokens=None)
    assert of_one == of_other
    assert max(n for _, n in together.queue) == max(n for _, n in apart.queue)


def test_a_result_comes_back_from_its_json_to_the_bit(setup: Setup) -> None:
    result = simulate(drawn_workload(Random(8)), setup)
    assert history(from_json(to_json(result))) == history(result)


def test_processes_of_their_own_change_no_number(capfd: pytest.CaptureFixture[str]) -> None:
    apart = simulate_cells(WORDS, "cells=2", 2)
    assert main([*WORDS, "--compare", "cells=2", "--cell", "1"]) == 0
    one = from_json(capfd.readouterr().out.encode())
    assert apart.num_replicas == 4
    assert apart.busy_s[2:] == one.busy_s
    assert sum(tally.num_completed for tally in apart.classes) == 80
    assert sum(tally.num_completed for tally in one.classes) == 40


def test_more_cells_than_replicas_are_refused(setup: Setup) -> None:
    with pytest.raises(SetupError, match="4 replicas"):
        variant(setup, "cells=5")
