"""Drafts are verified where that pays, by rates and times that were measured."""

from collections.abc import Callable
from random import Random
from statistics import mean

import pytest

from scheduler.config import DraftAdmission, DraftSupply
from scheduler.draft_messages import DraftReason
from scheduler.drafts.draft_rates import DraftSource
from scheduler.drafts.draft_rule import Drafting, DraftRule, StepCosts
from scheduler.messages import ModelRunnerOutput, SequenceId
from scheduler.scheduler import Scheduler
from tests.fakes import make_sequence
from tests.world import World, small_config

NUM_OFFERED = 5
STEPS = 160


def on_cpu(num_tokens: int) -> float:
    """A step of Qwen3-0.6B on two cores: 1 row 25 ms, 8 rows 43, 32 rows 99."""
    return 0.0227 + 0.0024 * num_tokens


def with_knee(num_tokens: int) -> float:
    """Flat while weights are read, then as the arithmetic goes."""
    return 0.005 + 0.00008 * max(num_tokens - 24, 0)


def tokens_per_s(
    step_s: Callable[[int], float], num_seqs: int, rate: float, num_fixed: int | None = None
) -> float:
    """Speed with drafts that are right at `rate`, chosen by the rule, or always so many of each sequence."""
    random, rule = Random(7), DraftRule(NUM_OFFERED)
    texts = {SequenceId(number): [0] for number in range(num_seqs)}
    num_tokens, seconds = 0, 0.0
    for _ in range(STEPS):
        offers = {}
        for each, text in texts.items():  # a right draft is 0
            offers[each] = tuple(int(random.random() >= rate) for _ in range(NUM_OFFERED))
            rule.note_offer(each, text, offers[each], DraftSource.TEXT)
        chosen = dict.fromkeys(texts, num_fixed)
        if num_fixed is None:
            num_offered = {each: len(offer) for each, offer in offers.items()}
            chosen, _ = rule.choose(num_offered, num_decodes=num_seqs, has_prefill=False)
        size = num_seqs + sum(num or 0 for num in chosen.values())
        took_s = step_s(size) * random.uniform(0.97, 1.03)
        rule.observe(size, took_s)
        seconds += took_s
        for each, text in texts.items():
            verified = offers[each][: chosen.get(each) or 0]
            num_right = next((place for place, draft in enumerate(verified) if draft), len(verified))
            text += [0] * (num_right + 1) if num_right < len(verified) else [0] * num_right
            if num_right == len(verified):  # the next token, as the next draft would have it or not
                text.append(offers[each][num_right] * 0 if num_right < NUM_OFFERED else 0)
            num_tokens += num_right + 1
    return num_tokens / seconds


@pytest.mark.night
@pytest.mark.pairs
@pytest.mark.parametrize("num_seqs", [1, 4, 16, 64])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("step_s", [on_cpu, with_knee])
def test_the_choice_is_never_much_slower_than_none_nor_than_the_best_fixed_number(
    step_s: Callable[[int], float], rate: float, num_seqs: int
) -> None:
    found = tokens_per_s(step_s, num_seqs, rate)
    fixed = [tokens_per_s(step_s, num_seqs, rate, num) for num in (0, 2, 5)]
    assert found >= 0.97 * fixed[0]
    assert found >= 0.95 * max(fixed)


def test_a_step_with_a_prompt_verifies_none() -> None:
    rule = DraftRule(4)
    chosen, why = rule.choose({SequenceId(1): 2}, num_decodes=1, has_prefill=True)
    assert (chosen, why.reason, why.num_offered) == ({}, DraftReason.PREFILL, 2)


def test_offers_that_were_not_verified_teach_too() -> None:
    rule = DraftRule(4)
    known = [5]
    for token_id in range(6, 40):
        rule.note_offer(SequenceId(1), known, (token_id + 100, 1), DraftSource.TEXT)
        known.append(token_id)
    rule.note_offer(SequenceId(1), known, (1,), DraftSource.TEXT)
    first, second = rule.rates(SequenceId(1))[:2]
    assert first < 0.05
    assert first < second < 0.2, "behind a wrong draft nothing is learnt, but from other places"


def test_costs_between_measured_sizes_lie_between_and_one_hiccup_counts_little() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(5, 0.018)
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(9) == pytest.approx(0.026)
    costs.observe(5, 9.0)
    assert costs.seconds(5) < 0.021


