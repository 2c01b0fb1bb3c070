"""Samplers of several ranks, here in the threads of one process, give the tokens of one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scheduler.messages import SamplingParams
from tests.worker.ranks.conftest import SIZE
from tests.worker.ranks.test_shared_ranks import together
from worker.devices.device import CpuDevice
from worker.ranks.shared_ranks import SharedRanks
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.row_sampler import RowSampler, SampleResult
from worker.sampling.sampler import Sampler, divide_lines
from worker.sampling.state import SamplingRow
from worker.worker_config import WorkerConfig

VOCAB = 700
NUM_STEPS = 5
PROMPT = [3, 1, 2]
CPU = CpuDevice(WorkerConfig(model_path="", num_threads=torch.get_num_threads()))
PLAIN = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, min_p=0.1, logit_bias=((VOCAB, 5.0),)),  # a bias of no token
]
BY_ONE = [
    SamplingParams(seed=5, presence_penalty=2.0),
    SamplingParams(seed=6, num_logprobs=2),
    SamplingParams(temperature=0.0, logit_bias=((7, 9.0),)),
    SamplingParams(seed=7, bad_words=((5,),)),
    SamplingParams(seed=8, min_tokens=3, stop_token_ids=(2,)),
    SamplingParams(seed=9, allowed_token_ids=(4, 5, 6)),
]
CROWDS = {
    "plain rows": PLAIN + [replace(each, seed=100) for each in PLAIN],
    "mixed rows": [each for pair in zip(PLAIN, BY_ONE, strict=False) for each in pair],
    "rows of the first rank alone": BY_ONE,
    "more ranks than rows": PLAIN[1:3],
}


def logits_of(num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(num_rows, VOCAB, generator=generator) for _ in range(NUM_STEPS)]


def add_rows(sampler: RowSampler, crowd: list[SamplingParams]) -> None:
    for row, params in enumerate(crowd):
        sampler.add_row(row, params, PROMPT, len(PROMPT))


def sampled(
    sampler: RowSampler, ranks: SharedRanks | None, steps: Sequence[torch.Tensor]
) -> list[SampleResult]:
    """Sample steps of all rows; tokens come to the other ranks before the next begins."""
    found = []
    for logits_NV in steps:
        pending = sampler.begin(logits_NV, range(len(logits_NV)))
        if ranks is not None and ranks.rank == 0:
            ranks.broadcast(pending.result().token_ids)
        elif ranks is not None:
            ranks.stage.sampled.append(ranks.broadcast([0] * len(logits_NV)))
        found.append(pending.result())
    return found


def sampler_of(ranks: SharedRanks, grammars: Grammars) -> RowSampler:
    if ranks.rank == 0:
        return Sampler(vocab_size=VOCAB, device=CPU, grammars=grammars, ranks=ranks)
    drawn_by = Sampler(vocab_size=VOCAB, device=CPU)
    return FollowingSampler(vocab_size=VOCAB, max_num_seqs=16, device=CPU, ranks=ranks, drawn_by=drawn_by)


def sampled_by_all(
    three: list[SharedRanks], crowd: list[SamplingParams], steps: list[torch.Tensor], grammars: Grammars
) -> list[list[SampleResult]]:
    def work(ranks: SharedRanks) -> list[SampleResult]:
        sampler = sampler_of(ranks, grammars)
        add_rows(sampler, crowd)
        return sampled(sampler, ranks, steps)

    return together(three, work)


def sampled_by_one(crowd: list[SamplingParams], steps: list[torch.Tensor]) -> list[SampleResult]:
    sampler = Sampler(vocab_size=VOCAB, device=CPU)
    add_rows(sampler, crowd)
    return sampled(sampler, None, steps)


@pytest.fixture
def grammars(folder: Path) -> Grammars:
    return Grammars(folder, vocab_size=VOCAB, eos_token_ids=(2,))


@pytest.mark.parametrize("crowd", CROWDS.values(), ids=CROWDS)
def test_ranks_sample_the_tokens_and_reports_of_one(
    three: list[SharedRanks], grammars: Grammars, crowd: list[SamplingParams]
) -> None:
    steps = logits_of(len(crowd))
    expected = sampled_by_one(crowd, steps)
    first, *others = sampled_by_all(three, crowd, steps, grammars)
    assert first == expected
    for found in others:
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_a_row_that_fails_on_another_rank_fails_alone_and_with_its_reason(
    three: list[SharedRanks], grammars: Grammars
) -> None:
    crowd = CROWDS["plain rows"]
    steps = logits_of(len(crowd))[:1]
    steps[0][-1, 5] = torch.nan
    expected = sampled_by_one(crowd, steps)
    first, *_ = sampled_by_all(three, crowd, steps, grammars)
    assert list(first[0].failed) == [len(crowd) - 1]
    assert first == expected


def test_ranks_draw_on_behind_a_step_with_drafts(three: list[SharedRanks], grammars: Grammars) -> None:
    crowd = CROWDS["plain rows"]
    before, drafted, after = logits_of(len(crowd))[:3]

    def work(sampler: RowSampler, ranks: SharedRanks | None) -> list[tuple[int, ...]]:
        add_rows(sampler, crowd)
        sampled(sampler, ranks, [before])
        rows, drafts = range(len(crowd)), [(7,)] * len(crowd)
        verified = sampler.verify(drafted.repeat_interleave(2, 0), rows, drafts)
        (last,) = sampled(sampler, ranks, [after])
        return [*(each.token_ids for each in verified), tuple(last.token_ids)]

    expected = work(Sampler(vocab_size=VOCAB, device=CPU), None)
    assert together(three, lambda ranks: work(sampler_of(ranks, grammars), ranks)) == [expected] * SIZE


def test_plain_rows_are_divided_evenly_and_the_first_rank_has_all_others() -> None:
    def divided(crowd: list[SamplingParams]) -> list[list[int]]:
        rows = [SamplingRow(each, PROMPT, num_prompt_tokens=3, vocab_size=VOCAB) for each in crowd]
        return divide_lines(rows, SIZE)

    assert divided(PLAIN + PLAIN[:2]) == [[0, 1, 2], [5, 6], [3, 4]]
    assert divided([*PLAIN[:2], *BY_ONE[:5]]) == [[2, 3, 4, 5, 6], [0, 1], []]
    assert divided(PLAIN[:2]) == [[0, 1], [], []]
