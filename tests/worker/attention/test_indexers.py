"""Layers whose indexer chooses what they attend to: the choice is made for each sequence by itself."""

from pathlib import Path

import pytest
import torch

from tests.families import MATRIX
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.family_trial import try_family
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import NUM_TOKENS, expected
from worker.attention import indexers
from worker.attention.interface import KeyChoice

LONG = [(7 * index + 3) % 300 for index in range(29)]
SHORT = [40, 41, 42, 43, 44]


@pytest.fixture(scope="module")
def folder(checkpoints: MakeCheckpoint) -> Path:
    return checkpoints("deepseek_v32")


@pytest.fixture
def driver(folder: Path) -> PlanDriver:
    return PlanDriver(load_worker(folder, swap_space_bytes=1 << 20)[0], BLOCK_SIZE)


@pytest.mark.parametrize("most_scores", [indexers._MOST_SCORES, 500])
def test_sequences_beyond_the_choice_give_the_tokens_that_they_give_alone(
    folder: Path, driver: PlanDriver, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks beside a decode, preempted, swapped out, with a prefix of another; also in small parts."""
    monkeypatch.setattr(indexers, "_MOST_SCORES", most_scores)
    decoding, chunked = driver.add(SHORT), driver.add(LONG)
    driver.step({decoding: None})
    for num_tokens in (6, 1, 13):
        driver.step({chunked: num_tokens, decoding: None})
    sharer = driver.add([*LONG[:22], *SHORT], shares_with=chunked)
    driver.step({sharer: None, chunked: None})
    driver.preempt(chunked)
    driver.swap_out(decoding)
    driver.step({sharer: None})
    driver.generate([chunked, decoding, sharer], NUM_TOKENS)
    assert driver.generated(chunked) == expected(folder, tuple(LONG))
    assert driver.generated(decoding)[:NUM_TOKENS] == expected(folder, tuple(SHORT))
    assert driver.generated(sharer)[:NUM_TOKENS] == expected(folder, (*LONG[:22], *SHORT))


def test_a_token_keeps_its_latent_and_an_index_key_in_each_layer(folder: Path) -> None:
    _, facts = load_worker(folder, num_blocks=9)
    # 3 layers of 16 numbers, 8 rotated ones and an index key of 24, of 4 bytes, in 10 blocks of 4 tokens.
    assert facts.kv_cache_bytes == 10 * 4 * 3 * (16 + 8 + 24) * 4


@pytest.mark.night
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "minimax_m3_vl_text"])
def test_a_choice_that_is_ignored_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the matrix of families would not try the choice."""
    family = next(each for each in MATRIX if each.name == name)
    for most_scores in (1, indexers._MOST_SCORES):
        monkeypatch.setattr(indexers, "_MOST_SCORES", most_scores)
        assert try_family(family).refused is None
    monkeypatch.setattr(indexers, "KeyChoice", lambda _: KeyChoice(()))
    assert "computes other logits" in (try_family(family).refused or "")


class Blocks:
    """An indexer that chooses blocks of three keys."""

    block_size, place = 3, (0, 1)


def test_blocks_of_keys_are_marked_and_places_that_are_none_are_not() -> None:
    chosen = torch.tensor([[[[1, -1], [0, 2]]]])
    seen = indexers._seen(Blocks(), chosen, seq_len=7)
    assert seen.int().tolist() == [[[0, 0, 0, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]]]


@pytest.mark.parametrize(
    ("num_ranks", "own"),
    [
        (1, [[0, 1, 2, 3]]),
        (2, [[0, 1], [2, 3]]),
        (4, [[0], [1], [2], [3]]),
        (8, [[each // 2] for each in range(8)]),
    ],
)
def test_a_rank_takes_the_choices_of_its_own_kv_heads(num_ranks: int, own: list[list[int]]) -> None:
    indexer, chosen = Blocks(), torch.arange(4).view(1, 4, 1, 1)  # each head has another block
    for rank in range(num_ranks):
        indexers.choose_for_rank(indexer, rank, num_ranks)
        seen_CNK = indexers._seen(indexer, chosen, seq_len=12)
        assert [each.nonzero()[0, -1].item() // 3 for each in seen_CNK] == own[rank]
