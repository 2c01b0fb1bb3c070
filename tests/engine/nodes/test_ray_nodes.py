"""The number of nodes that Ray is asked for, the part of each, and what another node is given."""

from dataclasses import replace
from itertools import islice

import pytest

from engine.options.engine_config import EngineConfig, resolve
from engine.options.engine_split import ClusterConfig, RayConfig
from engine.options.sources import read_options
from engine.ray_cluster.agent import options_of
from engine.ray_cluster.nodes import Placed, Resources, divided, possible_nodes, share_of, turns


def asking(*, num_nodes: int | None = None, **given: str) -> EngineConfig:
    """Make the configuration of four stages of two ranks, of three threads each."""
    base = {"pipeline_parallel_size": "4", "tensor_parallel_size": "2", "num_threads": "3"}
    config, _ = resolve(read_options(base | given, {}), environment={})
    ray = RayConfig(num_nodes=num_nodes, host=None, port=29600, key="k" * 32, timeout_s=1.0)
    return replace(config, ray=ray)


@pytest.mark.parametrize(
    ("num_here", "others", "possible"),
    [
        (24, [], [1]),
        (24, [24, 24, 24], [1, 2, 4]),
        (23, [24, 24], [2]),
        (12, [12], [2]),
        (12, [11, 11, 11], [4]),
        (6, [6, 6, 6], [4]),
        (6, [100, 100], [4]),  # too few: the most nodes, for machines to come
        (0, [100], [4]),
    ],
)
def test_nodes_that_are_large_enough_are_asked_for_the_fewest_first(
    num_here: int, others: list[int], possible: list[int]
) -> None:
    here, there = Resources(num_here), list(map(Resources, others))
    assert possible_nodes(asking(), here, there) == possible
    assert possible_nodes(asking(num_nodes=2), here, there) == [2]


def test_ranks_on_gpus_are_placed_where_as_many_gpus_are() -> None:
    config = asking()
    config = replace(config, worker=replace(config.worker, device="cuda"))
    one = Resources(num_processors=64, num_gpus=1)
    four, eight = one._replace(num_gpus=4), one._replace(num_gpus=8)
    assert possible_nodes(config, eight, [four]) == [1, 2]
    assert possible_nodes(config, four, [four]) == [2]
    assert possible_nodes(config, four, [one] * 7) == [4], "too few"
    assert share_of(config, 2).taken == Resources(num_processors=4, num_gpus=4)


@pytest.mark.parametrize(
    ("timeout_s", "possible", "asked"),
    [
        (300.0, [1], [(1, 300)]),
        (0.5, [1], [(1, 1)]),
        (30.0, [1, 2], [(1, 10), (2, 10), (1, 10)]),
        (10.0, [1, 2], [(1, 5), (2, 5)]),
        (3.0, [1, 2], [(1, 1), (2, 1), (1, 1)]),
        (11.0, [1, 2, 4], [(1, 3), (2, 3), (4, 3), (1, 2)]),
        (2.0, [1, 2, 4], [(1, 1), (2, 1)]),
    ],
)
def test_each_number_of_nodes_has_a_turn_of_whole_seconds(
    timeout_s: float, possible: list[int], asked: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    for turn in islice(turns(possible, timeout_s, lambda: sum(wait_s for _, wait_s in found)), 9):
        found.append(turn)
    assert found == asked


def test_a_number_of_nodes_is_not_asked_for_again_and_again_in_the_last_second() -> None:
    waits: list[float] = []
    for _, wait_s in islice(turns([1, 2], 2.5, lambda: sum(waits)), 9):
        waits.append(int(wait_s) + 0.001)  # as Ray waits
    assert len(waits) == 3


def test_the_engine_and_other_nodes_have_as_many_threads_as_were_placed() -> None:
    config = divided(asking(), Placed(num_nodes=2, host="10.0.0.1"))
    assert config.ray is None
    assert config.cluster == ClusterConfig(num_nodes=2, node=0, host="10.0.0.1", port=29600, key="k" * 32)
    assert (config.worker.num_nodes, config.worker.num_threads) == (2, 3)
    other, _ = resolve(read_options(options_of(config, 1, 20), {}), environment={"RANK": "0"})
    assert other.cluster == replace(config.cluster, node=1)
    assert (other.worker.num_threads, other.model_path) == (3, config.model_path)
    assert (other.worker.num_stages, other.worker.num_ranks) == (4, 2)


def test_a_stage_is_on_several_nodes_only_where_as_many_are_asked_for() -> None:
    three = Resources(num_processors=3)
    assert possible_nodes(asking(), three, [three] * 7) == [4], "too few"
    assert possible_nodes(asking(num_nodes=8), three, [three] * 7) == [8]
    assert share_of(asking(), 8).taken == three


def test_one_node_is_an_engine_without_a_cluster() -> None:
    assert divided(asking(), Placed(num_nodes=1, host="10.0.0.1")).cluster is None
