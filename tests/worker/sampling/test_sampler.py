"""The sampler against a slow oracle, and the promises that it makes to a request with neighbours."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler.messages import SamplingParams
from tests.worker.sampling_oracle import choose
from worker.devices.device import CpuDevice
from worker.sampling.draw import BLOCK, Draw, draw
from worker.sampling.logits import Alternatives, report_logprobs
from worker.sampling.sampler import Sampler
from worker.sampling.state import uniforms
from worker.worker_config import WorkerConfig

CPU = CpuDevice(WorkerConfig(model_path="", num_threads=torch.get_num_threads()))
VOCAB = 12
GREEDY = SamplingParams(temperature=0.0)

# Quarters and powers of two are exact in float32 and float64 alike: equal in one is equal in the other.
quarters = st.integers(-12, 12).map(lambda n: n / 4)
rows_of_logits = st.lists(quarters, min_size=VOCAB, max_size=VOCAB)
tokens = st.integers(0, VOCAB - 1)
histories = st.tuples(st.lists(tokens, min_size=1, max_size=8), st.lists(tokens, max_size=8))


@st.composite
def sampling_params(pick: Callable) -> SamplingParams:
    return SamplingParams(
        temperature=pick(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        top_p=pick(st.sampled_from([1.0, 0.95, 0.7, 0.3, 0.001, 0.0])),
        top_k=pick(st.sampled_from([0, 1, 2, 5, VOCAB, 50])),
        min_p=pick(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        repetition_penalty=pick(st.sampled_from([1.0, 0.5, 2.0, 4.0])),
        presence_penalty=pick(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=pick(st.sampled_from([0.0, 0.25, -0.5])),
        logit_bias=tuple(pick(st.dictionaries(tokens, quarters, max_size=3)).items()),
        seed=pick(st.integers(0, 2**64 - 1)),
        min_tokens=pick(st.sampled_from([0, 2, 9])),
        stop_token_ids=tuple(pick(st.sets(tokens, max_size=2))),
        bad_words=tuple(pick(st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3))),
        allowed_token_ids=tuple(pick(st.sampled_from([(), (0, 2, 3, 5, 7, 8, 9, 10)]))),
    )


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def sampler_with(*rows: tuple[SamplingParams, list[int], list[int]], vocab_size: int = VOCAB) -> Sampler:
    """Rows 0, 1, ... with parameters, prompt and output."""
    sampler = Sampler(vocab_size=vocab_size, device=CPU)
    for row, (params, prompt, output) in enumerate(rows):
        sampler.add_row(row, params, prompt + output, len(prompt))
    return sampler


def uniform_of(params: SamplingParams, num_generated: int) -> float:
    return float(uniforms(np.array([params.seed], np.uint64), np.array([num_generated], np.uint64))[0])


def sample_once(params: SamplingParams, logits: list[float], output: list[int] | None = None) -> int:
    sampler = sampler_with((params, [0], output or []), vocab_size=len(logits))
    result = sampler.sample(logits_of(logits), [0])
    assert not result.failed
    return result.token_ids[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sampling_params(), rows_of_logits, histories), min_size=1, max_size=5))
def test_every_token_is_one_that_the_oracle_would_draw(batch) -> None:
    sampler = sampler_with(*((params, prompt, output) for params, _, (prompt, output) in batch))
    logits = logits_of(*(row for _, row, _ in batch))
    for _ in range(2):  # the second round sees what the first one recorded
        choices = [choose(row, params, prompt, output) for params, row, (prompt, output) in batch]
        assume(all(choice.margin > 1e-6 for choice in choices))
        result = sampler.sample(logits, list(range(len(batch))))
        for n, (params, _, (_, output)) in enumerate(batch):
            assert choices[n].permits(result.token_ids[n], uniform_of(params, len(output)))
            output.append(result.token_ids[n])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(sampling_params(), rows_of_logits, histories), min_size=2, max_size=6))
def test_neighbours_never_change_a_draw(batch) -> None:
    logits = logits_of(*(row for _, row, _ in batch))
    together = sampler_with(*((params, prompt, output) for params, _, (prompt, output) in batch))
    drawn = together.sample(logits, list(range(len(batch)))).token_ids
    for n, (params, _, (prompt, output)) in enumerate(batch):
        alone = sampler_with((params, prompt, output))
        assert alone.sample(logits[n : n + 1], [0]).token_ids == [drawn[n]]


@settings(max_examples=60, deadline=None)
@given(sampling_params(), st.integers(1, 5), st.integers(0, 2**32))
def test_preemption_never_changes_a_draw(params: SamplingParams, preempted_after: int, noise: int) -> None:
    generator = torch.Generator().manual_seed(noise)
    steps = (torch.randn((6, VOCAB), generator=generator) * 2).split(1)
    straight = sampler_with((params, [3, 3, 4], []))
    expected = [straight.sample(logits, [0]).token_ids[0] for logits in steps]
    sampler, output = sampler_with((params, [3, 3, 4], [])), []
    for n, logits in enumerate(steps):
        if n == preempted_after:
            sampler.remove_row(0)
            sampler.add_row(7, params, [3, 3, 4, *output], 3)
        output += sampler.sample(logits, [7 if n >= preempted_after else 0]).token_ids
    assert output == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    vocab_size = 5000
    logits = torch.zeros((2, vocab_size), dtype=dtype)
    logits[0, [4999, 1700, 1701, 900]] = 2.0
    logits[1, [511, 512]] = 3.0
    before = logits.clone()
    sampler = sampler_with((GREEDY, [1], []), (GREEDY, [1], []), vocab_size=vocab_size)
    assert sampler.sample(logits, [0, 1]).token_ids == [900, 511]
    assert torch.equal(logits, before)


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    for seed in range(20):
        params = SamplingParams(temperature=2.0, top_k=1, seed=seed)
        assert sample_once(params, [0.0, 3.0, 3.0, 1.0]) == 1


@pytest.mark.parametrize("temperature", [1e-7, 1e-60])
def test_a_tiny_temperature_is_almost_greedy(temperature: float) -> None:
    for seed in range(20):
        assert sample_once(SamplingParams(temperature=temperature, seed=seed), [0.0, 2.9, 3.0, 1.0]) == 2


def test_min_p_of_one_keeps_the_equals_of_the_best() -> None:
    row = [0.0, 3.0, 3.0, 2.99]
    assert {sample_once(SamplingParams(min_p=1.0, seed=seed), row) for seed in range(40)} == {1, 2}


@pytest.mark.parametrize("num_equal", [1, 3, 200])
def test_a_top_p_of_zero_keeps_one_token_also_of_many_equals(num_equal: int) -> None:
    row = [0.0] * 100 + [1.0] * num_equal + [0.5] * 200
    assert {sample_once(SamplingParams(seed=seed, top_p=0.0), row) for seed in range(20)} == {100}


@pytest.mark.parametrize("num_possible", [100, 1100])
@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(top_p: float, num_possible: int) -> None:
    logits = torch.full((2, 4 * BLOCK), -math.inf)
    logits[:, 600 : 600 + num_possible] = torch.linspace(0.0, 0.001, num_possible)
    ends = [Draw(SamplingParams(top_p=top_p), uniform) for uniform in (0.0, 1 - 2.0**-53)]
    first, last = draw(logits.clone(), logits.amax(-1), ends)
    assert (first, last) == (600, 599 + num_possible)


def test_rounding_never_draws_an_impossible_token() -> None:
    """At the end of the interval, the sum of a block and the sum up to its last token differ in a bit."""
    logits = torch.randn((300, BLOCK), generator=torch.Generator().manual_seed(3)) * 8
    logits[:, 500:] = -math.inf
    end = Draw(SamplingParams(), 1 - 2.0**-53)
    assert max(draw(logits.clone(), logits.amax(-1), [end] * 300)) < 500


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 4,000 fixed seeds, and over 4,000 steps of one seed; 27.9 is the 0.1 % point."""
    logits = torch.linspace(-1.5, 1.5, 10)
    expected = torch.softmax(logits / 0.8, 0) * 4000
    batch = logits.repeat(4000, 1)
    params = SamplingParams(temperature=0.8)
    seeds = sampler_with(*((replace(params, seed=seed), [0], []) for seed in range(4000)), vocab_size=10)
    steps = sampler_with(*((params, [0], [0] * n) for n in range(4000)), vocab_size=10)
    for sampler in (seeds, steps):
        counts = Counter(sampler.sample(batch, list(range(4000))).token_ids)
        observed = torch.tensor([counts[n] for n in range(10)])
        assert ((observed - expected) ** 2 / expected).sum() < 27.9


