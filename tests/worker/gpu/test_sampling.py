"""The GPU's sampler draws what the CPU's draws, and the host waits for nothing but the result."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import GridExecutor

from scheduler.input_messages import AnswerStart
from scheduler.messages import Grammar, GrammarKind, SamplingParams, TokenLogprobs
from tests.worker.gpu.interpreted_gpu import InterpretedGpu, WaitsForDevice
from tests.worker.sampling.test_sampler import GREEDY, VOCAB, histories, rows_of_logits, sampling_params
from tests.worker.sampling_oracle import choose
from worker.devices.device import CpuDevice
from worker.gpu.sampling import logit_edits as edits
from worker.gpu.sampling.gpu_sampler import GpuSampler
from worker.sampling.draw_fields import LINE, NOBODY, NUM_FIELDS, PLACE
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import PendingSample, RowSampler, SampleResult
from worker.sampling.sampler import Sampler
from worker.worker_config import WorkerConfig

Rows = list[tuple[SamplingParams, list[int], list[int]]]
CPU = CpuDevice(WorkerConfig(model_path="", num_threads=torch.get_num_threads()))
MOST = 48
"""Rows of a GPU's sampler."""


@pytest.fixture(scope="module")
def gpu() -> InterpretedGpu:
    return InterpretedGpu(WorkerConfig(model_path="", num_threads=1))


def add_rows(sampler: RowSampler, rows: Rows) -> RowSampler:
    for row, (params, prompt, output) in enumerate(rows):
        sampler.add_row(row, params, prompt + output, len(prompt))
    return sampler


def pair(gpu: InterpretedGpu, rows: Rows, vocab_size: int = VOCAB) -> tuple[RowSampler, RowSampler]:
    """The GPU's sampler and the CPU's, with the same rows."""
    found = GpuSampler(vocab_size=vocab_size, max_num_seqs=MOST, device=gpu)
    return add_rows(found, rows), add_rows(Sampler(vocab_size=vocab_size, device=CPU), rows)


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(sampling_params(), rows_of_logits, histories), min_size=1, max_size=3))
def test_every_token_is_the_one_that_the_cpu_draws(gpu, batch):
    for params, row, (prompt, output) in batch:
        assume(choose(row, params, prompt, output).margin > 1e-6)
    rows = [(params, prompt, output) for params, _, (prompt, output) in batch]
    logits = torch.tensor([row for _, row, _ in batch])
    before = logits.clone()
    found, expected = (sampler.sample(logits, range(len(batch))) for sampler in pair(gpu, rows))
    assert found == expected
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_vocabulary_of_several_spans_and_an_odd_size(gpu, dtype):
    logits = (random_logits(1, 9, 8301) * 4).round().div(4).to(dtype)  # full of ties
    logits[:, 8300] = logits[:, 4096] = logits.amax(-1)
    each = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, min_p=0.1, temperature=1.5),
        SamplingParams(seed=3, top_k=20, top_p=0.95, temperature=0.6),
        SamplingParams(seed=4, top_k=500),
        SamplingParams(seed=5, top_p=0.5),
        SamplingParams(seed=6, temperature=0.7, logit_bias=((8300, 2.0), (17, -100.0))),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(seed=8, allowed_token_ids=(5, 4100, 8299), top_p=0.9),
    ]
    rows: Rows = [(params, [8300, 4096, 8], [8300]) for params in each]
    found, expected = (sampler.sample(logits, range(9)) for sampler in pair(gpu, rows, 8301))
    assert found == expected


def test_penalties_of_more_tokens_than_one_program_takes(gpu):
    params = SamplingParams(temperature=0.0, frequency_penalty=0.3, presence_penalty=0.1)
    rows: Rows = [
        (replace(params, repetition_penalty=1.0 + n / 10), [0], list(range(n, 600, 2))) for n in (0, 1)
    ]
    logits = random_logits(3, 2, 700)
    found, expected = pair(gpu, rows, 700)
    for _ in range(3):
        assert found.sample(logits, [0, 1]) == expected.sample(logits, [0, 1])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(gpu, poison):
    kinds = [GREEDY, SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.5)]
    hidden = [replace(params, min_tokens=1, stop_token_ids=(5,)) for params in kinds]
    asking = [replace(params, num_logprobs=2) for params in hidden]
    rows: Rows = [(params, [0], []) for params in (*kinds, *hidden, *asking)]
    logits = random_logits(2, 18, VOCAB)
    logits[:9, 5] = poison
    samplers = pair(gpu, rows * 2)
    found, expected = (sampler.sample(logits, range(18)) for sampler in samplers)
    assert sorted(found.failed) == list(range(9))
    assert found.failed == expected.failed
    assert found.token_ids == expected.token_ids
    assert sorted(found.logprobs) == [15, 16, 17]
    # Its place in the stream is not used up.
    logits = random_logits(4, 18, VOCAB)
    found, expected = (sampler.sample(logits, range(18)) for sampler in samplers)
    assert found.token_ids == expected.token_ids


