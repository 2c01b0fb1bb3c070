"""Prompts with pictures over two ranks: the logits are those of transformers' own forward, in one process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.pictures.seeing import Prompt, Reference, Served, payloads_of
from tests.worker.pictures.test_pictures import AFTER, BEFORE, BOUND, three
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import load_divided

pytestmark = pytest.mark.night


@pytest.mark.parametrize("most_tokens", [64, 19])
@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v", "gemma3", "internvl", "mistral3", "smolvlm"]
)
def test_pictures_are_read_over_two_ranks(
    two_ranks: DividedWorker, tmp_path: Path, family: str, most_tokens: int
) -> None:
    reference = Reference(family, tmp_path)
    facts = load_divided(two_ranks, tmp_path)
    rank_0: Any = SimpleNamespace(launch=two_ranks.launch, _steps=two_ranks._worker._steps)
    served = Served(rank_0, facts, {"max_num_batched_tokens": most_tokens, "max_num_seqs": 3})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        one = served.add(Prompt(BEFORE, prompt.pictures[1], AFTER), payloads[1:])
        all_three = served.add(prompt, payloads)
        text = served.add(Prompt(BEFORE, AFTER), [])
        served.run()
    assert served.scheduler.stats().num_encoded == 2
    assert max(served.error(each, reference) for each in (one, all_three, text)) < BOUND


def test_over_stages_a_model_reads_text_alone_and_says_so(
    two_stages: DividedWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Reference("qwen3_vl", tmp_path)
    with caplog.at_level("INFO"):
        facts = load_divided(two_stages, tmp_path)
    assert facts.vision is None
    assert "qwen3_vl, so divided, reads text alone, and no pictures" in caplog.text
