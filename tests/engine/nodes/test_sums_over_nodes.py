"""Ranks of one stage on three nodes add and gather over memory and links as ranks of one node do."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple, TypeVar

import pytest
import torch

from campaigns.servers.free_ports import free_port
from engine.nodes import links as links_module
from engine.nodes.link_address import write_link
from engine.nodes.links import Links
from engine.options.engine_split import fits_nodes
from tests.engine.nodes.test_switchboard import First
from worker.cpu.kernel_build import CannotBuild, build_library, find_library
from worker.ranks.linked_ranks import LinkedRanks
from worker.ranks.places import make_places
from worker.ranks.shared_ranks import open_ranks

NUM_NODES = 3
SIZE = 6
Result = TypeVar("Result")


class Opened(NamedTuple):
    ranks: list[LinkedRanks]
    first: First


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Two ranks on each of three nodes, all in threads of this process."""
    try:
        library = find_library() or build_library()
    except CannotBuild as error:
        pytest.skip(str(error))
    here, there = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("others")
    split = {"pipeline_parallel_size": "1", "tensor_parallel_size": str(SIZE)}
    first = First(here, NUM_NODES, port=free_port(), **split)
    write_link(there, first.link_of_others())
    ranks: list[LinkedRanks] = []
    links: list[Links] = []
    with closing(first.board):
        for node in range(NUM_NODES):
            places = make_places(1, SIZE, node=node, num_nodes=NUM_NODES)
            for place in places:
                links.append(Links(there if node else here, place))
                each = open_ranks(place, links[-1])
                assert isinstance(each, LinkedRanks)
                each.join(library)
                ranks.append(each)
            os.close(places[0].page)
        yield Opened(ranks, first)
        for link in links:
            link.close()


def together(opened: Opened, work: Callable[[LinkedRanks], Result]) -> list[Result]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, opened.ranks))


def numbers_of(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("length", [0, 1, 7, 576, 100_003])
def test_sums_of_each_node_and_then_of_all_have_the_same_bits_on_each_rank(
    opened: Opened, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "_PIECE_BYTES", 30_000)

    def reduce(ranks: LinkedRanks) -> torch.Tensor:
        sums = numbers_of(ranks.rank, length)
        ranks.reduce(sums)
        return sums

    pairs = [numbers_of(rank, length) + numbers_of(rank + 1, length) for rank in range(0, SIZE, 2)]
    for found in together(opened, reduce):
        assert torch.equal(found, (pairs[0] + pairs[1]) + pairs[2])
    assert all(ranks.times().exchange_s > 0 for ranks in opened.ranks)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_each_rank_gets_the_parts_of_all_nodes_side_by_side(opened: Opened, num_rows: int) -> None:
    parts = [numbers_of(rank, num_rows * 1001).view(num_rows, 1001) for rank in range(SIZE)]
    for found in together(opened, lambda ranks: ranks.gather(parts[ranks.rank])):
        assert torch.equal(found, torch.cat(parts, dim=1))
    numbers = together(opened, lambda ranks: ranks.of_all([ranks.rank, 7]).tolist())
    assert numbers == [[[rank, 7] for rank in range(SIZE)]] * SIZE
    assert together(opened, lambda ranks: ranks.agree_min(9 - ranks.rank)) == [4] * SIZE


def test_ranks_that_bring_different_sizes_compute_nothing(opened: Opened) -> None:
    def bring(ranks: LinkedRanks) -> None:
        with pytest.raises(ValueError, match=r"compute the same: (32|24) bytes came for (12|20)"):
            ranks._peers.of_all(torch.ones(3 if ranks.rank < 4 else 5))

    together(opened, bring)
    assert opened.first.losses == []


@pytest.mark.parametrize(
    ("num_stages", "num_shards", "num_nodes", "ranks"),
    [
        (4, 2, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (1, 4, 2, [[0, 1], [2, 3]]),
        (2, 4, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 3, 3, None),
        (1, 3, 2, None),
        (4, 2, 8, [[each] for each in range(8)]),
    ],
)
def test_a_node_has_whole_stages_or_a_part_of_one(
    num_stages: int, num_shards: int, num_nodes: int, ranks: list[list[int]] | None
) -> None:
    assert fits_nodes(num_stages, num_shards, num_nodes) == (ranks is not None)
    for node, expected in enumerate(ranks or []):
        places = make_places(num_stages, num_shards, node=node, num_nodes=num_nodes)
        assert [place.rank for place in places] == expected
        for place in places:
            assert place.needs_inlet == (place.stage > 0 and place.rank - num_shards not in expected)
            assert place.needs_outlet == (
                place.stage < num_stages - 1 and place.rank + num_shards not in expected
            )
            assert place.rank in place.peers
            assert len(place.peers) == max(1, num_nodes // num_stages)
        for descriptor in {each for place in places for each in place.descriptors}:
            os.close(descriptor)
