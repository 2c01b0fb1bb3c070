"""Random histories: whatever arrives, leaves or breaks, and whenever.

Invariants are checked after every step (tests/world.py), and the fake worker notices every block that
does not hold what it should.
"""

from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from scheduler.config import (
    Batching,
    Displacement,
    DraftSupply,
    Fairness,
    HostTier,
    PreemptionMode,
    PrefixCaching,
    SchedulerConfig,
    SchedulingPolicy,
)
from scheduler.group_places import most_blocks, places_of
from scheduler.messages import (
    EncoderInput,
    FinishReason,
    Grammar,
    GrammarKind,
    PoolingParams,
    PoolingTask,
    PreemptionCause,
    PromptComputation,
    SequenceId,
    TimeLimits,
)
from scheduler.scheduler import NeverFits
from tests.fakes import OutOfMemory, continuation, make_sequence, pooled, prompt_logprobs
from tests.oracle import Client, Oracle
from tests.properties.lengths import TIMES, histories, seeds
from tests.world import World, shares, small_config, windows_of

HISTORIES = histories(80)


class Kind(Enum):
    """Kind of a request, beside tokens after a prompt."""

    PLAIN = "plain"
    STOPS = "may stop"
    PROMPT_LOGPROBS = "prompt logprobs"
    POOLING = "pooling"
    AT_ONCE = "pooling at once"
    ADAPTER = "adapter"
    OTHER_ADAPTER = "other adapter"
    IMAGES = "images"
    GRAMMAR = "grammar"


STOPS = tuple(range(0, 97, 9))
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="[ab]+", cost_s=0.02)


def pooling(prompt: PromptComputation) -> PoolingParams:
    return PoolingParams(task=PoolingTask.EMBED, prompt=prompt)


@dataclass(frozen=True)
class Arrive:
    length: int
    family: int  # prompts of one family begin alike
    max_tokens: int
    priority: int
    salt: str
    total_s: float = inf
    kind: Kind = Kind.PLAIN

    def prompt(self) -> list[int]:
        return [(self.family * 31 + i * i) % 89 for i in range(self.length)]

    def extras(self) -> dict[str, object]:
        """Fields of SamplingParams and SequenceInputs."""
        images = [EncoderInput(start, 3, f"image {self.family}") for start in range(1, self.length - 3, 5)]
        return {
            Kind.PLAIN: {},
            Kind.STOPS: {"stop_token_ids": STOPS},
            Kind.PROMPT_LOGPROBS: {"num_prompt_logprobs": 0},
            Kind.POOLING: {"pooling": pooling(PromptComputation.EVERY_POSITION)},
            Kind.AT_ONCE: {"pooling": pooling(PromptComputation.AT_ONCE)},
            Kind.ADAPTER: {"adapter": "x"},
            Kind.OTHER_ADAPTER: {"adapter": "y"},
            Kind.IMAGES: {"encoder_inputs": tuple(images)},
            Kind.GRAMMAR: {"grammar": GRAMMAR},
        }[self.kind]

    def expected(self) -> list[int]:
        """Tokens that are generated if nothing comes between."""
        if self.kind in (Kind.POOLING, Kind.AT_ONCE):
            return []
        token_ids = continuation(self.prompt(), self.max_tokens)
        if self.kind is Kind.STOPS:
            ends = [place for place, token in enumerate(token_ids, 1) if token in STOPS]
            return token_ids[: min(ends, default=len(token_ids))]
        return token_ids


@dataclass(frozen=True)
class Step:
    times: int


@dataclass(frozen=True)
class Abort:
    which: int


@dataclass(frozen=True)
class Learn:
    """The results of all plans in flight come before the next plan."""


@dataclass(frozen=True)
class Explode:
    """The worker fails on the whole next plan."""


@dataclass(frozen=True)
class RunOut:
    """The worker finds too little memory for the next plan."""

    when: OutOfMemory


@dataclass(frozen=True)
class Poison:
    """One sequence fails alone when it samples."""

    which: int


@dataclass(frozen=True)
class Reset:
    """Forget every prefix that was cached so far."""


Event = Arrive | Step | Abort | Learn | Explode | RunOut | Poison | Reset