def test_a_row_without_a_token_left_fails_alone(gpu):
    banned = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    foreign = SamplingParams(allowed_token_ids=(VOCAB,))
    rows: Rows = [(params, [0], []) for params in (banned, foreign, GREEDY, GREEDY)]
    logits = random_logits(2, 4, VOCAB)
    logits[3] = -math.inf
    found, expected = (sampler.sample(logits, range(4)) for sampler in pair(gpu, rows))
    assert sorted(found.failed) == [0, 1, 3]
    assert found == expected


def test_more_edited_rows_than_there_is_memory_for_at_once(gpu, monkeypatch):
    monkeypatch.setattr(edits, "_NUM_LOGITS", 2 * 128)
    rows: Rows = [(SamplingParams(seed=n, logit_bias=((n, 40.0),)), [0], []) for n in range(5)]
    rows[2] = (GREEDY, [0], [])
    logits = random_logits(5, 5, VOCAB)
    found, expected = (sampler.sample(logits, range(5)) for sampler in pair(gpu, rows))
    assert found == expected


def test_reports_are_those_of_the_cpu(gpu):
    asks = [replace(GREEDY, num_logprobs=n % 5) if n % 7 else GREEDY for n in range(40)]
    asks[3] = replace(asks[3], temperature=2.0, logit_bias=((4, 9.0),))
    asks[8] = asks[9] = replace(asks[9], logprob_token_ids=(7, 2, VOCAB - 1))
    rows: Rows = [(params, [0], []) for params in asks]
    logits = random_logits(6, 40, VOCAB)
    logits[5, 1:] = -math.inf
    found, expected = (sampler.sample(logits, range(40)) for sampler in pair(gpu, rows))
    assert found.token_ids == expected.token_ids
    assert list(found.logprobs) == list(expected.logprobs) == [n for n in range(40) if n % 7]
    for n, report in found.logprobs.items():
        assert numbers_of(report) == pytest.approx(numbers_of(expected.logprobs[n]), abs=1e-5)


def numbers_of(report: TokenLogprobs) -> list[float]:
    return [report.token_id, report.logprob, report.rank, *(number for pair in report.top for number in pair)]


class Demo:
    """The demonstration's tokens, and grammars over them."""

    folder = Path(__file__).parents[3] / "engine" / "demo_model"
    vocab_size = 2600

    def grammars(self) -> Grammars:
        return Grammars(self.folder, vocab_size=self.vocab_size, eos_token_ids=(0,))


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def test_grammars_mask_their_rows_and_no_others(gpu):
    demo = Demo()
    each = [
        SamplingParams(seed=1, grammar=regex("[ab]{9}"), stop_token_ids=(0,), min_tokens=99),
        SamplingParams(seed=2),
        SamplingParams(temperature=0.0, grammar=regex("(yes|no)"), presence_penalty=1.0),
        SamplingParams(seed=4, grammar=regex("[0-9]{9}"), allowed_token_ids=tuple(range(60)), top_p=0.9),
        SamplingParams(seed=5, allowed_token_ids=(70, 71)),
        SamplingParams(seed=6, grammar=regex("x"), allowed_token_ids=(9,)),
    ]
    rows: Rows = [(params, [5], []) for params in each]
    options = {"vocab_size": demo.vocab_size, "grammars": demo.grammars()}
    found, expected = (
        add_rows(GpuSampler(device=gpu, max_num_seqs=MOST, **options), rows),
        add_rows(Sampler(device=CPU, **options), rows),
    )
    for step in range(3):
        logits = random_logits(step, 6, demo.vocab_size)
        result = found.sample(logits, range(6))
        assert result == expected.sample(logits, range(6))
        assert list(result.failed) == [5]


