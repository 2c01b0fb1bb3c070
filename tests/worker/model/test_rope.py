"""Frequencies are chosen once, so that a neighbour's length changes nobody's tokens."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import PlanDriver
from worker.model.corrections import fix_rope
from worker.worker_errors import StartupError

PROMPT = [10, 20, 30, 40, 50, 60, 70]


def generate(folder: Path, num_tokens: int, **options: object) -> list[int]:
    worker, _ = load_worker(folder, **options)
    driver = PlanDriver(worker, BLOCK_SIZE)
    sequence = driver.add(PROMPT)
    driver.generate([sequence], num_tokens)
    return driver.generated(sequence)


def reference(folder: Path, num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([PROMPT])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(PROMPT) :].tolist()


def test_longrope_below_the_short_window_is_what_transformers_computes(checkpoints: MakeCheckpoint) -> None:
    folder = checkpoints("phi3_longrope")
    assert generate(folder, 12, max_model_len=64) == reference(folder, 12)


def test_longrope_uses_long_factors_throughout_when_sequences_may_outgrow_the_short_window(
    checkpoints: MakeCheckpoint,
) -> None:
    folder = checkpoints("phi3_longrope")
    worker, facts = load_worker(folder)
    assert facts.max_model_len > 64
    driver = PlanDriver(worker, BLOCK_SIZE)
    short = driver.add(PROMPT)
    driver.generate([short], 4)
    long = driver.add([5] * 70)
    driver.generate([short, long], 12)
    assert driver.generated(short) == generate(folder, 12), "a long neighbour changed a short sequence"
    assert driver.generated(short) != generate(folder, 12, max_model_len=64), "the factors make a difference"
    longer = driver.add([5] * 70 + driver.generated(long)[:5])
    driver.generate([longer], 7)
    assert driver.generated(longer) == driver.generated(long)[5:12], "prefill and decode rotate alike"


def test_dynamic_rope_is_served_up_to_the_trained_window_only(checkpoints: MakeCheckpoint) -> None:
    folder = checkpoints("dynamic_rope")
    assert load_worker(folder)[1].max_model_len == 512
    assert generate(folder, 12) == reference(folder, 12)
    with pytest.raises(StartupError, match="dynamic rope"):
        load_worker(folder, max_model_len=600)


@pytest.mark.parametrize(
    ("family", "max_model_len"), [("phi3_longrope", 64), ("phi3_longrope", 512), ("dynamic_rope", 512)]
)
def test_once_chosen_frequencies_do_not_depend_on_a_batch_whatever_was_measured_before(
    checkpoints: MakeCheckpoint, family: str, max_model_len: int
) -> None:
    """On a GPU a look at the batch would wait for the device, and no graph could capture it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints(family), dtype=torch.float32).eval()
    rotary = model.model.rotary_emb
    hidden, within, beyond = torch.zeros(1, 1, 1), torch.tensor([[5]]), torch.tensor([[500]])
    rotary(hidden, beyond if max_model_len > 64 else within)
    wanted = rotary.inv_freq.clone()
    rotary(hidden, beyond if max_model_len == 64 else within)
    fix_rope(model, model.config, max_model_len)
    assert torch.equal(rotary.inv_freq, wanted)
    for position in (beyond, within):
        rotary(hidden, position)
        assert torch.equal(rotary.inv_freq, wanted)
    assert rotary.rope_type == "default", "transformers looks at positions for any other that chooses"