def test_neighbouring_seeds_draw_independently() -> None:
    """Choices of one request have seeds that differ by one: their draws agree as often as chance has it."""
    same = sum(
        int(uniform_of(SamplingParams(seed=7), n) * 8) == int(uniform_of(SamplingParams(seed=8), n) * 8)
        for n in range(4000)
    )
    assert 400 < same < 600


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),  # the nucleus holds thousands of equals: beyond any candidate list
        SamplingParams(top_k=200),
        SamplingParams(top_k=200, top_p=0.7),  # top-p is a share of all that top-k keeps
        SamplingParams(top_k=1500),
        SamplingParams(top_k=2999, top_p=0.5),
        SamplingParams(top_p=0.4, min_p=0.2, temperature=1.3),
    ],
)
def test_truncation_is_exact_beyond_the_candidates(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(3000, generator=generator) * 4).round() / 8  # flat, and full of ties
    choice = choose(logits.tolist(), params, [0], [])
    assert choice.margin > 1e-7
    assert len(choice.tokens) > 128
    for seed in range(25):
        seeded = replace(params, seed=seed)
        assert choice.permits(sample_once(seeded, logits.tolist()), uniform_of(seeded, 0))


def test_a_stop_token_cannot_be_drawn_before_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(1, 99))
    sampler = sampler_with((params, [0], []))
    logits = logits_of([0.0, 9.0, 5.0] + [-1.0] * (VOCAB - 3))
    assert [sampler.sample(logits, [0]).token_ids[0] for _ in range(4)] == [2, 2, 1, 1]


