"""Draws with drafts follow the model's distribution, whatever the drafts are. Seeds are fixed."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from scheduler.messages import SamplingParams
from tests.tiers import by_day
from worker.devices.device import CpuDevice
from worker.sampling.sampler import Sampler
from worker.worker_config import WorkerConfig

NUM_ROWS = 3000
TOKENS = 5
LIMIT_OF = {4: 18.47, 24: 51.18}
"""The 0.1 % point of chi-square, by degrees of freedom."""
LOGITS = torch.tensor(
    [
        [0.3, -0.9, 1.1, 0.0, -0.4],
        [-0.6, 0.8, 0.1, -0.2, 0.5],
        [0.9, 0.2, -0.7, 0.4, -0.1],
    ]
)
"""Logits of the next token, and behind each of two drafts. A wrong draft's lines belong to no kept token."""


def chi_square(observed: Counter, probabilities: dict) -> float:
    total = observed.total()
    assert observed.keys() <= probabilities.keys()
    return sum((observed[key] - total * p) ** 2 / (total * p) for key, p in probabilities.items())


def probabilities(place: int, temperature: float) -> list[float]:
    return torch.softmax(LOGITS[place].double() / temperature, 0).tolist()


@pytest.mark.parametrize("drafts", [(2, 1), (1, 4), (4, 0), (2,)], ids=str)
@pytest.mark.parametrize("temperature", by_day([1.0, 0.7], [0.7]))
def test_kept_drafts_and_the_token_behind_them_have_the_models_probabilities(
    drafts: tuple[int, ...], temperature: float
) -> None:
    """Chi-square of each place over many seeds, and of neighbouring places together.

    The last shows a draw that uses the number which has accepted the draft before it.
    """
    sampler = Sampler(vocab_size=TOKENS, device=CpuDevice(WorkerConfig(model_path="", num_threads=2)))
    params = SamplingParams(temperature=temperature)
    for row in range(NUM_ROWS):
        sampler.add_row(row, replace(params, seed=row), [0], 1)
    logits = LOGITS[: 1 + len(drafts)].repeat(NUM_ROWS, 1)
    found = [each.token_ids for each in sampler.verify(logits, range(NUM_ROWS), [drafts] * NUM_ROWS)]
    for place in range(1 + len(drafts)):
        reached = [each for each in found if len(each) > place]
        assert all(each[:place] == drafts[:place] for each in reached)
        expected = dict(enumerate(probabilities(place, temperature)))
        assert chi_square(Counter(each[place] for each in reached), expected) < LIMIT_OF[TOKENS - 1]
        kept = sum(len(each) > place + 1 for each in found)
        assert kept == (sum(each[place] == drafts[place] for each in reached) if place < len(drafts) else 0)


def test_two_tokens_have_the_same_joint_distribution_as_two_steps_give_them() -> None:
    """Each pair of tokens, with the right draft of each row: the model's own samples."""
    plain, drafted = (
        Sampler(vocab_size=TOKENS, device=CpuDevice(WorkerConfig(model_path="", num_threads=2)))
        for _ in range(2)
    )
    rows = range(NUM_ROWS)
    for row in rows:
        for sampler in (plain, drafted):
            sampler.add_row(row, SamplingParams(seed=row), [0], 1)
    firsts, seconds = (plain.sample(LOGITS[place].repeat(NUM_ROWS, 1), rows).token_ids for place in range(2))
    found = drafted.verify(LOGITS[:2].repeat(NUM_ROWS, 1), rows, [(first,) for first in firsts])
    pairs = [each.token_ids for each in found]
    assert pairs == list(zip(firsts, seconds, strict=True))
    first, second = probabilities(0, 1.0), probabilities(1, 1.0)
    expected = {(a, b): first[a] * second[b] for a in range(TOKENS) for b in range(TOKENS)}
    assert chi_square(Counter(pairs), expected) < LIMIT_OF[TOKENS**2 - 1]
