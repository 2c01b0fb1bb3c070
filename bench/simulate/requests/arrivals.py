"""Requests and their arrivals, sampled from a seed.

Owns: the draws, and the token ids and block names that stand for a prompt.
Never: the scheduler, or files (files.py).

Lengths of prompts and answers in tokens are a distribution by its name:

128                          always
uniform:LOW:HIGH             both ends included
exponential:MEAN[:MAX]
lognormal:MEDIAN:SIGMA[:MAX] sigma of the logarithm; 1 is a long tail
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, cast

_Value = TypeVar("_Value")

_NO_TOKEN = 0
# Token ids below are requests' own, those above are of prefix groups: so no two prompts are equal by chance.
_FIRST_GROUP_TOKEN = 1 << 31


class ArrivalsError(Exception):
    """A file of requests cannot be used; the text says where and why."""


class SimRequest(NamedTuple):
    """One request. Its answer is as long as it may be: nothing stops it earlier."""

    arrival_s: float
    prompt_len: int
    """Tokens, those of the shared prefix included."""
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    prefix_group: str = ""
    """Requests of one group begin with the same tokens."""
    prefix_len: int = 0
    """Number of tokens that the group shares."""
    prompt: tuple[int, ...] = ()
    """The token ids themselves, if a file gave the prompt; else they are made up."""
    block_ids: tuple[int, ...] = ()
    """Names of the prompt's parts, if a file gave these; equal ids behind equal ids are equal tokens."""
    block_id_len: int = 0
    """Tokens of such a part; the last one may be shorter."""


class RequestUnderWay(NamedTuple):
    """A request on its way to a replica."""

    request: SimRequest
    token_ids: tuple[int, ...]
    number: int
    block_keys: list[bytes]
    """Keys of its blocks, where they are known; else the scheduler computes them."""
    tail_key: bytes | None
    """Key of its prompt's tail, in the same way; empty: no other prompt has that tail."""
    begun_s: float = -1.0
    """Time of its first token, where another replica has computed its prompt; below 0: none has."""


