"""Layers are divided so that the slowest stage has as little as can be."""

from hypothesis import given
from hypothesis import strategies as st

from worker.ranks.stage import Stage


def sizes(num_layers: int, num_stages: int, head_layers: float) -> list[int]:
    stages = [Stage(index, num_stages, head_layers=head_layers) for index in range(num_stages)]
    places = [place for stage in stages for place in stage.layers_of(num_layers)]
    assert places == list(range(num_layers)), "each layer is in one stage, in order"
    return [len(stage.layers_of(num_layers)) for stage in stages]


def least(num_layers: int, num_stages: int, head_layers: float) -> float:
    """Cost of the slowest stage in the best of all divisions."""
    if num_stages == 1:
        return num_layers + head_layers
    return min(
        max(float(first), least(num_layers - first, num_stages - 1, head_layers))
        for first in range(1, num_layers - num_stages + 2)
    )


@given(st.integers(1, 4), st.integers(0, 8), st.sampled_from([0.0, 0.3, 1.0, 2.5, 9.0]))
def test_no_division_has_a_faster_slowest_stage(num_stages: int, more: int, head_layers: float) -> None:
    found = sizes(num_stages + more, num_stages, head_layers)
    assert min(found) >= 1
    assert max(*found, found[-1] + head_layers) == least(num_stages + more, num_stages, head_layers)


def test_a_large_vocabulary_leaves_fewer_layers_to_the_last_stage() -> None:
    assert sizes(28, 2, 9.9) == [19, 9]
    assert sizes(32, 2, 2.4) == [17, 15]
    assert sizes(7, 2, 0.0) == [4, 3]
    assert sizes(6, 4, 0.0) == [2, 2, 1, 1]


def test_stages_of_a_node_are_neighbours() -> None:
    found = [list(Stage(index, 6).node_of(3)) for index in range(6)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [list(Stage(index, 2).node_of(4)) for index in range(2)] == [[0], [1]]
