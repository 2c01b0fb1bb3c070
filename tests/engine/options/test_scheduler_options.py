"""Options of the scheduler: what the operator says, else what follows from the model and the others."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from engine.core.scheduler_start import scheduler_config
from engine.options.engine_config import resolve
from engine.options.sources import read_options
from tests.engine.model_facts import facts
from tests.fakes import make_sequence
from tests.world import World


@pytest.mark.parametrize(
    ("asked", "saturating_tokens", "expected"),
    [(None, 256, 256), (None, 0, 0), ("0", 256, 0), ("64", 256, 64)],
)
def test_prompts_get_what_saturates_the_device_unless_the_operator_says_otherwise(
    tiny_model: Path, asked: str | None, saturating_tokens: int, expected: int
) -> None:
    given = {"model": str(tiny_model)} | ({"max_prefill_tokens": asked} if asked else {})
    config, _ = resolve(read_options(given, {}), environment={})
    found = scheduler_config(config.scheduler, facts(saturating_tokens=saturating_tokens))
    assert found.max_prefill_tokens == expected


@pytest.mark.parametrize(
    ("threshold", "saturating_tokens", "expected"),
    [(0, 256, 0), (512, 0, 512), (100, 256, 100), (256, 256, 128), (512, 256, 128), (512, 1, 1)],
)
def test_one_prompt_leaves_some_to_shorter_ones_where_all_together_get_less_than_it_might(
    tiny_model: Path, threshold: int, saturating_tokens: int, expected: int
) -> None:
    config, _ = resolve(read_options({"model": str(tiny_model)}, {}), environment={})
    options = replace(config.scheduler, max_chunk_tokens=threshold)
    found = scheduler_config(options, facts(saturating_tokens=saturating_tokens))
    assert found.max_chunk_tokens == expected


@pytest.mark.parametrize(
    ("given", "aging_s"),
    [
        ({}, inf),
        ({"scheduling_policy": "priority"}, 30.0),
        ({"scheduling_policy": "priority", "priority_aging": "0"}, inf),
        ({"scheduling_policy": "priority", "priority_aging": "2s"}, 2.0),
    ],
)
def test_priorities_age_unless_the_operator_says_otherwise(
    tiny_model: Path, given: dict[str, str], aging_s: float
) -> None:
    config, _ = resolve(read_options({"model": str(tiny_model)} | given, {}), environment={})
    assert config.scheduler.priority_aging_s == aging_s


@pytest.mark.parametrize(
    ("given", "saturating_tokens", "pace"),
    [
        (None, 256, (0.07, 0.5, 0.5, 0.85)),
        (None, 0, (0.2, 0.0, 0.5, 0.85)),
        ("0", 256, (inf, 0.0, 0.0, 0.0)),
        ("50ms", 256, (0.05, 0.0, 0.0, 0.0)),
    ],
)
def test_running_requests_keep_a_pace_unless_the_operator_says_otherwise(
    tiny_model: Path, given: str | None, saturating_tokens: int, pace: tuple[float, ...]
) -> None:
    asked = {} if given is None else {"target_itl": given}
    config, _ = resolve(read_options({"model": str(tiny_model)} | asked, {}), environment={})
    found = scheduler_config(config.scheduler, facts(saturating_tokens=saturating_tokens))
    shares = (found.least_prefill_share, found.large_crowd_prefill_share)
    assert (found.target_itl_s, found.uncrowded_itl_s, *shares) == pace


def test_a_small_request_passes_a_large_one_for_which_there_is_no_room(tiny_model: Path) -> None:
    config, _ = resolve(read_options({"model": str(tiny_model)}, {}), environment={})
    options = scheduler_config(config.scheduler, facts())
    world = World(replace(options, num_blocks=8, block_size=4, max_model_len=32))
    world.add(make_sequence(1, range(20), max_tokens=9))
    world.step()
    world.add(make_sequence(2, range(20, 36), max_tokens=1), make_sequence(3, [40, 41], max_tokens=1))
    world.run()
    assert list(world.ended) == [3, 1, 2]
