"""Speculation is refused by name where drafts cannot be verified."""

import pytest

from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.worker_config import DraftMethod, SpeculationConfig
from worker.worker_errors import StartupError

NGRAM = SpeculationConfig(method=DraftMethod.NGRAM)


def test_a_recurrent_model_that_is_served_alone_refuses_it(checkpoints: MakeCheckpoint) -> None:
    folder = checkpoints("recurrent_gemma")
    with pytest.raises(StartupError, match=r"--speculative-config: .* cannot be taken back"):
        load_worker(folder, speculation=NGRAM)
    _, facts = load_worker(folder)
    assert facts.max_drafts == 0, "and predictions are refused by request"


@pytest.mark.parametrize("method", [DraftMethod.NGRAM, DraftMethod.SUFFIX])
def test_a_model_that_pools_refuses_it(checkpoints: MakeCheckpoint, method: DraftMethod) -> None:
    with pytest.raises(StartupError, match=r"--speculative-config: a model that pools generates no tokens"):
        load_worker(checkpoints("llama"), task="embed", speculation=SpeculationConfig(method=method))


def test_a_paged_model_on_a_cpu_says_how_many_it_verifies(checkpoints: MakeCheckpoint) -> None:
    _, facts = load_worker(checkpoints("llama"), speculation=NGRAM)
    assert facts.max_drafts == NGRAM.num_speculative_tokens