def test_a_size_that_was_seen_a_few_times_looks_no_cheaper_than_one_that_is_always_seen() -> None:
    random, ratios = Random(2), []
    for _ in range(60):
        costs = StepCosts()
        for _ in range(100):
            costs.observe(8, 0.02 * random.choice([1.0, 1.0, 1.0, 1.2]))
        for _ in range(6):
            costs.observe(24, 0.02 * random.choice([1.0, 1.0, 1.0, 1.2]))
        ratios.append(costs.seconds(24) / costs.seconds(8))
    assert mean(ratios) == pytest.approx(1.0, abs=0.01)


def test_sizes_that_are_not_seen_follow_a_growing_context_and_no_noise() -> None:
    random, costs = Random(1), StepCosts()
    for _ in range(300):
        costs.observe(4, 0.020 * random.uniform(0.9, 1.1))
        costs.observe(16, 0.032 * random.uniform(0.9, 1.1))
    for _ in range(300):
        costs.observe(16, 0.032 * random.uniform(0.9, 1.1))
    assert costs.seconds(4) == pytest.approx(0.020, rel=0.06)
    for step in range(300):
        costs.observe(16, 0.032 + 0.0003 * step)
    assert costs.seconds(4) > 0.020 + 0.4 * 0.09


def test_the_scheduler_verifies_what_pays_and_says_why() -> None:
    config = small_config(num_blocks=64, draft_admission=DraftAdmission.PAYING, max_drafts=4)
    world = World(config, max_drafts=3)
    world.add(*(make_sequence(number, [number] * 5, max_tokens=40) for number in (1, 2)))
    plans = [world.step() for _ in range(12)]
    assert any(plan.draft_token_ids for plan in plans)
    said = [plan.draft_choice for plan in plans if plan.draft_choice is not None]
    assert said
    assert all(each.num_chosen <= each.num_offered for each in said)
    world.run()


def asking_speed(pass_s: float, rate: float, num_seqs: int, *, num_fixed: int | None = None) -> float:
    """Speed with a draft model whose drafts are right at `rate`, asked by the rule or always for so many."""
    random, rule = Random(3), DraftRule(NUM_OFFERED)
    texts = {SequenceId(number): [0] for number in range(num_seqs)}
    offers: dict[SequenceId, tuple[int, ...]] = {}
    num_tokens, seconds = 0, 0.0
    for _ in range(STEPS):
        chosen = {each: len(offer) for each, offer in offers.items()}
        if num_fixed is None:
            num_offered = {each: len(offer) for each, offer in offers.items()}
            chosen, _ = rule.choose(num_offered, num_decodes=num_seqs, has_prefill=False)
        size = num_seqs + sum(chosen.values())
        rule.observe(size, on_cpu(size))
        seconds += on_cpu(size)
        drafting = {
            each: Drafting(NUM_OFFERED, lag=1, num_generated=len(text), num_left=STEPS)
            for each, text in texts.items()
        }
        asked = rule.ask(drafting, num_decodes=num_seqs)
        if num_fixed is not None:
            asked = dict.fromkeys(texts, num_fixed)
        for each, text in texts.items():
            verified = offers.get(each, ())[: chosen.get(each, 0)]
            num_right = next((place for place, draft in enumerate(verified) if draft), len(verified))
            text += [0] * (num_right + 1)
            num_tokens += num_right + 1
        offers = {
            each: tuple(int(random.random() >= rate) for _ in range(num))
            for each, num in asked.items()
            if num
        }
        for each, offer in offers.items():  # a right draft is 0
            rule.note_offer(each, texts[each], offer, DraftSource.MODEL)
        for place in range(max(asked.values(), default=0)):
            rows = sum(num > place for num in asked.values())
            rule.pass_costs.observe(rows, pass_s)
            seconds += pass_s
    return num_tokens / seconds


@pytest.mark.night
@pytest.mark.pairs
@pytest.mark.parametrize("num_seqs", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.2, 0.9])
@pytest.mark.parametrize("pass_s", [0.002, 0.02])
def test_a_draft_model_is_asked_where_its_own_time_is_worth_it_too(
    pass_s: float, rate: float, num_seqs: int
) -> None:
    found = asking_speed(pass_s, rate, num_seqs)
    fixed = [asking_speed(pass_s, rate, num_seqs, num_fixed=num) for num in (0, 2, 5)]
    assert found >= 0.97 * fixed[0]
    assert found >= 0.93 * max(fixed)


