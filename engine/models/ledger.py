"""The memory of devices, shared out among models.

Owns: the arithmetic: each model has its weights and a KV cache for one sequence at least, and the rest goes
to all in proportion to the bytes of a token. Refusals have the numbers.
"""

from collections.abc import Collection, Mapping, Sequence

from worker.doctor_findings import MemoryNeeds
from worker.memory_sizes import format_size

_SMALL_SHARE = 0.125
"""Share of its device up to which a model is small: others have less cache so that it can stay."""


class DoesNotFit(Exception):
    """Models that do not fit together, with the numbers of each. One sentence."""


def share_out(models: Mapping[str, MemoryNeeds]) -> dict[str, int]:
    """Return the bytes of KV cache of each model by name; 0 for one without. Raises DoesNotFit."""
    shares: dict[str, int] = {}
    for device in {needs.device: None for needs in models.values()}:
        here = {name: needs for name, needs in models.items() if needs.device == device}
        shares |= _share_out_of(device, here)
    return {name: shares[name] for name in models}


def share_in_turns(models: Mapping[str, MemoryNeeds], pinned: Collection[str]) -> dict[str, int]:
    """Return shares as `share_out`, for models that need not be loaded at once, but for the pinned ones.

    If all fit together they share all. Else each of the others has what is left by the pinned ones and
    by those small enough to stay with any; these have the least that any of these plans leaves them.
    Raises DoesNotFit.
    """
    try:
        return share_out(models)
    except DoesNotFit:
        if len(models) == len(pinned):
            raise
    shares: dict[str, int] = {}
    kept = _kept(models, pinned)
    for name in models.keys() - kept.keys():
        for each, share_bytes in share_out({**kept, name: models[name]}).items():
            shares[each] = min(share_bytes, shares.get(each, share_bytes))
    return {name: shares[name] for name in models}


def _kept(models: Mapping[str, MemoryNeeds], pinned: Collection[str]) -> dict[str, MemoryNeeds]:
    """The pinned models and, smallest first, the small ones with which each of the others fits."""
    kept = {name: needs for name, needs in models.items() if name in pinned}
    small = [name for name, needs in models.items() if name not in pinned and _is_small(needs)]
    for name in sorted(small, key=lambda name: models[name].fixed_bytes + models[name].least_bytes):
        more = {**kept, name: models[name]}
        try:
            for other in models.keys() - more.keys():
                share_out({**more, other: models[other]})
        except DoesNotFit:
            break
        kept = more
    return kept


def _is_small(needs: MemoryNeeds) -> bool:
    return needs.fixed_bytes + needs.least_bytes <= needs.budget_bytes * _SMALL_SHARE


def describe(name: str, needs: MemoryNeeds, share_bytes: int) -> str:
    """Describe the place of one model in the plan."""
    cache = f"KV cache {format_size(share_bytes)}"
    if needs.token_bytes:
        cache += f" for {share_bytes // needs.token_bytes:,} tokens"
        if share_bytes < needs.most_bytes:
            cache += f" ({format_size(needs.most_bytes)} if it were alone)"
    elif not share_bytes:
        cache = "no KV cache that is foreseen"
    return f"{name} on {needs.device}: {format_size(needs.fixed_bytes)} of weights and for steps, {cache}"


def _share_out_of(device: str, models: Mapping[str, MemoryNeeds]) -> dict[str, int]:
    # The first sees most of the device: later looks come upon nothing that is loaded either.
    budget_bytes = min(needs.budget_bytes for needs in models.values())
    shares = {name: needs.least_bytes for name, needs in models.items()}
    left_bytes = budget_bytes - sum(shares[name] + needs.fixed_bytes for name, needs in models.items())
    if left_bytes < 0:
        raise DoesNotFit(_numbers(device, budget_bytes, models))
    growing = [name for name, needs in models.items() if shares[name] < needs.most_bytes]
    while growing and left_bytes > 0:
        weight = sum(models[name].token_bytes for name in growing)
        parts = {
            name: min(left_bytes * models[name].token_bytes // weight, models[name].most_bytes - shares[name])
            for name in growing
        }
        if not any(parts.values()):
            break
        for name, part in parts.items():
            shares[name] += part
            left_bytes -= part
        growing = [name for name in growing if shares[name] < models[name].most_bytes]
    return shares


def _numbers(device: str, budget_bytes: int, models: Mapping[str, MemoryNeeds]) -> str:
    needed = sum(needs.fixed_bytes + needs.least_bytes for needs in models.values())
    each: Sequence[str] = [
        f"{name} {format_size(needs.fixed_bytes)} and at least {format_size(needs.least_bytes)} of KV cache"
        for name, needs in models.items()
    ]
    return (
        f"the models on {device} need {format_size(needed)} together, which has {format_size(budget_bytes)}"
        f" for them: {', '.join(each)}"
    )
