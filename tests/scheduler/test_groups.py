"""Groups of layers: each sequence has a table for each, and a prefix is found where all of them have it."""

from random import Random

import pytest

from engine.reports.kv_publisher import BlockRemoved, BlockStored, SharedBlocks, block_hash
from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.config import PreemptionMode, PrefixCaching
from scheduler.group_places import places_of
from scheduler.messages import ReportPage, SequenceId
from scheduler.prefix_keys import JournalContent, PrefixJournal, prompt_keys, root_key
from scheduler.routing.engine_view import EngineSize, EngineView
from scheduler.scheduler import NeverFits
from tests.fakes import continuation, make_sequence
from tests.invariants import published
from tests.world import World, small_config

FULL = CacheGroup(ALL_TOKENS, 1)
WINDOW = CacheGroup(Lifetime(LifetimeKind.WINDOW, 8), 3)
STATE = CacheGroup(Lifetime(LifetimeKind.FIXED), 5)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 13 + i * 7 + 1) % 89 for i in range(length)]


def grouped(*groups: CacheGroup, **changes: object) -> World:
    """Blocks of four tokens, steps of sixteen."""
    settings = {"groups": groups, "max_model_len": 400, "num_blocks": 200}
    return World(small_config(**(settings | changes)))


def turn(world: World, number: int, tokens: list[int], *, max_tokens: int = 8) -> int:
    """Run a request to its end; returns how many tokens of it were found."""
    world.add(make_sequence(number, tokens, max_tokens=max_tokens))
    start = world.step().scheduled[0].start
    world.run()
    assert world.tokens[SequenceId(number)] == continuation(tokens, max_tokens)
    return start


def test_each_group_has_its_own_table_with_a_row_of_blocks_for_each_place() -> None:
    world = grouped(FULL, WINDOW, STATE)
    world.add(make_sequence(1, prompt(40), max_tokens=20))
    while world.scheduler.has_unfinished_requests:
        world.step()
        for seq in world.scheduler.running_sequences():
            full, window, state = seq.tables
            assert len(full.block_ids) == full.end
            assert len(window.block_ids) == 3 * (window.end - window.first)
            assert len(state.block_ids) == 5
    assert world.tokens[SequenceId(1)] == continuation(prompt(40), 20)


def test_a_report_tells_blocks_of_a_state_from_those_of_tokens() -> None:
    world = grouped(FULL, STATE)
    for number in (1, 2):
        world.add(make_sequence(number, prompt(12, number), max_tokens=8))
    world.step()
    world.add(make_sequence(3, prompt(12, 3), max_tokens=8))
    reports = [each for each in world.scheduler.report(ReportPage(0, 10), now_s=0.0) if each is not None]
    assert [each.num_blocks for each in reports] == [8, 8, 0]
    assert [each.blocks_by_group for each in reports] == [{"all": 3, "state": 5}, {"all": 3, "state": 5}, {}]


def test_a_decode_holds_what_its_window_reaches_and_one_place_more() -> None:
    world = grouped(FULL, WINDOW)
    world.add(make_sequence(1, prompt(40), max_tokens=60))
    for _ in range(6):
        world.step()
    while world.scheduler.has_unfinished_requests:
        for seq in world.scheduler.running_sequences():
            assert seq.tables[1].end - seq.tables[1].first <= 4, "eight tokens touch three places"
        world.step()


def test_a_cache_without_room_for_a_place_of_each_group_refuses() -> None:
    world = grouped(FULL, WINDOW, STATE, num_blocks=8)
    with pytest.raises(NeverFits):
        world.add(make_sequence(1, prompt(3)))
    world = grouped(FULL, WINDOW, STATE, num_blocks=9)
    world.add(make_sequence(1, prompt(3), max_tokens=1))
    world.run()
    assert world.tokens[SequenceId(1)] == continuation(prompt(3), 1)


