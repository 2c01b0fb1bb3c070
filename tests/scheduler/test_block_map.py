"""The use of every block: free, kept for its content, of one sequence, or shared."""

from scheduler.blocks.block_map import BlockUse, block_runs
from tests.fakes import make_sequence
from tests.world import World, small_config


def runs_of(world: World, *, max_runs: int = 100) -> list[tuple[int, int, int]]:
    return block_runs(world.scheduler.kv, world.scheduler.running_sequences(), max_runs=max_runs)


def test_every_block_is_in_a_run_with_its_use_and_owner() -> None:
    world = World(small_config())
    assert runs_of(world) == [(8, BlockUse.FREE, 0)]
    world.add(make_sequence(0, list(range(8)), max_tokens=3))
    world.step()
    world.add(make_sequence(7, [*range(8), 50], max_tokens=3))
    world.step()
    runs = runs_of(world)
    assert sum(length for length, _, _ in runs) == 8
    shared = [owner for length, use, owner in runs for _ in range(length) if use == BlockUse.SHARED]
    assert shared == [0, 0], "two full blocks of the prompt, found by the second"
    assert 7 in {owner for _, use, owner in runs if use == BlockUse.OWNED}
    while world.scheduler.has_unfinished_requests:
        world.step()
    assert {use for _, use, _ in runs_of(world)} == {BlockUse.FREE, BlockUse.CACHED}


def test_runs_are_bounded() -> None:
    world = World(small_config())
    world.add(make_sequence(1, [1] * 4, max_tokens=9))
    world.step()
    assert len(runs_of(world)) > 1
    assert len(runs_of(world, max_runs=1)) == 1