def test_penalties_grow_with_what_is_drawn() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    sampler = sampler_with((params, [0], []))
    logits = logits_of([2.5, 2.0, 0.25] + [-9.0] * (VOCAB - 3))
    # Prompt tokens cost nothing under the frequency penalty: token 0 comes first.
    assert [sampler.sample(logits, [0]).token_ids[0] for _ in range(6)] == [0, 1, 0, 1, 0, 2]


def test_counts_survive_more_tokens_than_were_reserved() -> None:
    vocab_size = 400
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    sampler = sampler_with((params, [0], []), vocab_size=vocab_size)
    drawn = [sampler.sample(torch.zeros(1, vocab_size), [0]).token_ids[0] for _ in range(vocab_size)]
    assert drawn == list(range(vocab_size))


def test_bias_outside_the_vocabulary_is_harmless() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((VOCAB, 100.0), (10**9, 100.0), (4, 1.0)))
    assert sample_once(params, [0.0] * VOCAB) == 4


@settings(max_examples=60, deadline=None)
@given(rows_of_logits, st.integers(0, 15), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_logprobs_are_those_of_the_raw_logits(row, num_logprobs, temperature, seed) -> None:
    bias = ((2, 3.0),)  # changes the draw, never the report
    params = SamplingParams(temperature=temperature, seed=seed, num_logprobs=num_logprobs, logit_bias=bias)
    result = sampler_with((params, [0], [])).sample(logits_of(row), [0])
    report, expected = result.logprobs[0], torch.log_softmax(torch.tensor(row), 0)
    assert report.token_id == result.token_ids[0]
    assert report.logprob == pytest.approx(float(expected[report.token_id]), abs=1e-5)
    assert report.rank == 1 + sum(value > row[report.token_id] for value in row)
    assert len(report.top) == min(num_logprobs, VOCAB)
    values = [logprob for _, logprob in report.top]
    assert values == pytest.approx(sorted(expected.tolist(), reverse=True)[:num_logprobs], abs=1e-5)
    assert all(logprob == pytest.approx(float(expected[n]), abs=1e-5) for n, logprob in report.top)
    assert (report.token_id in dict(report.top)) == (report.rank <= num_logprobs)


def test_the_drawn_token_takes_the_place_of_an_equal_one_that_is_listed_before_it() -> None:
    """Two are asked for, and both of the second best weigh the same."""
    logits = logits_of([3.0, 2.0, 0.5, 2.0, *[0.0] * (VOCAB - 4)])
    [report] = report_logprobs(logits, [3], [Alternatives(2)])
    assert report.rank == 2
    assert [token_id for token_id, _ in report.top] == [0, 3]


@settings(max_examples=40, deadline=None)
@given(rows_of_logits, st.lists(tokens, min_size=1, max_size=5, unique=True), st.integers(0, 3))
def test_a_row_may_name_the_tokens_that_are_reported_beside_one_that_asks_for_the_likeliest(
    row, given_ids, num_top
) -> None:
    row[1] = -math.inf
    names = replace(GREEDY, num_logprobs=3, logprob_token_ids=tuple(given_ids))
    ranks = replace(GREEDY, num_logprobs=num_top)
    sampler = sampler_with((names, [0], []), (ranks, [0], []), (names, [0], []))
    result = sampler.sample(logits_of(row, row, row), [0, 1, 2])
    report, expected = result.logprobs[0], torch.log_softmax(torch.tensor(row), 0)
    assert report == result.logprobs[2]
    assert [n for n, _ in report.top] == list(dict.fromkeys([report.token_id, *given_ids]))
    assert [logprob for _, logprob in report.top] == pytest.approx(
        [float(expected[n]) for n, _ in report.top]
    )
    assert result.logprobs[1] == sampler_with((ranks, [0], [])).sample(logits_of(row), [0]).logprobs[0]


def test_only_rows_that_ask_get_logprobs() -> None:
    asks = SamplingParams(temperature=0.0, num_logprobs=0)
    sampler = sampler_with((GREEDY, [0], []), (asks, [0], []))
    result = sampler.sample(logits_of([1.0] + [0.0] * (VOCAB - 1), [1.0] + [-math.inf] * (VOCAB - 1)), [0, 1])
    assert list(result.logprobs) == [1]
    assert result.logprobs[1] == (0, 0.0, 1, ())


def test_impossible_tokens_are_not_reported() -> None:
    asks = SamplingParams(temperature=0.0, num_logprobs=5)
    result = sampler_with((asks, [0], [])).sample(
        logits_of([1.0, -math.inf, 1.0] + [-math.inf] * (VOCAB - 3)), [0]
    )
    assert [token_id for token_id, _ in result.logprobs[0].top] == [0, 2]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.5)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_a_row_that_is_not_finite_fails_alone(params, poison, num_logprobs) -> None:
    params = replace(params, num_logprobs=num_logprobs, stop_token_ids=(5,), min_tokens=1)
    good, bad = [float(n % 5) for n in range(VOCAB)], [0.0] * VOCAB
    bad[5] = poison  # where the ban on stopping would hide it
    sampler = sampler_with(*((params, [0], []) for _ in range(4)))
    logits = logits_of(good, bad, [-math.inf] * VOCAB, good)
    result = sampler.sample(logits, [0, 1, 2, 3])
    alone = sampler_with((params, [0], [])).sample(logits_of(good), [0])
    assert sorted(result.failed) == [1, 2]
    assert result.token_ids[0] == result.token_ids[3] == alone.token_ids[0]
    assert sorted(result.logprobs) == ([] if num_logprobs is None else [0, 3])