def test_a_long_prompt_of_a_windowed_model_takes_nothing_from_cached_conversations() -> None:
    """Passed blocks that go to the back of the free list push all others out (vLLM #48435)."""
    world = grouped(FULL, WINDOW, num_blocks=260)
    for number in range(1, 5):
        turn(world, number, prompt(40, number))  # 12 places of the full group, 3 of the window at the end
    turn(world, 9, prompt(300, 9), max_tokens=4)  # 76 of the full group, and 228 that are passed
    for number in range(1, 5):
        tokens = [*prompt(40, number), *continuation(prompt(40, number), 8)]
        assert turn(world, 10 + number, [*tokens, 3, 4, 5], max_tokens=1) == 44, "all but its last token"


def test_prompts_that_part_near_the_end_of_a_finished_turn_find_all_but_a_window() -> None:
    """A hit needs no alignment but that of a block (vLLM #57610)."""
    for num_other in range(1, 20):
        world = grouped(FULL, WINDOW)
        turn(world, 1, prompt(80), max_tokens=2)
        other = [*prompt(80)[: 80 - num_other], *([88] * num_other)]
        assert turn(world, 2, other, max_tokens=2) == (80 - num_other) // 4 * 4


def test_a_swapped_sequence_takes_all_its_groups_along() -> None:
    world = grouped(
        FULL, WINDOW, STATE, num_blocks=48, num_host_blocks=100, preemption_mode=PreemptionMode.SWAP
    )
    for number in (1, 2):
        world.add(make_sequence(number, prompt(20, number), max_tokens=60))
    world.run()
    assert world.num_swaps() > 0
    for number in (1, 2):
        assert world.tokens[SequenceId(number)] == continuation(prompt(20, number), 60)


def test_without_a_prefix_cache_nothing_is_found_in_any_group() -> None:
    world = grouped(FULL, WINDOW, STATE, prefix_caching=PrefixCaching.OFF)
    assert turn(world, 1, prompt(30)) == 0
    assert turn(world, 2, prompt(30)) == 0


def test_a_state_is_found_at_the_end_of_the_last_message_and_copied_to_blocks_of_its_own() -> None:
    """A template that drops thoughts parts there, and not behind the reply (llama.cpp #21831)."""
    world = grouped(FULL, STATE)
    first = prompt(40)
    assert turn(world, 1, first) == 0
    world.add(make_sequence(2, [*first, 7, 8, 9, *prompt(20, 3)], max_tokens=8))
    plan = world.step()
    assert plan.scheduled[0].start == 28, "40 tokens but the last, and what begins the answer"
    assert len(plan.copies) == 5
    world.run()
    assert world.tokens[SequenceId(2)] == continuation([*first, 7, 8, 9, *prompt(20, 3)], 8)


def test_all_of_several_answers_to_one_prompt_go_on_from_one_state() -> None:
    world = grouped(FULL, STATE, max_num_seqs=4)
    world.add(*(make_sequence(number, prompt(41), max_tokens=3) for number in range(1, 5)))
    world.run()
    assert world.scheduler.stats().num_prefix_hits >= 2 * 32, "those that were admitted later"


def test_the_third_visitor_of_a_fork_finds_it() -> None:
    """The second visitor keeps what is needed where it parts from the first (vLLM #21017, #45238)."""
    for num_blocks, groups in ((150, (FULL, STATE)), (150, (FULL, WINDOW)), (400, (FULL, WINDOW, STATE))):
        world = grouped(*groups, num_blocks=num_blocks)
        found = []
        for number in range(1, 5):
            found.append(turn(world, number, [*prompt(40), *prompt(50, number)], max_tokens=2))
            turn(world, 100 + number, prompt(120, 50 + number), max_tokens=2)  # takes what was passed
        assert found[2:] == [40, 40], f"{groups}: {found}"