def test_thoughts_before_an_answer_end_as_on_the_cpu(gpu):
    """The end of the reply becomes theirs before a grammar, and nothing follows spent ones but the mark."""
    demo = Demo()
    waiting, mark = replace(regex("[ab]{9}"), begins_after=11), AnswerStart(token_ids=(11,), text="</t>")
    each = [
        SamplingParams(temperature=0.0, grammar=waiting, stop_token_ids=(3, 4), answer=mark),
        SamplingParams(seed=2, grammar=waiting, stop_token_ids=(3,), answer=mark),
        SamplingParams(seed=3, answer=replace(mark, max_tokens=1), allowed_token_ids=(70, 71)),
        SamplingParams(seed=4),
    ]
    rows: Rows = [(params, [5], []) for params in each]
    options = {"vocab_size": demo.vocab_size, "grammars": demo.grammars()}
    found, expected = (
        add_rows(GpuSampler(device=gpu, max_num_seqs=MOST, **options), rows),
        add_rows(Sampler(device=CPU, **options), rows),
    )
    tokens = []
    for step in range(3):
        logits = random_logits(step, 4, demo.vocab_size)
        logits[:2, 3] = 30.0
        result = found.sample(logits, range(4))
        assert result == expected.sample(logits, range(4))
        tokens.append(result.token_ids)
    assert [tokens[0][0], tokens[0][1], tokens[1][2]] == [11, 11, 11]


class Ahead:
    """Two rows whose sequences come and go while results are still pending."""

    def __init__(self, gpu: InterpretedGpu) -> None:
        self.sampler = GpuSampler(vocab_size=VOCAB, max_num_seqs=MOST, device=gpu)
        self.params: list[SamplingParams] = []
        """Parameters by sequence."""
        self.drawn: list[list[int]] = []
        self.num_begun: list[int] = []
        self.holders: dict[int, int] = {}
        self.pending: list[tuple[list[int], PendingSample]] = []

    def admit(self, row: int, params: SamplingParams) -> None:
        self.sampler.remove_row(row)
        self.holders[row] = len(self.params)
        self.params.append(params)
        self.drawn.append([])
        self.num_begun.append(0)
        self.sampler.add_row(row, params, [0], 1)

    def step(self) -> None:
        if self.sampler.needs_history([0, 1]):
            self.collect(leaving=0)
        sequences = [self.holders[0], self.holders[1]]
        logits = torch.stack([logits_of(each, self.num_begun[each]) for each in sequences])
        self.pending.append((sequences, self.sampler.begin(logits, [0, 1])))
        for each in sequences:
            self.num_begun[each] += 1

    def collect(self, *, leaving: int) -> None:
        while len(self.pending) > leaving:
            sequences, sample = self.pending.pop(0)
            for sequence, token_id in zip(sequences, sample.result().token_ids, strict=True):
                self.drawn[sequence].append(token_id)


def logits_of(sequence: int, place: int) -> torch.Tensor:
    """Much alike from place to place, so that penalties matter."""
    return random_logits(sequence, VOCAB) + place / 100


KINDS = st.sampled_from(
    [
        GREEDY,
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_k=3, min_tokens=2, stop_token_ids=(1, 2, 3)),
        SamplingParams(seed=7, frequency_penalty=9.0),
        SamplingParams(seed=8, bad_words=((1, 2), (3,), (4, 5, 6))),
    ]
)


@settings(max_examples=8, deadline=None, derandomize=True)
@example(
    [
        (SamplingParams(temperature=0.0, frequency_penalty=9.0), GREEDY, 2),
        (None, None, 2),
        (None, None, 2),
        (None, None, 2),
    ]
)
@given(st.lists(st.tuples(st.none() | KINDS, st.none() | KINDS, st.integers(0, 2)), min_size=2, max_size=5))
def test_results_may_be_collected_late_and_rows_may_change_hands_before(gpu, steps):
    """Each sequence samples as it does alone, on the CPU, one token after the other."""
    ahead = Ahead(gpu)
    for *arriving, leaving in [(GREEDY, GREEDY, 2), *steps]:
        for row, params in enumerate(arriving):
            if params is not None:
                ahead.admit(row, params)
        ahead.step()
        ahead.collect(leaving=leaving)
    ahead.collect(leaving=0)
    for sequence, params in enumerate(ahead.params):
        alone = add_rows(Sampler(vocab_size=VOCAB, device=CPU), [(params, [0], [])])
        for place, token_id in enumerate(ahead.drawn[sequence]):
            assert alone.sample(logits_of(sequence, place)[None], [0]).token_ids == [token_id]


