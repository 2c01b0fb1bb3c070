"""The table of models behind one address: the model that a name means, and the names that a key may use.

Owns: the order of resolution: exact names, profiles and adapters, patterns in the order of the models, and
the first model where none is named.
Never: loads anything or asks an engine; all is computed from names.
"""

from collections.abc import Sequence

from engine.types import ModelNames, fits_any

NameTable = Sequence[ModelNames]


def resolve(name: str | None, table: NameTable) -> int | None:
    """Return the place of the model that a name means; None if it means none."""
    for place, names in enumerate(table):
        if names.served and (name is None or name in names.served):
            return place
    for place, names in enumerate(table):
        if name in names.variants:
            return place
    for place, names in enumerate(table):
        if name is not None and fits_any(name, names.patterns):
            return place
    return None


def is_hidden(name: str, table: NameTable, seen: NameTable) -> bool:
    """Tell whether a name is that of a model or variant which is missing in the part of a table that is seen.

    No pattern of another one may answer for it: its engine would know the variant by that name.
    """
    return seen is not table and any(
        name in (*names.served, *names.variants) and name not in (*kept.served, *kept.variants)
        for names, kept in zip(table, seen, strict=True)
    )


def visible(table: NameTable, allowed: Sequence[str] | None) -> NameTable:
    """Return the table as a key sees it that may use the names in `allowed`, of which some have a `*`.

    A model is there with all of its names if one of them is allowed; a variant only by its own. `allowed`
    None is all.
    """
    if allowed is None:
        return table
    return [_visible(names, allowed) for names in table]


def _visible(names: ModelNames, allowed: Sequence[str]) -> ModelNames:
    variants = tuple(each for each in names.variants if fits_any(each, allowed))
    if any(fits_any(each, allowed) for each in names.served):
        return names._replace(variants=variants)
    return ModelNames(served=(), variants=variants)


def twice(table: NameTable) -> tuple[str, int, int] | None:
    """Return a name that two models have, with the places of both; None if there is none."""
    first: dict[str, int] = {}
    for place, names in enumerate(table):
        for name in (*names.served, *names.patterns, *names.variants):
            if first.setdefault(name, place) != place:
                return name, first[name], place
    return None