ARRIVALS = st.builds(
    Arrive,
    length=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 20, 30]),
    family=st.integers(0, 2),
    max_tokens=st.sampled_from([1, 3, 8, 12, 12]),
    priority=st.integers(-1, 2),
    salt=st.sampled_from(["", "", "a"]),
    kind=st.sampled_from(Kind),
)
PLAIN_ARRIVALS = ARRIVALS.map(lambda arrival: replace(arrival, kind=Kind.PLAIN))
STEPS = st.builds(Step, times=st.integers(1, 4))
EVENTS = st.one_of(
    ARRIVALS,
    ARRIVALS,
    STEPS,
    STEPS,
    st.builds(Abort, which=st.integers(0, 20)),
    st.builds(Learn),
    st.builds(Explode),
    st.builds(RunOut, when=st.sampled_from(OutOfMemory)),
    st.builds(Poison, which=st.integers(0, 20)),
    st.builds(Reset),
)
LIFETIMES = st.one_of(
    st.just(ALL_TOKENS),
    st.builds(Lifetime, st.just(LifetimeKind.WINDOW), st.integers(1, 7)),
    st.builds(Lifetime, st.just(LifetimeKind.CHUNK), st.sampled_from([4, 6])),
)
STRIPES = st.sampled_from([1, 1, 2, 3])
OF_TOKENS = st.lists(st.builds(CacheGroup, LIFETIMES, STRIPES), min_size=1, max_size=3)
OF_STATES = st.lists(st.builds(CacheGroup, st.just(Lifetime(LifetimeKind.FIXED)), STRIPES), max_size=1)
GROUPS = st.one_of(
    st.sampled_from([None, None, 1, 4, 7]).map(windows_of),
    st.tuples(OF_TOKENS, OF_STATES).flatmap(lambda parts: st.permutations(parts[0] + parts[1])).map(tuple),
)
"""Mostly one group, whose layers have a window or none; or several, one of which may have a state."""
CONFIGS = st.builds(
    small_config,
    num_blocks=st.sampled_from([*range(2, 15), 30, 50]),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 20),
    max_model_len=st.sampled_from([20, 64]),
    watermark=st.sampled_from([0.0, 0.2]),
    priority_aging_s=st.sampled_from([inf, 3.0]),
    max_bypasses=st.sampled_from([0, 2]),
    preemption_mode=st.sampled_from(PreemptionMode),
    num_host_blocks=st.sampled_from([0, 3, 20]),
    copy_s_per_block=st.sampled_from([0.0, 0.005, 0.3]),
    host_tier=st.sampled_from(HostTier),
    groups=GROUPS,
    fairness=st.sampled_from(Fairness),
    batching=st.sampled_from(Batching),
    max_prefill_tokens=st.sampled_from([0, 0, 4, 30]),
    max_chunk_tokens=st.sampled_from([0, 5]),
    target_itl_s=st.sampled_from([inf, 0.4]),
    uncrowded_itl_s=st.sampled_from([0.0, 2.0]),
    least_prefill_share=st.sampled_from([0.0, 0.5]),
    large_crowd_prefill_share=st.sampled_from([0.5, 0.6]),
    prefill_patience_s=st.sampled_from([0.0, 3.0]),
    max_plans_in_flight=st.integers(1, 3),
    encoder_cache_tokens=st.sampled_from([0, 3, 9]),
    max_adapters=st.integers(0, 2),
    max_compiling_s=st.sampled_from([0.0, 0.001, 0.05]),
)


def with_modes(config: SchedulerConfig, policy: SchedulingPolicy, caching: PrefixCaching) -> SchedulerConfig:
    return replace(config, policy=policy, prefix_caching=caching)


def is_accepted(world: World, number: int, arrival: Arrive) -> bool:
    seq = make_sequence(
        number,
        arrival.prompt(),
        max_tokens=arrival.max_tokens,
        priority=arrival.priority,
        cache_salt=arrival.salt,
        time_limits=TimeLimits(total_s=arrival.total_s),
        tenant=f"tenant {arrival.family}",
        **arrival.extras(),
    )
    try:
        world.add(seq)
    except NeverFits:
        return False
    return True


def play(world: World, history: list[Event]) -> dict[int, Arrive]:
    """Apply the events, then let everything run to its end; returns what was accepted, by sequence id."""
    accepted: dict[int, Arrive] = {}
    world.worker.most_encoded, world.worker.encodes_every = 1, 2
    world.worker.takes_s = lambda slice_s: 4 * slice_s  # so the next ones have none
    for number, event in enumerate(history, start=1):
        match event:
            case Arrive():
                if is_accepted(world, number, event):
                    accepted[number] = event
            case Step(times):
                for _ in range(times):
                    world.step()
            case Abort(which):
                world.abort(which)
            case Learn():
                world.learn_all()
            case Reset():
                world.scheduler.reset_prefix_cache()
            case Explode() | RunOut() | Poison():
                break_worker(world, event)
    world.run()
    return accepted