def test_every_turn_of_a_chat_finds_its_history() -> None:
    """Fifty turns, of which each finds at least 95 % of those before it."""
    for groups in ((FULL, STATE), (FULL, WINDOW), (FULL, WINDOW, STATE), (WINDOW,)):
        world = grouped(*groups, num_blocks=900, max_model_len=1400, max_num_batched_tokens=64)
        tokens: list[int] = prompt(80, 5)
        num_earlier = 0
        for number in range(1, 51):
            assert turn(world, number, tokens, max_tokens=4) >= 0.95 * num_earlier
            tokens = [*tokens, *world.tokens[SequenceId(number)]]
            num_earlier = len(tokens)
            tokens += prompt(16, number)


def test_with_drafts_layers_with_windows_find_what_layers_without_do() -> None:
    """Right and wrong ones: no place is dropped, and hits need not be multiples (vLLM #51441, #53786)."""

    def found(groups: tuple[CacheGroup, ...], max_tokens: int) -> int:
        settings = {"groups": groups, "max_model_len": 400, "num_blocks": 300, "max_drafts": 3}
        world = World(small_config(**settings), max_drafts=3)
        turn(world, 1, prompt(37), max_tokens=max_tokens)
        assert any(plan.draft_token_ids for plan in world.worker.plans)
        return turn(world, 2, [*prompt(37), *continuation(prompt(37), max_tokens), 3, 4, 5], max_tokens=6)

    for max_tokens in range(3, 12):
        least = found((FULL,), max_tokens)
        assert least > 0.85 * (37 + max_tokens)
        for groups in ((FULL, WINDOW), (WINDOW,), (FULL, WINDOW, STATE)):
            assert found(groups, max_tokens) >= least


@pytest.mark.night
@pytest.mark.parametrize(
    ("groups", "keeps_thoughts"),
    [((FULL, STATE), True), ((FULL, STATE), False), ((FULL, WINDOW), False), ((FULL, WINDOW, STATE), True)],
)
def test_sixty_turns_find_what_earlier_ones_had(
    groups: tuple[CacheGroup, ...], *, keeps_thoughts: bool
) -> None:
    """A template keeps all that it was told, or drops the thoughts of earlier turns."""
    world = grouped(*groups, num_blocks=1500, max_model_len=4000, max_num_batched_tokens=256)
    begin, history = [80, 81, 82, 83] * 3, prompt(60, 5)
    num_found = num_earlier = 0
    for number in range(1, 61):
        asked = [*history, *prompt(6 + number % 5, number)]
        world.add(make_sequence(number, [*asked, *begin], max_tokens=6, restore_at=(len(asked),)))
        num_found += world.step().scheduled[0].start
        num_earlier += len(history) if number > 1 else 0
        world.run()
        told = world.tokens[SequenceId(number)]
        history = [*asked, *begin, *told] if keeps_thoughts else [*asked, *begin[:4], *told[4:]]
    assert num_found >= 0.95 * num_earlier


@pytest.mark.night
@pytest.mark.parametrize("groups", [(FULL, STATE), (FULL, WINDOW)])
def test_from_the_third_on_all_of_a_crowd_find_their_common_text(groups: tuple[CacheGroup, ...]) -> None:
    """1,500 tokens are common to 64 requests of 2,200 (vLLM #45238: 0 of 64 hit)."""
    world = grouped(*groups, block_size=16, num_blocks=1500, max_model_len=4000, max_num_batched_tokens=1024)
    common = prompt(1500)
    found = [turn(world, number, [*common, *prompt(700, number)], max_tokens=1) for number in range(1, 65)]
    assert found[2:] == [1488] * 62, "all full blocks"


def test_where_there_is_no_room_for_a_copy_a_sequence_goes_on_in_the_state_that_it_found() -> None:
    world = grouped(FULL, STATE, num_blocks=21)
    assert turn(world, 1, prompt(37), max_tokens=1) == 0
    assert turn(world, 2, prompt(45), max_tokens=1) == 37
    assert not world.scheduler.kv.pool.num_used


