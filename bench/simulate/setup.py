"""Setup of a simulation: the scheduler's configuration, the duration of steps, replicas, load.

Owns: the names of variants. `priority+aging=10` is the policy `priority` with priority_aging_s = 10; each
field of SchedulerConfig may stand there under its own name, and load, replicas, roles, cells, router,
stepping, draft_rates and draft_pass_ms.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any

from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.fleets.autoscaler import FleetRule
from bench.simulate.fleets.roles import DEFAULT_TRANSFER, Roles, Transfer
from bench.simulate.replica import Stepping
from bench.simulate.requests.arrivals import LengthDistribution
from bench.simulate.router import RouterKind
from bench.simulate.simulated_drafts import NO_DRAFTS, DraftSource
from scheduler.config import DraftAdmission, DraftSupply, SchedulerConfig, SchedulingPolicy

_PLAIN_WORDS: dict[str, type[Any]] = {"cells": int, "router": RouterKind, "stepping": Stepping}
_FLEET_ROUTERS = (RouterKind.LEAST_WAITING, RouterKind.PREFIX_AWARE)
_SHORT_NAMES = {"aging": "priority_aging_s", "blocks": "num_blocks", "seqs": "max_num_seqs"}


class SetupError(Exception):
    """There is no such variant; the text says what there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time of a request outside of steps: HTTP, tokenization, and the way of its tokens back, in seconds."""

    base_s: float
    per_prompt_token_s: float

    def seconds(self, num_prompt_tokens: int) -> float:
        return self.base_s + self.per_prompt_token_s * num_prompt_tokens

    def __str__(self) -> str:
        return f"{self.base_s * 1e3:.4g} ms + {self.per_prompt_token_s * 1e6:.4g} us a prompt token"


NO_OVERHEAD = Overhead(base_s=0.0, per_prompt_token_s=0.0)


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
    stepping: Stepping = Stepping.LEAP
    cells: int = 1
    """Groups of replicas with a router each. Requests go to them in turn, and they know nothing of each
    other; so they can run in processes of their own."""

    overhead: Overhead = NO_OVERHEAD
    drafts: DraftSource = NO_DRAFTS
    fleet: FleetRule | None = None
    """Rule by which replicas come and go; None: there are `num_replicas` all the time."""
    roles: Roles | None = None
    """Replicas that compute prompts, and others that generate; None: each does both."""
    transfer: Transfer = DEFAULT_TRANSFER
    draw: int = 0
    """Number of the seed by which steps vary."""

    def num_replicas_of(self, cell: int) -> int:
        return self.num_replicas // self.cells + (cell < self.num_replicas % self.cells)


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
    kinds = {each.name: _kind(each.type) for each in fields(SchedulerConfig)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind(annotation: Any) -> type[Any] | None:
    """Type of values that can be given; of `float | None` float."""
    if isinstance(annotation, UnionType):
        annotation = next(each for each in annotation.__args__ if each is not NoneType)
    if isinstance(annotation, type) and (annotation in (int, float) or issubclass(annotation, StrEnum)):
        return annotation
    return None


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
    return checked(setup)


def checked(setup: Setup) -> Setup:
    """Return the setup. Raises SetupError where cells and replicas do not go together."""
    if not 1 <= setup.cells <= setup.num_replicas:
        raise SetupError(f"{setup.name}: of {setup.num_replicas} replicas no {setup.cells} cells can be made")
    routers = " or ".join(_FLEET_ROUTERS)
    is_plain = setup.cells == 1 and setup.router in _FLEET_ROUTERS
    if setup.fleet is not None and not is_plain:
        raise SetupError(f"{setup.name}: where replicas come and go, one cell and {routers}")
    if setup.roles is not None and not (is_plain and setup.fleet is None and not setup.drafts.rates):
        raise SetupError(
            f"{setup.name}: roles are for one cell of replicas that stay, {routers}, without drafts"
        )
    return setup


def with_roles(setup: Setup, text: str) -> Setup:
    """Return the setup with as many replicas of each role as `2:6` says. Raises ValueError."""
    try:
        roles = Roles(*map(count(1, 4096), text.split(":")))
    except (TypeError, argparse.ArgumentTypeError):
        raise ValueError(f"expected PREFILL:DECODE, as 2:6, got {text!r}") from None
    return replace(setup, num_replicas=sum(roles), roles=roles)


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
        return replace(setup, num_replicas=num_replicas, roles=None)
    if name == "roles":
        return with_roles(setup, value)
    if name in _PLAIN_WORDS:
        return replace(setup, **{name: parse_value(value, _PLAIN_WORDS[name])})
    if name == "draft_rates":
        return with_drafts(setup, parse_rates(value), setup.drafts.pass_s)
    if name == "draft_pass_ms":
        return with_drafts(setup, setup.drafts.rates, float(parse_value(value, float)) / 1e3)
    kinds = settable_fields()
    if name not in kinds:
        others = ("load", "replicas", "roles", *_PLAIN_WORDS, "draft_rates", "draft_pass_ms", *kinds)
        raise ValueError(f"there is no such setting; there are {', '.join(others)}")
    return replace(setup, config=replace(setup.config, **{name: parse_value(value, kinds[name])}))


# Words of the command line to values, each with an error that says what was expected.


def count(least: int, most: int = 2**31 - 2) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def bounds(text: str) -> tuple[int, int]:
    """Read the least and the most replicas: `1:8`."""
    least, _, most = text.partition(":")
    found = count(1, 4096)(least), count(1, 4096)(most)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"expected LEAST:MOST, as 1:8, got {text!r}")
    return found


def number(least: float, *, most: float = 1e300) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")
        return value

    return parse


def share(text: str) -> float:
    value = number(0.0)(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0, at most 1, got {text!r}")
    return value


def length(text: str) -> LengthDistribution:
    try:
        return LengthDistribution.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting(kind: type[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parse_value(text, kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def draft_rates(text: str) -> tuple[float, ...]:
    try:
        return parse_rates(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def priority_mix(text: str) -> tuple[tuple[int, float], ...]:
    """Read a mix: `0:1,10:4` is one of priority 0 for each four of priority 10."""
    try:
        return tuple((int(name), weight) for name, weight in tenant_mix(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected PRIORITY:WEIGHT,..., got {text!r}") from None


def tenant_mix(text: str) -> tuple[tuple[str, float], ...]:
    """Read a mix: `acme:1,other:4` is one of acme for each four of other."""
    pairs = []
    for entry in text.split(","):
        name, _, weight = entry.partition(":")
        try:
            pairs.append((name, float(weight or 1)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected NAME:WEIGHT, got {entry!r}") from None
    if not all(math.isfinite(weight) and weight > 0 for _, weight in pairs):
        raise argparse.ArgumentTypeError("weights must be positive")
    return tuple(pairs)