def break_worker(world: World, event: Explode | RunOut | Poison) -> None:
    match event:
        case Poison(which):
            world.worker.poisoned.add(SequenceId(which))
        case RunOut(when):
            world.worker.out_of_memory = when
        case Explode():
            world.worker.explode_next = True


def check_ends(world: World, accepted: dict[int, Arrive]) -> None:
    """Each ended (World refuses a second end), with the tokens that it has alone, and left nothing."""
    assert world.ended.keys() == accepted.keys()
    for number, arrival in accepted.items():
        tokens = world.tokens[SequenceId(number)]
        assert tokens == arrival.expected()[: len(tokens)]
        check_end(world, number, arrival, tokens)
    assert world.scheduler.kv.pool.num_used == 0
    assert world.scheduler.get_request_counts() == (0, 0, 0)
    assert world.scheduler.kv.swap_space.num_used == 0
    assert not list(world.scheduler._in_flight)
    assert not world.scheduler._shares.encoder_cache._held
    assert not world.scheduler._drafts.offers


def check_end(world: World, number: int, arrival: Arrive, tokens: list[int]) -> None:
    """The reason is true, and whoever was served to the end has all that it asked for."""
    end = world.ended[SequenceId(number)]
    told = world.prompt_logprobs[SequenceId(number)]
    expected = prompt_logprobs(arrival.prompt()) if arrival.kind is Kind.PROMPT_LOGPROBS else []
    assert told == expected[: len(told)]
    if end.finish_reason is FinishReason.LENGTH:
        assert len(tokens) == arrival.max_tokens or _ran_out_of_room(world, arrival, len(tokens))
        assert told == expected
    if end.finish_reason is FinishReason.STOP:
        assert tokens == arrival.expected()
        is_pooling = arrival.kind in (Kind.POOLING, Kind.AT_ONCE)
        assert end.pooled == (pooled(arrival.prompt()) if is_pooling else b"")


def _ran_out_of_room(world: World, arrival: Arrive, num_tokens: int) -> bool:
    """The context window is full, or the next token would need more blocks than there are."""
    config = world.config
    length = arrival.length + num_tokens
    num_blocks = most_blocks(places_of(config), length + 1)
    return length == config.max_model_len or num_blocks > config.num_blocks


