"""The free list, against a plain list that does the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blocks.pool import BlockPool

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "share", "put first", "put last"]), st.integers(0, 99)))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 6), ACTIONS)
def test_the_free_list_is_a_list_from_whose_middle_blocks_may_leave(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool, free, held = BlockPool(num_blocks), list(range(1, num_blocks + 1)), []
    for action, place in actions:
        if action == "take":
            num = place % (len(free) + 1)
            taken, free = free[:num], free[num:]
            assert pool.take(num) == taken
            held += taken
        elif action == "share":
            block = 1 + place % num_blocks
            pool.share(block)
            held.append(block)
            if block in free:
                free.remove(block)
        elif action.startswith("put") and held:
            num = place % len(held) + 1
            given_up, held = held[:num], held[num:]
            is_kept = action == "put last"
            pool.release(given_up, given_up if is_kept else ())
            for number, block in enumerate(given_up):
                if block not in held and block not in given_up[number + 1 :]:
                    free.insert(len(free) if is_kept else 0, block)
        assert pool.free_blocks() == free
        assert pool.num_free == len(free)
        assert all(pool.num_references(block) == held.count(block) for block in range(1, num_blocks + 1))
