"""Setup of a simulation: the scheduler's configuration, the duration of steps, replicas, load.

Owns: the names of variants. `priority+aging=10` is the policy `priority` with priority_aging_s = 10; each
field of SchedulerConfig may stand there under its own name, and load, replicas, router, draft_rates and
draft_pass_ms.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from bench.simulate.fitted_step_time import LinearStepTime
from bench.simulate.router import RouterKind
from bench.simulate.simulated_drafts import NO_DRAFTS, DraftSource
from scheduler.config import DraftAdmission, DraftSupply, SchedulerConfig, SchedulingPolicy

_SHORT_NAMES = {"aging": "priority_aging_s", "blocks": "num_blocks", "seqs": "max_num_seqs"}


class SetupError(Exception):
    """There is no such variant; the text says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One column of the report."""

    name: str
    config: SchedulerConfig
    step_time: LinearStepTime
    num_replicas: int = 1
    router: RouterKind = RouterKind.LEAST_WAITING
    load: float = 1.0
    """Factor by which requests come faster."""
    drafts: DraftSource = NO_DRAFTS


def with_drafts(setup: Setup, rates: tuple[float, ...], pass_s: float) -> Setup:
    """Let drafts be right so often, and take so long; the scheduler chooses among them as in the server."""
    config = replace(
        setup.config,
        max_drafts=len(rates),
        draft_admission=DraftAdmission.PAYING,
        draft_supply=DraftSupply.ASKED if pass_s else DraftSupply.FREE,
    )
    return replace(setup, config=config, drafts=DraftSource(rates=rates, pass_s=pass_s))


def settable_fields() -> dict[str, type[Any]]:
    """List the fields of SchedulerConfig that can be given as a word or a number, with their types."""
    return {
        each.name: each.type
        for each in fields(SchedulerConfig)
        if isinstance(each.type, type) and (each.type in (int, float) or issubclass(each.type, StrEnum))
    }


def parse_value(text: str, kind: type[Any]) -> Any:
    """Read a value. Raises ValueError that says what was expected."""
    if issubclass(kind, StrEnum):
        if text not in list(kind):
            raise ValueError(f"expected {' or '.join(list(kind))}, got {text!r}")
        return kind(text)
    try:
        return kind(text)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise ValueError(f"expected {noun}, got {text!r}") from None


def parse_rates(text: str) -> tuple[float, ...]:
    """Read rates by place, as `0.8:0.7:0.6`. Raises ValueError."""
    rates = tuple(float(parse_value(rate, float)) for rate in text.split(":"))
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"expected rates from 0 to 1, as 0.8:0.7:0.6, got {text!r}")
    return rates


def variant(base: Setup, text: str) -> Setup:
    """Return `base` changed by the words of `text`, joined by +. Raises SetupError."""
    setup = replace(base, name=text)
    for word in text.split("+"):
        name, equals, value = word.partition("=")
        try:
            if equals:
                setup = _with(setup, _SHORT_NAMES.get(name, name), value)
            elif word in list(SchedulingPolicy):
                setup = replace(setup, config=replace(setup.config, policy=SchedulingPolicy(word)))
            elif word != "base":
                raise ValueError(f"expected base, {', '.join(SchedulingPolicy)} or NAME=VALUE")
        except ValueError as error:
            raise SetupError(f"{word!r} in the variant {text!r}: {error}") from None
    return setup


def _with(setup: Setup, name: str, value: str) -> Setup:
    if name == "load":
        load = float(parse_value(value, float))
        if not 0 < load < float("inf"):
            raise ValueError("the load must be above 0")
        return replace(setup, load=load)
    if name == "replicas":
        num_replicas = int(parse_value(value, int))
        if num_replicas < 1:
            raise ValueError("there must be at least 1 replica")
        return replace(setup, num_replicas=num_replicas)
    if name == "router":
        return replace(setup, router=parse_value(value, RouterKind))
    if name == "draft_rates":
        return with_drafts(setup, parse_rates(value), setup.drafts.pass_s)
    if name == "draft_pass_ms":
        return with_drafts(setup, setup.drafts.rates, float(parse_value(value, float)) / 1e3)
    kinds = settable_fields()
    if name not in kinds:
        others = ("load", "replicas", "router", "draft_rates", "draft_pass_ms", *kinds)
        raise ValueError(f"there is no such setting; there are {', '.join(others)}")
    return replace(setup, config=replace(setup.config, **{name: parse_value(value, kinds[name])}))
