"""Drafts are verified where that pays, by rates and times that were measured."""

from collections.abc import Callable
from random import Random

import pytest

from scheduler.config import DraftAdmission
from scheduler.draft_messages import DraftReason
from scheduler.messages import SequenceId
from scheduler.step.draft_choice import DraftRule, StepCosts
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
            rule.note_offer(each, text, offers[each])
        chosen = dict.fromkeys(texts, num_fixed)
        if num_fixed is None:
            chosen, _ = rule.choose(offers, num_decodes=num_seqs, has_prefill=False)
        size = num_seqs + sum(num or 0 for num in chosen.values())
        took_s = step_s(size) * random.uniform(0.97, 1.03)
        rule.costs.observe(size, took_s)
        seconds += took_s
        for each, text in texts.items():
            verified = offers[each][: chosen.get(each) or 0]
            num_right = next((place for place, draft in enumerate(verified) if draft), len(verified))
            text += [0] * (num_right + 1) if num_right < len(verified) else [0] * num_right
            if num_right == len(verified):  # the next token, as the next draft would have it or not
                text.append(offers[each][num_right] * 0 if num_right < NUM_OFFERED else 0)
            num_tokens += num_right + 1
    return num_tokens / seconds


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
    chosen, why = rule.choose({SequenceId(1): (1, 2)}, num_decodes=1, has_prefill=True)
    assert (chosen, why.reason, why.num_offered) == ({}, DraftReason.PREFILL, 2)


def test_offers_that_were_not_verified_teach_too() -> None:
    rule = DraftRule(4)
    known = [5]
    for token_id in range(6, 40):
        rule.note_offer(SequenceId(1), known, (token_id + 100, 1))
        known.append(token_id)
    rule.note_offer(SequenceId(1), known, (1,))
    first, second = rule.rates(SequenceId(1))[:2]
    assert first < 0.05
    assert second == 0.6, "behind a wrong draft nothing is learnt"


def test_costs_between_measured_sizes_lie_between_and_one_hiccup_counts_little() -> None:
    costs = StepCosts()
    costs.observe(1, 0.010)
    costs.observe(5, 0.018)
    assert costs.seconds(3) == pytest.approx(0.014)
    assert costs.seconds(9) == pytest.approx(0.026)
    costs.observe(5, 9.0)
    assert costs.seconds(5) < 0.021


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
            chosen, _ = rule.choose(offers, num_decodes=num_seqs, has_prefill=False)
        size = num_seqs + sum(chosen.values())
        rule.costs.observe(size, on_cpu(size))
        seconds += on_cpu(size)
        asked = rule.ask(dict.fromkeys(texts, NUM_OFFERED), num_decodes=num_seqs)
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
            rule.note_offer(each, texts[each], offer)
        for place in range(max(asked.values(), default=0)):
            rows = sum(num > place for num in asked.values())
            rule.pass_costs.observe(rows, pass_s)
            seconds += pass_s
    return num_tokens / seconds


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


def test_a_draft_model_is_asked_once_in_a_while_where_it_was_never_right() -> None:
    rule = DraftRule(4)
    rule.costs.observe(1, 0.02)
    rule.pass_costs.observe(1, 0.03)
    asked = [rule.ask({SequenceId(1): 4}, num_decodes=1) for _ in range(130)]
    assert sum(bool(each) for each in asked) == 2