def test_a_state_that_went_to_the_host_comes_back() -> None:
    world = grouped(FULL, STATE, num_blocks=30, num_host_blocks=100)
    turn(world, 1, prompt(40))
    for number in (2, 3, 4):
        turn(world, number, prompt(70, number), max_tokens=2)
    assert turn(world, 5, prompt(44)) == 28
    assert any(plan.swap_in for plan in world.worker.plans)


def test_states_that_gave_way_to_others_go_to_the_host_as_keys_and_values_do() -> None:
    world = grouped(FULL, STATE, num_blocks=240, num_host_blocks=2000)
    for number in range(1, 31):
        turn(world, number, prompt(60, number), max_tokens=3)
    found = [turn(world, 100 + number, prompt(60, number), max_tokens=3) for number in range(1, 31)]
    assert found == [48] * 30


def test_a_state_in_which_a_sequence_goes_on_is_copied_to_the_host_before() -> None:
    world = grouped(FULL, STATE, num_blocks=20, num_host_blocks=100)
    assert turn(world, 1, prompt(36), max_tokens=1) == 0
    for number in (2, 3):
        assert turn(world, number, [*prompt(36), *([85 + number] * 9)], max_tokens=1) == 36
    assert not any(plan.copies for plan in world.worker.plans), "there is no room for one"


def test_a_state_that_takes_longer_to_copy_than_a_step_may_wait_goes_to_the_host_all_the_same() -> None:
    """Without it the keys and values that the host has are of no use."""
    world = grouped(FULL, STATE, num_blocks=30, num_host_blocks=100, copy_s_per_block=0.005)
    turn(world, 1, prompt(40))
    turn(world, 2, prompt(4, 2), max_tokens=95)
    assert {len(plan.swap_out) for plan in world.worker.plans} == {0, 1, 5}, "a state, or few blocks at once"
    assert turn(world, 3, prompt(44)) == 28


def test_a_window_that_went_to_the_host_comes_back() -> None:
    """A tier on the host turns no group off (vLLM #41830)."""
    for groups in ((FULL, WINDOW), (WINDOW, FULL, STATE)):
        world = grouped(*groups, num_blocks=60, num_host_blocks=200)
        turn(world, 1, prompt(40))
        for number in (2, 3, 4):
            turn(world, number, prompt(70, number), max_tokens=2)
        assert turn(world, 5, prompt(44)) >= 28
        assert {len(plan.swap_in) > 0 for plan in world.worker.plans} == {True, False}


def test_a_prompt_holds_a_window_and_what_prompts_get_of_a_step() -> None:
    """And not as much as a step of decodes and prompts could have: 8 and 64 tokens touch 19 places."""
    world = grouped(WINDOW, max_num_batched_tokens=256, max_prefill_tokens=64)
    world.add(make_sequence(1, prompt(300), max_tokens=2))
    most = 0
    while world.scheduler.has_unfinished_requests:
        plan = world.step()
        assert plan.num_scheduled_tokens <= 64
        most = max(most, world.scheduler.kv.pool.num_used)
    assert most == 3 * 19
    assert world.tokens[SequenceId(1)] == continuation(prompt(300), 2)


def test_a_prompt_goes_on_where_a_reply_ended_within_a_block() -> None:
    """An agent sends back all that it was told; the last token of a reply was never computed."""
    for groups in ((FULL, STATE), (FULL, WINDOW, STATE), (STATE,)):
        for max_tokens in range(1, 10):
            world = grouped(*groups, num_blocks=400)
            turn(world, 1, prompt(37), max_tokens=max_tokens)
            history = [*prompt(37), *continuation(prompt(37), max_tokens)]
            assert turn(world, 2, [*history, 3, 4, 5], max_tokens=6) == len(history) - 1
            assert turn(world, 3, [*history[:-2], 88, 88, 88], max_tokens=6) < len(history) - 1
            assert turn(world, 4, [*history, 6, 7], max_tokens=6) == len(history) - 1, "it was copied"


