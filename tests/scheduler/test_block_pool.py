"""The free list, against plain lists that do the same."""

import operator

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blocks.pool import BlockPool
from tests.invariants import free_blocks

KINDS = st.sampled_from(["take", "share", "put first", "put last", "pass"])
ACTIONS = st.lists(st.tuples(KINDS, st.integers(0, 99)))


def put(block: int, front: list[int], back: list[int], action: str) -> None:
    """Put a block into one of two parts of the list: what is reused before all that is kept, and the rest."""
    match action:
        case "pass":
            front.append(block)
        case "put last":
            back.append(block)
        case _:
            (front or back).insert(0, block)


def remove(block: int, *parts: list[int]) -> None:
    for part in parts:
        if block in part:
            part.remove(block)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 6), ACTIONS)
def test_the_free_list_is_a_list_from_whose_middle_blocks_may_leave(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool, front, back, held = BlockPool(num_blocks), list(range(1, num_blocks + 1)), [], []
    for action, place in actions:
        if action == "take":
            num = place % (len(front) + len(back) + 1)
            taken = (front + back)[:num]
            front, back = front[num:], back[max(num - len(front), 0) :]
            assert pool.take(num) == taken
            held += taken
        elif action == "share":
            block = 1 + place % num_blocks
            pool.share(block)
            held.append(block)
            remove(block, front, back)
        elif held:
            num = place % len(held) + 1
            given_up, held = held[:num], held[num:]
            if action == "pass":
                pool.release_passed(given_up)
            else:
                pool.release(given_up, given_up if action == "put last" else ())
            for number, block in enumerate(given_up):
                if block not in held and block not in given_up[number + 1 :]:
                    put(block, front, back, action)
        assert free_blocks(pool) == front + back
        assert pool.num_free == len(front) + len(back)
        assert all(pool.num_references(block) == held.count(block) for block in range(1, num_blocks + 1))


def test_pools_of_many_devices_and_hosts_share_their_numbers() -> None:
    pools = [BlockPool(num_blocks) for num_blocks in (9_000, 0, 9_000, 0)]
    first, second = pools[0].take(9_000), pools[2].take(9_000)
    assert all(map(operator.is_, first, second))
