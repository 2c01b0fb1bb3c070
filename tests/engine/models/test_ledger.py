"""Memory shared out among models: what each has, and the refusal where they do not fit together."""

import random

import pytest

from engine.models.ledger import DoesNotFit, share_in_turns, share_out
from worker.doctor_findings import MemoryNeeds


def needs(
    *, budget: int, fixed: int, token: int = 0, least: int = 0, most: int = 0, device: str = "cpu"
) -> MemoryNeeds:
    return MemoryNeeds(
        device=device,
        budget_bytes=budget,
        fixed_bytes=fixed,
        token_bytes=token,
        least_bytes=least,
        most_bytes=most,
    )


def test_with_memory_enough_each_has_what_it_would_have_alone() -> None:
    models = {
        "large": needs(budget=1000, fixed=300, token=4, least=40, most=200),
        "small": needs(budget=990, fixed=50, token=1, least=10, most=100),
        "vectors": needs(budget=980, fixed=20),
    }
    assert share_out(models) == {"large": 200, "small": 100, "vectors": 0}


def test_what_is_left_goes_to_all_by_the_bytes_of_a_token_and_what_one_has_no_use_for_to_the_others() -> None:
    large = needs(budget=500, fixed=100, token=3, least=30, most=10_000)
    small = needs(budget=500, fixed=100, token=1, least=10, most=10_000)
    assert share_out({"large": large, "small": small}) == {"large": 30 + 195, "small": 10 + 65}
    modest = needs(budget=500, fixed=100, token=1, least=10, most=30)
    assert share_out({"large": large, "small": modest}) == {"large": 270, "small": 30}


def test_devices_are_apart() -> None:
    here = needs(budget=100, fixed=50, token=1, least=1, most=90)
    there = needs(budget=100, fixed=60, token=1, least=1, most=90, device="cuda:0")
    assert share_out({"a": here, "b": there}) == {"a": 50, "b": 40}


def test_models_that_do_not_fit_together_are_refused_with_the_numbers_of_each() -> None:
    models = {
        "large": needs(budget=20 << 30, fixed=18 << 30, token=1, least=1 << 30, most=9 << 30),
        "bge": needs(budget=20 << 30, fixed=2 << 30),
    }
    with pytest.raises(DoesNotFit) as refused:
        share_out(models)
    for part in ("21.00 GiB", "20.00 GiB", "large 18.00 GiB", "1.00 GiB of KV cache", "bge 2.00 GiB"):
        assert part in str(refused.value)


def test_models_in_turns_leave_room_for_the_pinned_ones_and_the_small_ones_that_fit_beside_any() -> None:
    large = needs(budget=100, fixed=50, token=1, least=10, most=90)
    other = needs(budget=100, fixed=45, token=1, least=10, most=90)
    vectors = needs(budget=100, fixed=5)
    pinned = needs(budget=100, fixed=10)
    models = {"large": large, "other": other, "vectors": vectors, "pinned": pinned}
    assert share_in_turns(models, {"pinned"}) == {"large": 35, "other": 40, "vectors": 0, "pinned": 0}
    medium = needs(budget=100, fixed=30)  # no small one, and so it takes turns
    assert share_in_turns({"large": large, "a": medium, "b": medium}, ()) == {"large": 50, "a": 0, "b": 0}
    wide = needs(budget=100, fixed=70, token=1, least=25, most=30)  # beside which the small one has no place
    with_wide = {"large": large, "wide": wide, "vectors": needs(budget=100, fixed=6)}
    assert share_in_turns(with_wide, ()) == {"large": 50, "wide": 30, "vectors": 0}


def test_no_budget_is_ever_exceeded_and_none_has_less_than_it_needs() -> None:
    chance = random.Random(45)
    num_shared = 0
    for _ in range(500):
        budget = chance.randrange(1, 10_000)
        models = {}
        for number in range(chance.randrange(1, 5)):
            least = chance.randrange(0, 500)
            most = least + chance.choice((0, chance.randrange(1, 5000)))
            token = chance.randrange(1, 50)
            models[str(number)] = needs(
                budget=budget, fixed=chance.randrange(2000), token=token, least=least, most=most
            )
        taken = sum(each.fixed_bytes for each in models.values())
        try:
            shares = share_out(models)
        except DoesNotFit:
            assert taken + sum(each.least_bytes for each in models.values()) > budget
            continue
        assert taken + sum(shares.values()) <= budget
        assert all(each.least_bytes <= shares[name] <= each.most_bytes for name, each in models.items())
        is_short = any(shares[name] < each.most_bytes for name, each in models.items())
        if is_short:  # then next to nothing is left: less than a byte for each byte of a token
            num_shared += 1
            assert budget - taken - sum(shares.values()) <= sum(each.token_bytes for each in models.values())
    assert num_shared > 20
