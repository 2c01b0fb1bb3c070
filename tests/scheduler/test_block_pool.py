"""The free list, against a plain list that does the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.blocks.block_pool import BlockPool

ACTIONS = st.lists(st.tuples(st.sampled_from(["pop", "share", "put first", "put last"]), st.integers(0, 99)))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 6), ACTIONS)
def test_the_free_list_is_a_list_from_whose_middle_blocks_may_leave(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool, free, held = BlockPool(num_blocks), list(range(1, num_blocks + 1)), []
    for action, place in actions:
        if action == "pop" and free:
            block = pool.pop()
            assert block == free.pop(0)
            held.append(block)
        elif action == "share":
            block = 1 + place % num_blocks
            pool.share(block)
            held.append(block)
            if block in free:
                free.remove(block)
        elif action.startswith("put") and held:
            block = held.pop(place % len(held))
            assert pool.drop(block) == (block not in held)
            if block not in held:
                put = pool.put_first if action == "put first" else pool.put_last
                put(block)
                free.insert(0 if action == "put first" else len(free), block)
        assert pool.free_blocks() == free
        assert pool.num_free == len(free)
        assert all(pool.num_references(block) == held.count(block) for block in range(1, num_blocks + 1))