def test_only_what_depends_on_history_asks_for_it_and_only_while_it_is_pending(gpu):
    plain = SamplingParams(min_tokens=3, stop_token_ids=(1,), logit_bias=((2, 1.0),), seed=5)
    penalized = replace(plain, temperature=0.0, frequency_penalty=2.0)  # counted on the device
    rows: Rows = [(plain, [0], []), (penalized, [0], []), (replace(plain, bad_words=((1, 2),)), [0], [])]
    sampler, expected = pair(gpu, rows)
    logits = random_logits(1, 3, VOCAB)
    assert not sampler.needs_history([0, 1, 2])
    pending = sampler.begin(logits, [0, 1, 2])
    assert not sampler.needs_history([0, 1])
    assert sampler.needs_history([0, 1, 2])
    assert pending.result() == pending.result() == expected.sample(logits, [0, 1, 2])
    assert not sampler.needs_history([0, 1, 2])
    for _ in range(4):  # asked for twice, recorded once
        assert sampler.sample(logits, [0, 1, 2]) == expected.sample(logits, [0, 1, 2])


def test_the_tokens_are_on_the_device_before_the_result_is_collected(gpu):
    rows: Rows = [(GREEDY, [0], []), (SamplingParams(seed=3), [0], []), (GREEDY, [0], [])]
    for sampler in pair(gpu, rows):
        logits = random_logits(1, 3, VOCAB)
        logits[2, 4] = math.nan
        pending = sampler.begin(logits, [0, 1, 2])
        on_device = pending.token_ids_N.tolist()
        assert pending.token_ids_N.dtype == torch.int64
        assert on_device == pending.result().token_ids
        assert on_device[2] == 0


def test_nothing_is_waited_for_until_the_result_is_collected(gpu, monkeypatch):
    """A tape refuses much of what the host would have to wait for; the rest is what brings numbers to it."""
    demo = Demo()
    everything = SamplingParams(
        seed=1,
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.1,
        logit_bias=((3, 1.0),),
        bad_words=((4,),),
        num_logprobs=2,
        grammar=regex("[ab]+"),
    )
    rows: Rows = [(params, [5], []) for params in (GREEDY, SamplingParams(seed=1), everything)]
    sampler = add_rows(
        GpuSampler(vocab_size=demo.vocab_size, max_num_seqs=MOST, device=gpu, grammars=demo.grammars()), rows
    )
    waiting = add_rows(Sampler(vocab_size=demo.vocab_size, device=CPU), rows[:2])
    logits = random_logits(1, 3, demo.vocab_size)

    def refuse(tensor: torch.Tensor) -> None:
        raise WaitsForDevice

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    gpu.capture(lambda: sampler.begin(logits, [0, 1, 2]) and None)
    with pytest.raises(WaitsForDevice):
        waiting.begin(logits[:2], [0, 1])


