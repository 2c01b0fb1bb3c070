"""The model of step times, and its fit to a trace."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.simulate.fitting.fitted_step_time import (
    FitError,
    LinearStepTime,
    fit,
    running_medians,
    variation_of,
)
from bench.trace.reading import TracedStep, read_trace
from tests.bench.traces import MODEL, traced

COEFFICIENTS = ("base_s", "per_token_s", "per_decode_s", "per_context_token_s")


def step(seconds: float, *, num_tokens: int, num_decodes: int, num_context_tokens: int) -> TracedStep:
    empty = dict.fromkeys(("decodes", "chunks", "arrived", "new", "released", "ended", "preemptions"), ())
    zero = dict.fromkeys(
        ("step", "time_s", "schedule_s", "update_s", "num_swapped_out_blocks", "num_swapped_in_blocks"), 0
    )
    counts = dict.fromkeys(("num_running", "num_waiting", "num_swapped", "num_used_blocks", "num_blocks"), 1)
    return msgspec.convert(
        {
            **(empty | zero | counts),
            "execute_s": seconds,
            "num_tokens": num_tokens,
            "num_decodes": num_decodes,
            "num_context_tokens": num_context_tokens,
            "waiting": {},
        },
        TracedStep,
    )


def drawn(model: LinearStepTime, *, num_steps: int, noise: float = 0.0) -> list[TracedStep]:
    rng = random.Random(3)
    steps = []
    for _ in range(num_steps):
        num_decodes = rng.randint(1, 64)
        num_tokens = num_decodes + rng.choice((0, 0, 0, rng.randint(1, 500)))
        num_context_tokens = num_tokens + rng.randint(0, 50_000)
        seconds = model.seconds(num_tokens, num_decodes, num_context_tokens) * (1 + rng.gauss(0, noise))
        sizes = {"num_tokens": num_tokens, "num_decodes": num_decodes}
        steps.append(step(seconds, num_context_tokens=num_context_tokens, **sizes))
    return steps


def assert_close(found: LinearStepTime, wanted: LinearStepTime, rel: float) -> None:
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=rel, abs=1e-12), name


def test_seconds_are_the_sum_of_the_four_terms() -> None:
    model = LinearStepTime(base_s=1.0, per_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)
    assert model.seconds(5, 3, 2) == pytest.approx(1.532)


def test_a_fit_finds_the_coefficients_of_a_trace_that_follows_the_model(tmp_path: Path) -> None:
    found = fit(read_trace(traced(tmp_path)))
    assert_close(found.model, MODEL, rel=1e-6)
    assert found.num_accidents == 0
    assert found.median_error < 1e-9


def test_a_fit_knows_how_long_the_requests_were_that_came(tmp_path: Path) -> None:
    """Two of five with replies of nine tokens came before the trace, and an urgent one with five."""
    assert sorted(fit(read_trace(traced(tmp_path))).model.lengths) == [10 + 5, 7 + 9, 11 + 9]


def test_a_fit_looks_through_noise() -> None:
    found = fit(drawn(MODEL, num_steps=2000, noise=0.05))
    assert_close(found.model, MODEL, rel=0.1)
    assert 0.02 < found.median_error < 0.05


def test_a_step_that_compiled_first_does_not_spoil_the_fit() -> None:
    steps = drawn(MODEL, num_steps=500, noise=0.01)
    steps.insert(0, step(12.0, num_tokens=100, num_decodes=0, num_context_tokens=100))
    found = fit(steps)
    assert found.num_accidents == 1
    assert_close(found.model, MODEL, rel=0.05)


def test_no_part_of_a_step_takes_less_than_no_time() -> None:
    """Steps with more decodes that take less time would make a simulation run backwards."""
    shrinking = [
        step(0.01 - 1e-5 * n, num_tokens=100, num_decodes=n, num_context_tokens=1000 + n) for n in range(100)
    ]
    model = fit(shrinking).model
    assert min(model.base_s, model.per_token_s, model.per_context_token_s) >= 0
    assert model.per_token_s + model.per_decode_s >= -1e-15


def test_a_decode_may_cost_less_than_a_token_of_a_prompt() -> None:
    """It does on processors that read weights for longer than they multiply a few rows by them."""
    wanted = replace(MODEL, base_s=0.008, per_token_s=6e-4, per_decode_s=-3e-4)
    found = fit(drawn(wanted, num_steps=500, noise=0.02))
    assert_close(found.model, wanted, rel=0.05)
    assert "+ 600 us a token - 300 us a decode" in str(wanted)


@pytest.mark.parametrize("has_decodes", [True, False])
def test_a_token_of_a_kind_that_the_trace_has_not_costs_what_one_of_the_other_does(has_decodes: bool) -> None:
    rng = random.Random(1)
    steps = []
    for _ in range(300):
        num_tokens = rng.randint(1, 200)
        num_decodes = num_tokens if has_decodes else 0
        seconds = MODEL.seconds(num_tokens, num_decodes, 1000)
        steps.append(step(seconds, num_tokens=num_tokens, num_decodes=num_decodes, num_context_tokens=1000))
    found = fit(steps).model
    assert found.per_token_s == pytest.approx(MODEL.per_token_s + MODEL.per_decode_s * has_decodes, rel=1e-3)
    assert found.per_decode_s == pytest.approx(0, abs=1e-12)


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(FitError, match="at least 8 steps"):
        fit(drawn(MODEL, num_steps=7))


def test_steps_vary_as_those_of_the_trace_did() -> None:
    steps = drawn(MODEL, num_steps=3000, noise=0.1)
    found = fit(steps).model
    ratios = [
        each.duration_s / MODEL.seconds(each.num_tokens, each.num_decodes, each.num_context_tokens)
        for each in steps
    ]
    assert found.variation == pytest.approx(ratios, rel=0.02)
    played = variation_of(replace(found, sizes_s=()), seed=1).vary([1.0] * 90, 0.0).total_s
    start = found.variation.index(played[0])
    assert played == list(found.variation[start : start + 90])


def test_factors_that_were_given_back_come_first() -> None:
    model = replace(MODEL, variation=(0.5, 1.0, 2.0, 3.0))
    straight, cut = (variation_of(model, seed=4) for _ in range(2))
    wanted = straight.vary([1.0] * 20, 0.0).total_s
    got = cut.vary([1.0] * 3, 0.0).total_s
    got += cut.vary([1.0] * 9, 0.0).total_s[:2]
    cut.give_back(7)
    got += cut.vary([1.0] * 4, 0.0).total_s
    got += cut.vary([1.0] * 11, 0.0).total_s
    assert got == wanted


def test_a_step_varies_as_those_of_its_size_did() -> None:
    """Each second step is a short one, which took up to three times as long; long ones hardly varied."""
    factors = [3.0 if place % 4 == 0 else 1.0 if place % 2 == 0 else 1.1 for place in range(200)]
    shares = [0.5 if place % 2 == 0 else 0.99 for place in range(200)]
    sizes_s = [0.01 if place % 2 == 0 else 0.2 for place in range(200)]
    model = replace(MODEL, variation=tuple(factors), computing_shares=tuple(shares), sizes_s=tuple(sizes_s))
    steps = variation_of(model, seed=1)
    long = steps.vary([0.15] * 50, 0.0)
    assert set(long.total_s) == {0.15 * 1.1}
    assert set(long.computing_s) == {0.15 * 1.1 * 0.99}
    short = steps.vary([0.012] * 50, 0.0)
    assert set(short.total_s) == {0.012, 0.012 * 3.0}
    assert set(short.computing_s) == {0.006, 0.012 * 3.0 * 0.5}


def test_a_size_of_which_the_trace_has_few_steps_varies_as_the_next_smaller_one() -> None:
    model = replace(MODEL, variation=(1.0,) * 100 + (7.0,), sizes_s=(0.01,) * 100 + (0.5,))
    durations_s = variation_of(model, seed=1).vary([0.5] * 200, 0.0).total_s
    assert sorted({*durations_s}) == [0.5, 3.5]


def test_steps_beside_a_trace_are_as_slow_as_the_machine_was_at_their_time() -> None:
    model = replace(MODEL, variation=(1.0, 5.0, 2.0), moments_s=(100.0, 110.0, 130.0), origin_s=100.0)
    steps = variation_of(model, seed=1)
    assert steps.vary([5.0, 5.0, 5.0, 1.0], 0.0).total_s == [5.0, 5.0, 25.0, 2.0]
    assert steps.vary([1.0], 12.0).total_s == [5.0]


def test_a_misfit_of_some_steps_is_not_the_machines_speed_and_comes_at_drawn_moments() -> None:
    """Every fifth step takes twice as long as the model says, on a machine that is half as fast later."""
    factors = [(2.0 if step % 5 == 0 else 1.0) * (1.0 if step < 500 else 2.0) for step in range(1000)]
    moments_s = tuple(step * 0.02 for step in range(1000))
    speeds = running_medians(moments_s, factors)
    assert (set(speeds[:450]), set(speeds[550:])) == ({1.0}, {2.0})
    model = replace(MODEL, variation=tuple(factors), moments_s=moments_s, origin_s=0.0)
    one, other = (variation_of(model, seed=seed).vary([0.02] * 300, 0.0).total_s for seed in (1, 2))
    assert one != other
    assert (one.count(0.02), one.count(0.04)) == (pytest.approx(240, abs=40), pytest.approx(60, abs=20))


def test_short_steps_may_be_slow_for_a_while_in_which_long_ones_are_not() -> None:
    """Short steps wait for weights where memory is slow, long ones multiply by them."""
    sizes_s = (0.01, 0.01, 0.01, 0.2) * 200
    factors = [2.0 if size_s == 0.01 and step >= 400 else 1.0 for step, size_s in enumerate(sizes_s)]
    moments_s = tuple(step * 0.1 for step in range(800))
    model = replace(
        MODEL, variation=tuple(factors), sizes_s=sizes_s, moments_s=moments_s, origin_s=moments_s[0]
    )
    steps = variation_of(model, seed=1)
    assert steps.vary([0.01, 0.2], 10.0).total_s == [0.01, 0.2]
    assert steps.vary([0.01, 0.2], 70.0).total_s == [0.02, 0.2]


def test_traced_steps_that_were_given_back_come_again() -> None:
    moments_s = tuple(float(step) for step in range(40))
    model = replace(MODEL, variation=(1.0, 1.5, 0.5, 2.0) * 10, moments_s=moments_s, origin_s=0.0)
    straight, cut = (variation_of(model, seed=4) for _ in range(2))
    wanted = straight.vary([1.0] * 20, 0.0).total_s
    got = cut.vary([1.0] * 9, 0.0).total_s[:2]
    cut.give_back(7)
    got += cut.vary([1.0] * 18, sum(got)).total_s
    assert got == wanted


def test_what_the_engine_does_between_two_steps_belongs_to_the_first() -> None:
    steps = drawn(MODEL, num_steps=200)
    at_s, timed = 0.0, []
    for each in steps:
        timed.append(msgspec.structs.replace(each, time_s=at_s))
        at_s += each.duration_s + 0.002
    found = fit(timed).model
    assert found.base_s == pytest.approx(MODEL.base_s + 0.002, rel=0.01)
    shares = [each.duration_s / (each.duration_s + 0.002) for each in steps[:-1]]
    assert found.computing_shares == pytest.approx((*shares, 1.0))