_NUM_ARGUMENTS = {"uniform": (2, 2), "exponential": (1, 2), "lognormal": (2, 3)}


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths, from 1 to the most that its name allows."""

    text: str
    draw: Callable[[random.Random], int]

    @classmethod
    def parse(cls, text: str) -> "LengthDistribution":
        """Read a distribution by its name. Raises ValueError, fit for a person."""
        name, *words = text.split(":")
        if not words:
            length = _number(name, text)
            return cls(text, lambda _: round(length))
        least, most = _NUM_ARGUMENTS.get(name, (0, -1))
        if not least <= len(words) <= most:
            raise ValueError(
                f"expected a number, uniform:LOW:HIGH, exponential:MEAN[:MAX] or "
                f"lognormal:MEDIAN:SIGMA[:MAX], got {text!r}"
            )
        numbers = [_number(word, text, least=0.0 if index else 1.0) for index, word in enumerate(words)]
        return cls(text, _draw_of(name, numbers, text))


def _draw_of(name: str, numbers: list[float], text: str) -> Callable[[random.Random], int]:
    if name == "uniform":
        low, high = round(numbers[0]), round(numbers[1])
        if low > high:
            raise ValueError(f"the low end is above the high end in {text!r}")
        return lambda rng: rng.randint(low, high)
    cut = round(numbers.pop()) if len(numbers) == _NUM_ARGUMENTS[name][1] else 2**31
    if cut < 1:
        raise ValueError(f"the largest length must be at least 1 in {text!r}")
    if name == "exponential":
        rate = 1 / numbers[0]
        return lambda rng: min(cut, max(1, round(rng.expovariate(rate))))
    mu, sigma = math.log(numbers[0]), numbers[1]
    return lambda rng: min(cut, max(1, round(math.exp(mu + sigma * rng.gauss(0.0, 1.0)))))


def _number(word: str, text: str, *, least: float = 1.0) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{word!r} is not a number of at least {least:g}, in {text!r}")
    return value


class Workload(Protocol):
    """The same requests in the order of arrival, each time they are asked for."""

    def __iter__(self) -> Iterator[SimRequest]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWorkload:
    """A workload that is sampled while it is iterated, so that millions of requests take no memory."""

    num_requests: int
    rate_per_s: float
    """Requests per second; inf sends all at once."""
    burstiness: float
    """Shape of the gamma distribution of the gaps: 1 is Poisson, below it comes in bursts."""
    prompt_lens: LengthDistribution
    output_lens: LengthDistribution
    priority_mix: tuple[tuple[int, float], ...]
    """Priority and weight."""
    tenant_mix: tuple[tuple[str, float], ...]
    """Tenant and weight."""
    num_prefix_groups: int
    prefix_len: int
    seed: int

    def __iter__(self) -> Iterator[SimRequest]:
        # Streams of their own, so that a change of one option leaves the other draws as they were.
        gaps, prompts, outputs, priorities, tenants, groups = (
            random.Random(f"{name} {self.seed}")
            for name in ("gaps", "prompts", "outputs", "priorities", "tenants", "groups")
        )
        scale_s = 0.0 if math.isinf(self.rate_per_s) else 1 / (self.rate_per_s * self.burstiness)
        now_s = 0.0
        for number in range(self.num_requests):
            if scale_s and number:
                now_s += gaps.gammavariate(self.burstiness, scale_s)
            group = f"g{groups.randrange(self.num_prefix_groups)}" if self.num_prefix_groups else ""
            yield SimRequest(
                arrival_s=now_s,
                prompt_len=self.prompt_lens.draw(prompts),
                max_tokens=self.output_lens.draw(outputs),
                priority=_draw(self.priority_mix, priorities),
                tenant=_draw(self.tenant_mix, tenants),
                prefix_group=group,
                prefix_len=self.prefix_len if group else 0,
            )


def _draw(mix: Sequence[tuple[_Value, float]], rng: random.Random) -> _Value:
    if len(mix) == 1:
        return mix[0][0]
    return rng.choices([value for value, _ in mix], [weight for _, weight in mix])[0]


class PromptMaker:
    """Makes the token ids of a request: its own number behind the tokens of its group, then always the same.

    Cheap on purpose: a prompt differs from all others from its first own token on, and that is all that a
    prefix cache can see.
    """

    def __init__(self) -> None:
        self._filling: tuple[int, ...] = ()
        self._groups: dict[str, tuple[int, ...]] = {}
        self._names: dict[str, list[bytes]] = {}
        self._named_parts: dict[tuple[bytes | None, tuple[int, ...], int], bytes] = {}
        self._num_names = 0

    def token_ids(self, request: SimRequest, number: int) -> tuple[int, ...]:
        """`number` tells requests apart; below 2**31 - 1."""
        if request.prompt:
            return request.prompt
        num_shared = min(request.prefix_len, request.prompt_len - 1) if request.prefix_group else 0
        num_filling = request.prompt_len - num_shared - 1
        if len(self._filling) < num_filling:
            self._filling = (_NO_TOKEN,) * (2 * num_filling)
        own = (number + 1, *self._filling[:num_filling])
        return self._prefix(request.prefix_group, num_shared) + own if num_shared else own

    def block_keys(self, request: SimRequest, block_size: int) -> list[bytes]:
        """Name the full blocks of a made-up prompt and its answer; none where a file gave the prompt.

        Equal names mean equal tokens up to the end of the block, as with the keys that the scheduler would
        compute from the tokens, which takes many times as long. They are numbers in a row: the prefix cache
        only compares them, and finds neighbours side by side.
        """
        if request.prompt:
            return []
        num_blocks = (request.prompt_len + request.max_tokens) // block_size
        shared: list[bytes] = []
        if request.block_ids:
            shared = self._names_of_parts(request, block_size)
        elif request.prefix_group:
            num_shared = min(request.prefix_len, request.prompt_len - 1) // block_size
            known = self._names.setdefault(request.prefix_group, [])
            if len(known) < num_shared:
                known += self._new_names(num_shared - len(known))
            shared = known[:num_shared]
        return shared + self._new_names(num_blocks - len(shared))

    def tail_key(self, request: SimRequest, block_size: int) -> bytes | None:
        """Name the tail of a made-up prompt: all but its last token may be those of its group."""
        if request.prompt:
            return None
        end = request.prompt_len - 1
        if not request.prefix_group or request.prefix_len < end or end % block_size == 0:
            return b""
        return b"tail %d of group %s" % (end, request.prefix_group.encode())

    def _names_of_parts(self, request: SimRequest, block_size: int) -> list[bytes]:
        """Name the full blocks that the ids of a file cover.

        A name stands for all tokens up to the end of its block, and an id for those of its part alone: some
        traces hash each part by itself. So a block is named by the block before it and by its ids.
        """
        part_len = request.block_id_len
        num_blocks = min(len(request.block_ids) * part_len, request.prompt_len) // block_size
        names: list[bytes] = []
        before: bytes | None = None
        for start in range(0, num_blocks * block_size, block_size):
            ids = request.block_ids[start // part_len : (start + block_size - 1) // part_len + 1]
            part = (before, ids, start % part_len)
            known = self._named_parts.get(part)
            if known is None:
                known = self._named_parts[part] = self._new_names(1)[0]
            names.append(known)
            before = known
        return names

    def _new_names(self, num: int) -> list[bytes]:
        first = self._num_names + 1
        self._num_names += num
        return cast("list[bytes]", list(range(first, first + num)))

    def _prefix(self, group: str, num_tokens: int) -> tuple[int, ...]:
        known = self._groups.get(group, ())
        if not known:
            known = (_FIRST_GROUP_TOKEN + len(self._groups),)
            self._groups[group] = known
        if len(known) < num_tokens:
            known = known[:1] * num_tokens
            self._groups[group] = known
        return known[:num_tokens]