def test_warming_up_asks_for_every_kernel_that_rows_may_need(gpu, monkeypatch):
    """Kernels in all the variants that Triton compiles: by types and by constants."""
    asked: set[tuple[object, ...]] = set()
    launch = GridExecutor.__call__

    def note(executor: GridExecutor, *args: object, **kwargs: object) -> None:
        types = tuple(each.dtype if isinstance(each, torch.Tensor) else type(each) for each in args)
        asked.add((executor.fn, types, *kwargs.items()))
        launch(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", note)
    sampler = GpuSampler(vocab_size=VOCAB, max_num_seqs=MOST, device=gpu)
    sampler.warm_up(torch.bfloat16)
    warm = set(asked)
    each = [
        replace(way, **edit)
        for way in (GREEDY, SamplingParams(top_k=3))
        for edit in ({}, {"logit_bias": ((1, 1.0),), "bad_words": ((3,),)}, {"repetition_penalty": 1.5})
    ]
    each += [replace(params, allowed_token_ids=(1, 2)) for params in each]
    rows: Rows = [(params, [0], []) for params in each]
    for size in (1, len(each)):
        for start in range(0, len(each), size):
            add_rows(sampler, rows[start : start + size])
            sampler.sample(random_logits(1, size, VOCAB).bfloat16(), range(size))
    assert asked == warm


def draw_in_step(sampler: GpuSampler, logits: torch.Tensor, rows: list[int]) -> None:
    """Sample as in a step of a GPU, padded; what it leaves is sampled when `begin` is called."""
    draws_NF = sampler.draws_of_step(rows)
    padded_NF = np.zeros((len(rows) + 2, NUM_FIELDS))
    padded_NF[: len(rows)] = draws_NF
    padded_NF[len(rows) :, LINE], padded_NF[:, PLACE] = NOBODY, np.arange(len(rows) + 2)
    drawn_N = sampler.draw_in_step(logits, torch.from_numpy(padded_NF))
    assert drawn_N[len(rows) :].tolist() == [0, 0]


def test_what_a_step_draws_and_what_it_leaves_are_the_tokens_of_the_cpu(gpu):
    """Rows that always edit, that cease to, and that begin to while the step is under way, by a token that is
    collected when the step has drawn. Guesses in between change none.
    """
    demo = Demo()
    reasoning = replace(regex("[0-9]{9}"), begins_after=11)
    each = [
        GREEDY,
        SamplingParams(seed=1, top_p=0.9, temperature=0.8),
        SamplingParams(seed=2, min_tokens=2, stop_token_ids=tuple(range(2000))),
        SamplingParams(seed=3, frequency_penalty=3.0, num_logprobs=2),
        SamplingParams(seed=4, grammar=reasoning),
        SamplingParams(seed=5, bad_words=((11, 12), (7,))),
    ]
    rows: Rows = [(params, [5], []) for params in each]
    options = {"vocab_size": demo.vocab_size, "grammars": demo.grammars()}
    found = GpuSampler(device=gpu, max_num_seqs=MOST, **options)
    add_rows(found, rows)
    expected = add_rows(Sampler(device=CPU, **options), rows)
    order = [3, 0, 5, 4, 1, 2]
    pending: list[PendingSample] = []
    expected_before: list[object] = []
    for step in range(5):
        logits = random_logits(step, 6, demo.vocab_size)
        logits[3, 11] = 99.0 * (step == 1)
        draw_in_step(found, logits, order)
        found.guess(random_logits(9, 2, demo.vocab_size), [1, 4], [found.preview(row) for row in (1, 4)])
        drawn = [sample.result() for sample in pending]
        pending = [found.begin(logits, order)]
        assert pending[0].is_new
        assert [numbered(result) for result in drawn] == expected_before
        expected_before = [numbered(expected.sample(logits, order))]
    assert [numbered(sample.result()) for sample in pending] == expected_before
    assert found.draws_of_step([3, 0])[:, LINE].tolist() == [NOBODY, 1], "no work for whom it is in vain"


def numbered(result: SampleResult) -> tuple[object, ...]:
    """Without what is almost equal."""
    return result.token_ids, result.failed, sorted(result.logprobs)


def test_a_step_in_which_nobody_edits_leaves_nothing_to_be_drawn(gpu, monkeypatch):
    rows: Rows = [(GREEDY, [0], []), (SamplingParams(seed=3, top_k=5), [0], []), (SamplingParams(), [0], [])]
    found, expected = pair(gpu, rows)
    assert isinstance(found, GpuSampler)
    for step in range(3):
        logits = random_logits(step, 3, VOCAB)
        found.draw_in_step(logits, torch.from_numpy(found.draws_of_step([2, 0, 1])))
        with monkeypatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", None)  # no kernel any more
            pending = found.begin(logits, [2, 0, 1])
        assert not pending.is_new
        assert pending.result() == expected.sample(logits, [2, 0, 1])


def test_penalties_count_a_row_anew_for_each_sequence_that_has_it(gpu):
    penalized = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=5.0)
    found, expected = pair(gpu, [(penalized, [1, 2, 3], [4, 4]), (GREEDY, [1], [])])
    logits = random_logits(3, 2, VOCAB)
    histories = [([7, 8], [9]), ([1, 2, 3], [4, 4, 5]), ([6], [])]
    for prompt, output in histories:
        for _ in range(3):
            assert found.sample(logits, [0, 1]) == expected.sample(logits, [0, 1])
        for sampler in (found, expected):
            sampler.remove_row(0)
            sampler.add_row(0, penalized, prompt + output, len(prompt))


def test_a_token_that_could_not_be_drawn_is_not_counted(gpu):
    penalized = SamplingParams(temperature=0.0, frequency_penalty=100.0)
    found, expected = pair(gpu, [(penalized, [1], []), (penalized, [1], [])])
    for poison in (math.nan, 0.0, 0.0):
        logits = random_logits(3, 2, VOCAB)
        logits[0, 0] = 50.0 + poison
        assert found.sample(logits, [0, 1]) == expected.sample(logits, [0, 1])