def test_a_draft_model_that_is_never_right_is_asked_in_a_small_part_of_the_time() -> None:
    rule = DraftRule(4)
    num_asked = 0
    for step in range(4000):
        rule.observe(1, 0.02)
        asked = rule.ask(
            {SequenceId(1): Drafting(4, 1, 40, 400), SequenceId(2): ON_LONG_PROMPT}, num_decodes=1
        )
        if asked:
            num_asked += 1
            assert asked == {SequenceId(1): 1}
            rule.pass_costs.observe(1, 0.03)
            rule.note_offer(SequenceId(1), [step], (step,), DraftSource.MODEL)
    assert 15 <= num_asked <= 1 + 0.01 * 4000 * 0.02 / 0.03


ON_LONG_PROMPT = Drafting(most=4, lag=2000, num_generated=1, num_left=400)


def test_a_prompt_is_caught_up_with_where_what_is_left_wins_its_time_back() -> None:
    rule = DraftRule(4)
    for _ in range(30):
        rule.observe(1, 0.025)
        rule.observe(5, 0.027)
        rule.pass_costs.observe(1, 0.002)
        rule.pass_costs.observe(200, 0.1)
    known = [0]
    for _ in range(40):  # mostly right
        rule.note_offer(SequenceId(9), known, (0, 0, 0, 1), DraftSource.MODEL)
        known += [0] * 4
    short, late = ON_LONG_PROMPT._replace(lag=200), ON_LONG_PROMPT._replace(lag=200, num_left=4)
    asked = rule.ask({SequenceId(1): short, SequenceId(2): late}, num_decodes=2)
    assert set(asked) == {1}
    grown = ON_LONG_PROMPT._replace(num_generated=300)
    assert not rule.ask({SequenceId(1): ON_LONG_PROMPT}, num_decodes=1)
    assert set(rule.ask({SequenceId(1): grown}, num_decodes=1)) == {1}


def test_sources_and_places_have_rates_of_their_own_and_share_them_where_little_is_known() -> None:
    rule = DraftRule(4)
    known = [0]
    for _ in range(30):
        rule.note_offer(SequenceId(1), known, (0, 0, 1), DraftSource.PREDICTION)
        known += [0, 0, 0]
    rule.note_offer(SequenceId(2), [5], (6,), DraftSource.PREDICTION)
    rule.note_offer(SequenceId(3), [5], (6,), DraftSource.TEXT)
    assert rule.rates(SequenceId(2)) == pytest.approx(rule.rates(SequenceId(1)), abs=0.1)
    assert rule.rates(SequenceId(3)) == [0.6] * 4
    first, second, third, _ = rule.rates(SequenceId(2))
    assert min(first, second) > 0.85
    assert third < 0.2


@pytest.mark.parametrize(("wait_s", "pays"), [(0.0, True), (0.002, True), (0.02, False)])
def test_drafts_win_back_the_time_for_which_the_worker_waits_for_their_plans(
    wait_s: float, *, pays: bool
) -> None:
    rule = DraftRule(4)
    for _ in range(20):
        rule.observe(1, 0.0100)
        rule.observe(5, 0.0105)
        rule.observe_wait(wait_s, has_drafts=True)
        rule.observe_wait(wait_s, has_drafts=False)  # behind it
    rule.note_offer(SequenceId(1), [5], (6, 7, 8, 9), DraftSource.TEXT)
    chosen, why = rule.choose({SequenceId(1): 4}, num_decodes=1, has_prefill=False)
    assert chosen == ({SequenceId(1): 4} if pays else {})
    assert why.expected_s == pytest.approx(0.0105 + 2 * wait_s if pays else 0.0100, rel=0.01)


