"""Requests of hard histories, spread over engines by one line before them: the very code of the server."""

from itertools import count
from math import inf, nextafter

import pytest

from bench.simulate.fitting.fitted_step_time import LinearStepTime
from bench.simulate.replica import Stepping
from bench.simulate.requests.arrivals import SimRequest
from bench.simulate.router import RouterKind
from bench.simulate.run import _Run
from bench.simulate.setup import Setup
from bench.simulate.tally import Slo
from scheduler.config import SchedulerConfig

# An H100 with a model of 8B, roughly: weights read, tokens computed, sequences sampled, context read.
STEP = LinearStepTime(base_s=0.008, per_token_s=4e-5, per_decode_s=2e-5, per_context_token_s=4e-8)
SLO = Slo(ttft_s=inf, itl_s=inf)


def setup_of(num_replicas: int, router: RouterKind = RouterKind.ONE_LINE, **changes: object) -> Setup:
    facts = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "num_blocks": 8000, "block_size": 16}
    config = SchedulerConfig(max_model_len=32768, **(facts | changes))
    return Setup(
        name="a",
        config=config,
        step_time=STEP,
        num_replicas=num_replicas,
        router=router,
        stepping=Stepping.EACH,  # sequences are looked at between steps
    )


class Replay:
    """A run whose engines are looked at after each event: context tokens on the busiest and the mean one."""

    def __init__(self, setup: Setup) -> None:
        self.run = _Run(setup, SLO, cell=0)
        self._busiest_s = self._mean_s = 0.0
        self._numbers = count()

    def ask(self, request: SimRequest) -> None:
        now_s = max(request.arrival_s, self.run.now_s)
        self.run.arrive(request._replace(arrival_s=now_s), next(self._numbers), now_s)

    def forget(self) -> None:
        """Measure from now on."""
        self._busiest_s = self._mean_s = 0.0

    def step(self) -> bool:
        """Advance to the next event; False if there is none."""
        if not self.run._events:
            return False
        before_s = self.run.now_s
        held = [sum(each.seq.num_tokens for each in one._live.values()) for one in self.run.replicas]
        self.run.advance(nextafter(self.run._events[0][0], inf))
        # The last few of a wave end when they end: nothing can be spread then.
        is_worth_it = sum(len(one._live) for one in self.run.replicas) >= 8 * len(held)
        seconds = self.run.now_s - before_s if is_worth_it else 0.0
        self._busiest_s += max(held) * seconds
        self._mean_s += sum(held) / len(held) * seconds
        return True

    def finish(self) -> None:
        while self.step():
            pass

    @property
    def num_completed(self) -> int:
        return sum(tally.num_completed for tally in self.run.tallies.all)

    @property
    def busiest_to_mean(self) -> float:
        return self._busiest_s / self._mean_s


def closed_loop(replay: Replay, requests: list[SimRequest], num_clients: int, num_first: int = 0) -> None:
    """Each client sends its next request when the last one is complete; the first ones are not measured."""
    rest = iter(requests)
    for _ in range(num_clients):
        replay.ask(next(rest))
    num_seen = 0
    while replay.step():
        num_new, num_seen = replay.num_completed - num_seen, replay.num_completed
        if num_seen < num_first:
            replay.forget()
        for _, request in zip(range(num_new), rest, strict=False):
            replay.ask(request)


def lengths(number: int, least: int, most: int) -> int:
    """A length that looks random: the same for the same number."""
    return least + number * 7919 % (most - least + 1)


@pytest.mark.night
def test_512_clients_with_long_answers_fill_eight_engines_evenly() -> None:
    """vLLM #36748: two ranks had over a hundred waiting while others idled."""
    replay = Replay(setup_of(8))
    requests = [SimRequest(0.0, lengths(i, 200, 2000), lengths(i, 300, 1500)) for i in range(800)]
    closed_loop(replay, requests, 512)
    assert replay.num_completed == 800
    assert replay.busiest_to_mean <= 1.10


def test_a_burst_at_idle_engines_is_dealt_out_evenly() -> None:
    """vLLM #48808: 27, 5, 0 and 0 of 32 requests."""
    replay = Replay(setup_of(4))
    for number in range(32):
        replay.ask(SimRequest(0.0, 1000, lengths(number, 300, 500)))
    replay.finish()
    nums = [replica.scheduler._counters.num_added for replica in replay.run.replicas]
    assert max(nums) - min(nums) <= 2
    assert replay.busiest_to_mean <= 1.10


def test_waves_are_spread_evenly() -> None:
    """llm-d-router #298: a burst herds to the engine that looked idle last."""
    replay = Replay(setup_of(4))
    for wave in range(6):
        while replay.run._events and replay.run._events[0][0] < wave * 5.0:
            replay.step()
        for number in range(100):
            request = SimRequest(
                wave * 5.0, lengths(100 * wave + number, 100, 1500), lengths(number, 50, 400)
            )
            replay.ask(request)
    replay.finish()
    assert replay.busiest_to_mean <= 1.10


@pytest.mark.night
@pytest.mark.parametrize(("num_prefixes", "num_first"), [(1, 0), (8, 128), (64, 0)])
def test_hot_prefixes_make_no_hot_engine(num_prefixes: int, num_first: int) -> None:
    """llm-d-router #355: with few long prefixes, all requests went where those were.

    With eight, the engine that computes one first takes more of the first requests, for the length of an
    answer, since it can begin them: no request waits for the sake of balance.
    """
    replay = Replay(setup_of(4))
    requests = [
        SimRequest(
            0.0,
            prompt_len=4000 + lengths(number, 50, 150),
            max_tokens=lengths(number, 100, 300),
            prefix_group=f"g{number * 31 % num_prefixes}",
            prefix_len=4000,
        )
        for number in range(500)
    ]
    closed_loop(replay, requests, 128, num_first)
    assert replay.busiest_to_mean <= 1.10


def test_sessions_find_their_prefixes_as_if_each_had_its_own_engine() -> None:
    shares = []
    for router in (RouterKind.ONE_LINE, RouterKind.PREFIX_AWARE):
        replay = Replay(setup_of(4, router))
        for turn in range(6):
            for session in range(48):
                name, length = f"s{session}", 400 * (turn + 1)
                at_s = 12.0 * turn + 0.2 * session
                replay.run.advance(at_s)
                replay.ask(SimRequest(at_s, length + 50, 100, prefix_group=name, prefix_len=length))
        replay.finish()
        stats = [replica.scheduler.stats() for replica in replay.run.replicas]
        shares.append(sum(each.num_prefix_hits for each in stats))
    assert shares[0] >= 0.95 * shares[1]
