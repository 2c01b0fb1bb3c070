"""Setup of a simulation: the scheduler's configuration, the duration of steps, replicas, load.

Owns: the names of variants. `priority+aging=10` is the policy `priority` with priority_aging_s = 10; each
field of SchedulerConfig may stand there under its own name, and load, replicas, cells, router and
stepping.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from bench.simulate.fitted_step_time import LinearStepTime
from bench.simulate.replica import Stepping
from bench.simulate.router import RouterKind
from scheduler.config import SchedulerConfig, SchedulingPolicy

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

    def num_replicas_of(self, cell: int) -> int:
        return self.num_replicas // self.cells + (cell < self.num_replicas % self.cells)


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
    if name == "cells":
        return replace(setup, cells=int(parse_value(value, int)))
    if name == "router":
        return replace(setup, router=parse_value(value, RouterKind))
    if name == "stepping":
        return replace(setup, stepping=parse_value(value, Stepping))
    kinds = settable_fields()
    if name not in kinds:
        raise ValueError(
            f"there is no such setting; there are load, replicas, router, stepping, {', '.join(kinds)}"
        )
    return replace(setup, config=replace(setup.config, **{name: parse_value(value, kinds[name])}))