def steps_until_drafts_are_back(*, long_wait_s: float, after: int) -> int:
    """Count steps after a long wait until 20 of 25 have drafts. All are right, and bring a wait of 0.5 ms."""
    rule, known, sequence_id = DraftRule(4), [0], SequenceId(1)
    have_drafts = []
    for step in range(after + 1000):
        rule.note_offer(sequence_id, known, (1,) * 4, DraftSource.TEXT)
        chosen, _ = rule.choose({sequence_id: 4}, num_decodes=1, has_prefill=False)
        num_drafts = chosen.get(sequence_id, 0)
        rule.observe(1 + num_drafts, 0.010 + 0.0001 * num_drafts)
        usual_s = 0.0005 if num_drafts else 0.0
        rule.observe_wait(long_wait_s if step == after else usual_s, has_drafts=bool(num_drafts))
        known += [1] * (1 + num_drafts)
        have_drafts.append(num_drafts > 0)
    return next(num for num in range(1000) if sum(have_drafts[after + 1 + num :][:25]) >= 20)


@pytest.mark.parametrize("after", [5, 200])
def test_one_long_wait_of_the_worker_does_not_keep_drafts_away(after: int) -> None:
    assert steps_until_drafts_are_back(long_wait_s=1.0, after=after) <= 64


def test_waits_of_steps_that_were_planned_ahead_are_none_of_drafts() -> None:
    rule = DraftRule(4)
    rule.observe(1, 0.010)
    for _ in range(1000):
        rule.observe_wait(0.002, has_drafts=False)
    rule.observe_wait(0.0005, has_drafts=True)
    rule.note_offer(SequenceId(1), [5], (6, 7, 8, 9), DraftSource.TEXT)
    rule.observe(5, 0.0105)
    _, why = rule.choose({SequenceId(1): 4}, num_decodes=1, has_prefill=False)
    assert why.expected_s == pytest.approx(0.0110)


def test_waits_for_plans_that_became_shorter_are_soon_believed() -> None:
    rule = DraftRule(4)
    for wait_s in [0.02] * 20 + [0.0] * 100:  # the latter planned ahead, since drafts do not pay
        rule.observe(1, 0.0100)
        rule.observe(5, 0.0105)
        rule.observe_wait(wait_s, has_drafts=wait_s > 0)
    rule.observe_wait(0.0001, has_drafts=True)  # a probe
    rule.note_offer(SequenceId(1), [5], (6, 7, 8, 9), DraftSource.TEXT)
    chosen, _ = rule.choose({SequenceId(1): 4}, num_decodes=1, has_prefill=False)
    assert chosen == {SequenceId(1): 4}


def test_of_a_long_prompt_a_draft_model_is_believed_to_have_computed_what_it_has() -> None:
    changes = {"draft_admission": DraftAdmission.PAYING, "draft_supply": DraftSupply.ASKED, "max_drafts": 4}
    scheduler = Scheduler(small_config(num_blocks=200, max_model_len=500, **changes))
    long, short = SequenceId(1), SequenceId(2)
    scheduler.add_request(make_sequence(long, [1] * 200, max_tokens=200), now_s=0.0)
    scheduler.add_request(make_sequence(short, [1] * 4, max_tokens=200), now_s=0.0)
    num_tokens = {long: 200, short: 4}
    num_followed = 0
    asked = {long: 0, short: 0}
    now_s = 0.0
    for _ in range(60):
        plan = scheduler.schedule(now_s=now_s)
        sampled = {}
        for share in plan.scheduled:
            if share.samples:  # each draft is right
                sampled[share.sequence_id] = (1,) * (1 + len(plan.draft_token_ids.get(share.sequence_id, ())))
                num_tokens[share.sequence_id] += len(sampled[share.sequence_id])
        passes, drafts, followed = [], {}, {}
        for each in plan.num_drafts_wanted:
            asked[each] += 1
        if short in plan.num_drafts_wanted:
            passes.append((2, 0.001))
            followed[short], drafts[short] = num_tokens[short], (1,) * plan.num_drafts_wanted[short]
        if long in plan.num_drafts_wanted:  # 20 tokens in a pass, and that slowly
            num_followed += 20
            passes.append((20, 1.0))
            followed[long] = num_followed
        result = ModelRunnerOutput(token_ids=sampled, logprobs={}, failures={}, num_followed=followed)
        scheduler.observe_step(plan, 0.025, tuple(passes))
        now_s += 0.025 + sum(seconds for _, seconds in passes)
        scheduler.update_from_output(plan, result)
        scheduler.update_draft_token_ids(drafts)
    assert asked[short] > 20
    assert asked[long] <= 2