@pytest.mark.parametrize("caching", PrefixCaching)
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_every_request_ends_once_with_the_tokens_it_has_alone(
    policy: SchedulingPolicy, caching: PrefixCaching
) -> None:
    @HISTORIES
    @given(CONFIGS, st.sampled_from([0, 0, 3]), st.lists(EVENTS, min_size=12, max_size=50))
    def check(config: SchedulerConfig, max_drafts: int, history: list[Event]) -> None:
        world = World(with_modes(config, policy, caching), max_drafts=max_drafts)
        accepted = play(world, history)
        check_ends(world, accepted)

    check()


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_the_plans_agree_with_a_slow_and_obvious_simulator(
    policy: SchedulingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the last gives way; here the cheapest of the last few, which is the same of one."""
    monkeypatch.setattr("scheduler.step.preemption._VICTIM_WINDOW", 1)

    @HISTORIES
    @given(CONFIGS, st.lists(st.one_of(PLAIN_ARRIVALS, STEPS), min_size=6, max_size=30))
    def check(config: SchedulerConfig, history: list[Arrive | Step]) -> None:
        config = replace(
            with_modes(config, policy, PrefixCaching.OFF),
            displacement=Displacement.OFF,
            priority_aging_s=inf,
            max_bypasses=0,
            preemption_mode=PreemptionMode.RECOMPUTE,
            fairness=Fairness.NONE,
            batching=Batching.MIXED,
            max_chunk_tokens=0,
            target_itl_s=inf,
            groups=windows_of(None),
            max_plans_in_flight=1,
        )
        world, oracle = World(config), Oracle(config)
        for number, event in enumerate(history, start=1):
            if isinstance(event, Arrive):
                try:
                    world.add(
                        make_sequence(
                            number, event.prompt(), max_tokens=event.max_tokens, priority=event.priority
                        )
                    )
                except NeverFits:
                    continue
                oracle.waiting.append(Client(number, event.priority, event.length, event.max_tokens))
                continue
            for _ in range(event.times):
                step_both(world, oracle)
        while world.scheduler.has_unfinished_requests:
            step_both(world, oracle)
        assert oracle.waiting == oracle.running == []

    check()


def step_both(world: World, oracle: Oracle) -> None:
    plan = world.step()
    assert shares(plan) == oracle.step()
    assert len(plan.preemptions) == oracle.num_preemptions


def random_history(random: Random) -> list[Event]:
    """Long and crowded, where Hypothesis prefers what is small: thousands of preemptions."""

    def event() -> Event:
        kind = random.random()
        if kind < 0.45:
            return Arrive(
                length=random.randint(1, 24),
                family=random.randint(0, 2),
                max_tokens=random.randint(1, 16),
                priority=random.randint(-1, 2),
                total_s=random.choice([inf, inf, 40.0, 15.0]),
                salt=random.choice(["", "", "a"]),
                kind=random.choice([*Kind, *9 * [Kind.PLAIN]]),
            )
        if kind < 0.94:
            return Step(random.randint(1, 4))
        if kind < 0.95:
            return Learn()
        if kind < 0.98:
            return Abort(random.randint(1, 60))
        if kind < 0.985:
            return Explode()
        return RunOut(random.choice(list(OutOfMemory))) if kind < 0.99 else Poison(random.randint(1, 60))

    history: list[Event] = []
    while len(history) < 60:
        history += [event()] * random.choice([1, 1, 1, 1, 3])  # siblings: prompts with one tail
    return history


@pytest.mark.parametrize("caching", PrefixCaching)
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_under_constant_memory_pressure_every_request_still_ends_once_with_its_own_tokens(
    policy: SchedulingPolicy, caching: PrefixCaching, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_preemptions = num_displacements = num_swaps = num_host_hits = num_tails = num_asked = num_held = 0
    for seed in seeds(50):
        random = Random(seed)
        room = {
            "num_blocks": random.randint(6, 12),
            "max_num_seqs": random.randint(2, 6),
            "priority_aging_s": random.choice([inf, 5.0]),
            "max_bypasses": random.choice([0, 3]),
            "preemption_mode": random.choice(list(PreemptionMode)),
        }
        monkeypatch.setattr("scheduler.step.preemption._VICTIM_WINDOW", random.choice([1, 8]))
        config = small_config(
            **room,
            num_host_blocks=random.choice([0, 4, 30]),
            copy_s_per_block=random.choice([0.0, 0.2]),
            host_tier=random.choice(list(HostTier)),
            groups=windows_of(random.choice([None, None, 6])),
            fairness=random.choice(list(Fairness)),
            batching=random.choice(list(Batching)),
            max_chunk_tokens=random.choice([0, 5]),
            target_itl_s=random.choice([inf, 0.5]),
            max_plans_in_flight=random.randint(1, 3),
            encoder_cache_tokens=random.choice([3, 6]),
            max_adapters=random.choice([1, 2]),
            max_prefill_tokens=random.choice([0, 4]),
            max_compiling_s=random.choice([0.0, 0.001, 0.05]),
            draft_supply=random.choice(list(DraftSupply)),
            max_drafts=3,
        )
        world = World(with_modes(config, policy, caching), max_drafts=random.choice([0, 0, 3]))
        check_ends(world, play(world, random_history(random)))
        num_preemptions += world.num_preemptions()
        num_swaps += world.num_swaps()
        num_host_hits += world.scheduler.stats().num_prefix_host_hits
        num_tails += sum(len(plan.copies) for plan in world.worker.plans)
        num_asked += sum(sum(plan.num_drafts_wanted.values()) for plan in world.worker.plans)
        num_held += world.scheduler.stats().num_accepted_tokens
        num_displacements += world.num_preemptions(PreemptionCause.DISPLACED)
    assert num_preemptions > 200 * TIMES, "the histories are too easy"
    assert num_swaps > 60 * TIMES
    assert num_held > 200 * TIMES
    assert num_asked > 200 * TIMES
    assert (num_host_hits > 120 * TIMES and num_tails > 10 * TIMES) == (caching is PrefixCaching.ON)
    assert (num_displacements > 60 * TIMES) == (policy is SchedulingPolicy.PRIORITY)