def test_the_end_of_a_reply_that_a_client_left_is_found_but_not_of_one_that_failed() -> None:
    for is_failure in (False, True):
        world = grouped(FULL, STATE)
        world.add(make_sequence(1, prompt(30), max_tokens=20))
        for _ in range(6):
            world.step()
        history = [*prompt(30), *world.tokens[SequenceId(1)]]
        if is_failure:
            world.worker.poisoned.add(SequenceId(1))
            world.step()
        else:
            world.abort(1)
        found = turn(world, 2, [*history, 3, 4, 5], max_tokens=6)
        assert found == (0 if is_failure else len(history) - 1)


def test_a_client_that_leaves_while_drafts_are_verified_leaves_no_end_of_its_reply() -> None:
    """The state stands behind the drafts that held by then, and the scheduler does not know how many."""
    world = grouped(FULL, STATE)
    world.add(make_sequence(1, prompt(10), max_tokens=20))
    world.step()
    right = continuation(prompt(10), 20)
    world.scheduler.update_draft_token_ids({SequenceId(1): tuple(right[1:4])})
    assert world.step(abort_meanwhile=1).draft_token_ids
    assert turn(world, 2, [*prompt(10), *right]) == 0


def test_named_positions_take_the_place_of_the_guess_at_the_end_of_the_message() -> None:
    world = grouped(FULL, STATE)
    tokens = prompt(60)
    world.add(make_sequence(1, tokens, max_tokens=1, restore_at=(22, 41)))
    taps = []
    while world.scheduler.has_unfinished_requests:
        taps += [tap.position for tap in world.step().taps]
    assert taps == [20, 40]
    start = world.ended[SequenceId(1)].start
    assert start is not None
    assert start.num_kept_tokens == 40
    assert world.scheduler.stats().num_restore_points == 2
    assert turn(world, 2, [*tokens[:25], 88, 88], max_tokens=1) == 20


def test_where_a_prompt_can_be_gone_on_from_anywhere_its_full_blocks_are_kept() -> None:
    for caching, num_kept in ((PrefixCaching.ON, 36), (PrefixCaching.OFF, 0)):
        world = grouped(FULL, prefix_caching=caching)
        turn(world, 1, prompt(38), max_tokens=1)
        start = world.ended[SequenceId(1)].start
        assert start is not None
        assert start.num_kept_tokens == num_kept


def test_states_take_a_quarter_of_a_full_cache_and_those_used_lately_are_kept() -> None:
    world = grouped(FULL, STATE, num_blocks=240)
    system = prompt(40)
    for number in range(1, 40):
        tokens = [*system, *prompt(24, number)] if number % 3 == 0 else prompt(60, number)
        found = turn(world, number, tokens, max_tokens=3)
        assert number < 9 or number % 3 or found == 40, "each visitor makes it young again"
        (state,) = [use for use in world.scheduler.group_uses() if use.name == "state"]
        assert number < 16 or state.num_findable <= 240 // 4 + 6


def test_a_state_in_a_long_prompt_is_kept_where_a_block_ends() -> None:
    """Blocks of six tokens, of which no number is as long as the steady points are far apart."""
    world = grouped(
        FULL, STATE, block_size=6, num_blocks=4000, max_model_len=9000, max_num_batched_tokens=512
    )
    tokens = prompt(8400)
    world.add(make_sequence(1, tokens, max_tokens=2))
    taps = []
    while world.scheduler.has_unfinished_requests:
        taps += world.step().taps
    assert any(8000 < tap.position <= 8192 for tap in taps)
    assert not [tap for tap in taps if tap.position % 6]
    other = [*tokens[:8192], *prompt(40, 3)]
    assert turn(world, 2, other) == max(tap.position for tap in taps if tap.position <= 8192)