def test_a_row_whose_every_token_is_banned_fails_alone() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    result = sampler_with((params, [0], []), (GREEDY, [0], [])).sample(torch.zeros(2, VOCAB), [0, 1])
    assert list(result.failed) == [0]
    assert result.token_ids[1] == 0


def test_some_tokens_may_be_impossible() -> None:
    row = [-math.inf] * VOCAB
    row[3] = row[8] = -2.0
    for top_p in (1.0, 0.9):
        drawn = {sample_once(SamplingParams(seed=seed, top_p=top_p), row) for seed in range(40)}
        assert drawn == {3, 8}


def test_a_failed_row_keeps_its_place_in_the_stream() -> None:
    params = SamplingParams(seed=5)
    sampler = sampler_with((params, [0], []))
    sampler.sample(torch.full((1, VOCAB), math.nan), [0])
    drawn = sampler.sample(torch.zeros(1, VOCAB), [0]).token_ids
    assert drawn == sampler_with((params, [0], [])).sample(torch.zeros(1, VOCAB), [0]).token_ids


def test_batches_larger_than_the_scratch_memory_are_cut_and_joined() -> None:
    vocab_size, num_rows = 70_000, 9
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn((num_rows, vocab_size), generator=generator)
    rows = [(SamplingParams(temperature=float(n % 3 > 0), seed=n), [0], []) for n in range(num_rows)]
    together = sampler_with(*rows, vocab_size=vocab_size).sample(logits, list(range(num_rows)))
    for n, row in enumerate(rows):
        alone = sampler_with(row, vocab_size=vocab_size)
        assert alone.sample(logits[n : n + 1], [0]).token_ids == [together.token_ids[n]]


def test_removing_an_unknown_row_is_no_error() -> None:
    Sampler(vocab_size=VOCAB, device=CPU).remove_row(3)


SPOILED = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("spoil", [None, *SPOILED])
@pytest.mark.parametrize("size", [VOCAB, 3 * BLOCK + 5])
def test_greedy_rows_get_the_same_tokens_alone_as_among_many(size: int, spoil: float | None) -> None:
    """A few of them are not looked through in blocks."""
    num_rows = 20
    logits = torch.randint(0, 6, (num_rows, size), generator=torch.Generator().manual_seed(size)).float()
    if spoil is not None:
        logits[::3, size // 2 :] = spoil
        logits[5] = spoil
    sampler = sampler_with(*((GREEDY, [0], []) for _ in range(num_rows)), vocab_size=size)
    together = sampler.sample(logits, list(range(num_rows)))
    assert (5 in together.failed) == (spoil is not None)
    for n in range(num_rows):
        if n not in together.failed:
            assert together.token_ids[n] == logits[n].tolist().index(max(logits[n].tolist()))
        alone = sampler.sample(logits[n : n + 1], [n])
        assert alone.token_ids == [together.token_ids[n]]
        assert alone.failed == ({0: together.failed[n]} if n in together.failed else {})
