"""The model of step times, and its fit to a trace."""

import random
from pathlib import Path

import msgspec
import pytest

from bench.simulate.fitted_step_time import FitError, LinearStepTime, fit
from bench.trace.trace_reading import TracedStep, read_trace
from tests.bench.traces import MODEL, traced


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
    for name in LinearStepTime.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=rel, abs=1e-12), name


def test_seconds_are_the_sum_of_the_four_terms() -> None:
    model = LinearStepTime(base_s=1.0, per_token_s=0.1, per_decode_s=0.01, per_context_token_s=0.001)
    assert model.seconds(5, 3, 2) == pytest.approx(1.532)


def test_a_fit_finds_the_coefficients_of_a_trace_that_follows_the_model(tmp_path: Path) -> None:
    found = fit(read_trace(traced(tmp_path)))
    assert_close(found.model, MODEL, rel=1e-6)
    assert found.num_accidents == 0
    assert found.median_error < 1e-9


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


def test_no_coefficient_is_below_zero() -> None:
    """Steps with more decodes that take less time would make a simulation run backwards."""
    shrinking = [
        step(0.01 - 1e-5 * n, num_tokens=100, num_decodes=n, num_context_tokens=1000 + n) for n in range(100)
    ]
    model = fit(shrinking).model
    assert min(getattr(model, name) for name in LinearStepTime.__slots__) >= 0


def test_too_few_steps_are_no_fit() -> None:
    with pytest.raises(FitError, match="at least 8 steps"):
        fit(drawn(MODEL, num_steps=7))