def test_a_report_says_how_much_of_a_prompt_was_found_and_which_group_lacked_the_rest() -> None:
    world = grouped(FULL, STATE)
    turn(world, 1, prompt(60), max_tokens=2)
    world.add(make_sequence(2, [*prompt(40), *prompt(20, 3)], max_tokens=1))
    world.step()
    (report,) = world.scheduler.report(ReportPage(0, 1), now_s=0.0)
    assert (report.num_cached_tokens, report.num_lost_tokens, report.lost_to) == (0, 40, "state")
    world.run()
    start = world.ended[SequenceId(2)].start
    assert start is not None
    assert (start.num_cached_tokens, start.num_lost_tokens, start.lost_to) == (0, 40, "state")


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, STATE), (FULL, WINDOW), (FULL, WINDOW, STATE)])
def test_the_choice_between_engines_knows_what_each_group_has(groups: tuple[CacheGroup, ...]) -> None:
    """A prefix whose window was passed, or whose state was not kept, is none there.

    The ends of replies are left out: no key of a full block stands for them.
    """
    world, drawn = grouped(*groups, num_blocks=300), Random(0)
    journal = PrefixJournal(JournalContent.KEYS)
    world.scheduler.kv.keep_journal(journal)
    view = EngineView(EngineSize(100, 4, 4, 16, places_of(world.config)))
    num_found = []
    for number in range(1, 60):
        tokens = [*prompt(40, number % 3)[: drawn.choice((12, 40))], *prompt(drawn.randint(1, 40), number)]
        view.note_prefixes(journal.take())
        foreseen = view.num_cached_tokens(prompt_keys(tokens, 4, root_key("")))
        num_found.append(turn(world, number, tokens, max_tokens=drawn.randint(1, 9)))
        assert num_found[-1] == foreseen
    assert any(num_found)


@pytest.mark.parametrize(
    ("groups", "num_blocks", "has_room"),
    [((STATE,), 10, True), ((STATE,), 9, False), ((WINDOW,), 45, True), ((FULL,), 45, False)],
)
def test_the_choice_between_engines_counts_the_blocks_of_each_group(
    groups: tuple[CacheGroup, ...], num_blocks: int, *, has_room: bool
) -> None:
    """A state takes as many blocks for a long prompt as for a short one, and a window few more."""
    view = EngineView(
        EngineSize(num_blocks, 4, 4, 16, places_of(small_config(groups=groups, max_model_len=400)))
    )
    view.num_unbegun_blocks, view.num_unbegun_tokens = view.num_blocks(100), 100
    assert (view.cost(100) < 200 + 4 * num_blocks) == has_room


def test_routers_outside_are_told_of_each_group_but_a_state() -> None:
    """Blocks that a window gave back are gone in its group alone."""
    world = grouped(WINDOW, FULL, STATE, num_blocks=100)
    journal, outside = PrefixJournal(JournalContent.TOKENS), SharedBlocks()
    world.scheduler.kv.keep_journal(journal)
    known: dict[int | None, set[int]] = {0: set(), 1: set()}
    kinds: dict[int | None, tuple[str | None, int | None]] = {}
    for number in range(1, 30):
        turn(world, number, prompt(50, number % 4), max_tokens=4)
        for event in outside.events(0, journal.take()):
            if isinstance(event, BlockStored):
                known[event.group_idx] |= {*event.block_hashes}
                kinds[event.group_idx] = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
                assert len(event.token_ids) == event.block_size == 4
            elif isinstance(event, BlockRemoved):
                known[event.group_idx] -= {*event.block_hashes}
        for group, hashes in known.items():
            keys = published(world.scheduler.kv.index.caches[group or 0])
            assert hashes == {block_hash(key) for key in keys.values()}
    assert kinds == {0: ("sliding_window", 8), 1: ("full_attention", None)}


def test_routers_outside_are_told_nothing_of_a_model_that_has_a_state_alone() -> None:
    """They could not use it: a state is none of the blocks before it."""
    world = grouped(STATE)
    journal = PrefixJournal(JournalContent.TOKENS)
    world.scheduler.kv.keep_journal(journal)
    for number in range(1, 4):
        turn(world, number, prompt(50, number % 2), max_tokens=6)
    changes = journal.take()
    assert changes
    assert not SharedBlocks().events(0, changes)
