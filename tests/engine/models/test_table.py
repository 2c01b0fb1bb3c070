"""Names of several models: which model a name means, and what a key sees of them."""

import itertools

from engine.models.table import resolve, twice, visible
from engine.types import ModelNames

TABLE = (
    ModelNames(("a", "org/a"), patterns=("claude-*",), variants=("law",)),
    ModelNames(("b",), patterns=("claude-3*", "*"), variants=("b2", "claude-x")),
    ModelNames(("claude-y",)),
)


def test_a_name_means_the_exact_one_then_an_adapter_then_the_first_pattern_and_none_the_first_model() -> None:
    meant = {
        None: 0,
        "a": 0,
        "org/a": 0,
        "b": 1,
        "law": 0,
        "b2": 1,
        "claude-y": 2,  # although a pattern before it fits
        "claude-x": 1,  # an adapter, although a pattern before it fits
        "claude-3": 0,
        "anything": 1,
    }
    assert {name: resolve(name, TABLE) for name in meant} == meant
    assert resolve("anything", (TABLE[0], TABLE[2])) is None
    assert resolve(None, ()) is None


def test_a_key_sees_a_model_with_all_its_names_and_an_adapter_by_its_own_alone() -> None:
    def seen(*allowed: str) -> list[ModelNames]:
        return list(visible(TABLE, allowed))

    nothing = ModelNames(())
    assert seen("org/*") == [TABLE[0]._replace(variants=()), nothing, nothing]
    assert seen("b*") == [nothing, TABLE[1]._replace(variants=("b2",)), nothing]
    assert seen("law") == [ModelNames((), variants=("law",)), nothing, nothing]
    assert seen("nothing") == [nothing] * 3
    assert visible(TABLE, None) is TABLE


def test_no_name_means_a_model_that_a_key_may_not_use_and_its_own_names_mean_the_same_as_ever() -> None:
    names = ["a", "org/a", "law", "b", "b2", "claude-y"]
    for allowed in itertools.chain.from_iterable(itertools.combinations(names, size) for size in (1, 2, 3)):
        table = visible(TABLE, allowed)
        for name in (*names, None, "claude-9", "anything"):
            place = resolve(name, table)
            assert place is None or {*TABLE[place].served, *TABLE[place].variants} & {*allowed}
        for name in allowed:
            assert resolve(name, table) == resolve(name, TABLE)


def test_a_name_that_two_models_have_is_found_with_both() -> None:
    assert twice(TABLE) is None
    assert twice((*TABLE, ModelNames(("c",), variants=("org/a",)))) == ("org/a", 0, 3)
    assert twice((ModelNames(("c",)), ModelNames(("d",), patterns=("e-*",)), ModelNames(("e-*",)))) == (
        "e-*",
        1,
        2,
    )
