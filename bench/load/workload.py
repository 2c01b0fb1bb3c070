"""Requests of a load run and their arrivals: the same for the same seed.

Owns: synthetic prompts, prompt files, arrival times, priorities.
Never: the network.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power hour game line end member law car city name team minute idea body "
    "back parent face level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation "
    "plan college interest death course effect field light voice paper food action model season tree sea"
)
_WORDS = tuple(_TEXT.split())


class WorkloadError(Exception):
    """The options or the prompt file do not make a workload; the text says why."""


class Arrivals(StrEnum):
    """Pattern of the arrivals of an open loop."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"  # several at once, at even distances


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Rate and pattern of the arrivals of an open loop."""

    requests_per_s: float
    arrivals: Arrivals = Arrivals.POISSON
    burst_size: int = 1
    """Requests of one burst; read for bursts alone."""

    def gap_s(self, index: int, rng: random.Random) -> float:
        """Time from the arrival of request `index - 1` to that of request `index`."""
        if self.arrivals is Arrivals.POISSON:
            return rng.expovariate(self.requests_per_s)
        if self.arrivals is Arrivals.CONSTANT:
            return 1 / self.requests_per_s
        return 0.0 if index % self.burst_size else self.burst_size / self.requests_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request, not sent yet."""

    index: int
    prompt: str
    max_tokens: int
    priority: int
    arrival_s: float
    """Time after the start of the run; an open loop sends it then, a closed loop when its turn comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WordCost:
    """Cost of words in tokens, measured on the server's own tokenizer."""

    per_word: float
    per_prompt: float
    """Tokens of the chat template and the like."""

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make about `num_tokens`; at least one."""
        return max(1, round((num_tokens - self.per_prompt) / self.per_word))


ONE_TOKEN_A_WORD = WordCost(per_word=1.0, per_prompt=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size of a synthetic workload; lengths in tokens."""

    num_prompts: int
    input_len: int
    output_len: int
    shared_prefix_len: int
    """Part of `input_len`; the same words open every prompt."""


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def synthetic_prompts(shape: Shape, cost: WordCost, seed: int) -> list[tuple[str, int]]:
    """Make prompts of about `shape.input_len` tokens, each with its max_tokens."""
    rng = random.Random(seed)
    num_words = cost.num_words(shape.input_len)
    num_shared = min(num_words, round(shape.shared_prefix_len / cost.per_word))
    shared = words(num_shared, rng)
    prompts = []
    for _ in range(shape.num_prompts):
        own = words(num_words - num_shared, rng)
        prompts.append((f"{shared} {own}".strip(), shape.output_len))
    return prompts


def read_prompts(path: Path, *, num_prompts: int | None, output_len: int) -> list[tuple[str, int]]:
    """Read the prompts of a JSON lines file, each with its own max_tokens or else `output_len`.

    None takes each line once; a number takes that many, from the top again when the file is too short.
    Raises WorkloadError with the line number.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WorkloadError(f"cannot read {path}: {error.strerror}") from None
    prompts = [
        _prompt_of(line, f"{path}:{number}", output_len)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise WorkloadError(f"{path} holds no prompts")
    count = len(prompts) if num_prompts is None else num_prompts
    return [prompts[n % len(prompts)] for n in range(count)]


def _prompt_of(line: bytes, where: str, output_len: int) -> tuple[str, int]:
    try:
        entry: Any = orjson.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: {error}") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise WorkloadError(f'{where}: expected {{"prompt": "...", "max_tokens": ...}}')
    unknown = set(entry) - {"prompt", "max_tokens"}
    if unknown:
        raise WorkloadError(f"{where}: unknown field {sorted(unknown)[0]!r}")
    max_tokens = entry.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise WorkloadError(f"{where}: max_tokens must be a positive integer")
    return entry["prompt"], max_tokens


def plan(
    prompts: Sequence[tuple[str, int]],
    *,
    pace: Pace | None,
    priority_mix: Sequence[tuple[int, float]],
    seed: int,
) -> list[PlannedRequest]:
    """Give each prompt its arrival and its priority.

    Arrivals are those of `pace`, or all at once for None. priority_mix is pairs of priority and weight;
    empty is priority 0.
    """
    # Streams of their own, so that a change of one option leaves the other draws as they were.
    arrivals, priorities = random.Random(f"arrivals {seed}"), random.Random(f"priorities {seed}")
    values, weights = [value for value, _ in priority_mix], [weight for _, weight in priority_mix]
    planned, now_s = [], 0.0
    for index, (prompt, max_tokens) in enumerate(prompts):
        if pace is not None and index > 0:
            now_s += pace.gap_s(index, arrivals)
        priority = priorities.choices(values, weights)[0] if values else 0
        planned.append(
            PlannedRequest(
                index=index, prompt=prompt, max_tokens=max_tokens, priority=priority, arrival_s=now_s
            )
        )
    return planned
