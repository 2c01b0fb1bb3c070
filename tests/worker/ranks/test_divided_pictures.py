"""Prompts with pictures over two ranks: the logits are those of transformers' own forward, in one process."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.pictures.seeing import Prompt, Reference, Served, payloads_of
from tests.worker.pictures.test_heads_with_pictures import ASKED, check_without_rows
from tests.worker.pictures.test_pictures import AFTER, BEFORE, BOUND, three
from tests.worker.ranks.divided import DividedWorker
from tests.worker.ranks.histories import config_of, load_divided
from tests.worker.speculation.head_checkpoints import write_head
from tests.worker.speculation.test_draft_heads import MTP


def rank_0_of(divided: DividedWorker) -> Any:
    """Return what Served needs of a worker."""
    return SimpleNamespace(launch=divided.launch, _steps=divided._worker._steps)  # type: ignore[union-attr]


@pytest.mark.night
@pytest.mark.parametrize("most_tokens", [64, 19])
@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v", "gemma3", "internvl", "mistral3", "smolvlm"]
)
def test_pictures_are_read_over_two_ranks(
    two_ranks: DividedWorker, tmp_path: Path, family: str, most_tokens: int
) -> None:
    reference = Reference(family, tmp_path)
    facts = load_divided(two_ranks, tmp_path)
    served = Served(rank_0_of(two_ranks), facts, {"max_num_batched_tokens": most_tokens, "max_num_seqs": 3})
    prompt = three(reference)
    with payloads_of(prompt.pictures) as payloads:
        one = served.add(Prompt(BEFORE, prompt.pictures[1], AFTER), payloads[1:])
        all_three = served.add(prompt, payloads)
        text = served.add(Prompt(BEFORE, AFTER), [])
        served.run()
    assert served.scheduler.stats().num_encoded == 2
    assert max(served.error(each, reference) for each in (one, all_three, text)) < BOUND


def test_a_head_may_find_a_picture_gone_over_ranks(
    two_ranks: DividedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference("qwen3_vl", tmp_path / "plain")
    folder = write_head(tmp_path / "with a head", reference.folder)
    facts = two_ranks.load(replace(config_of(folder), num_ranks=2, speculation=MTP))
    check_without_rows(Served(rank_0_of(two_ranks), facts, ASKED), reference, monkeypatch)


@pytest.mark.night
def test_over_stages_a_model_reads_text_alone_and_says_so(
    two_stages: DividedWorker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Reference("qwen3_vl", tmp_path)
    with caplog.at_level("INFO"):
        facts = load_divided(two_stages, tmp_path)
    assert facts.vision is None
    assert "qwen3_vl, so divided, reads text alone, and no pictures" in caplog.text
