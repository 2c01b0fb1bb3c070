"""One family as a whole checkpoint on disk, in formats of quantized weights, and its text by the worker.

Owns: building, quantizing and serving of tiny models, and which formats give the tokens of the plain numbers.
Never: what is expected of a family (docs/models.md has that).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import vary_constants
from tests.families import Family
from tests.quantized_checkpoints import quantize
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.family_trial import tiny_config
from tests.worker.plan_driver import PlanDriver
from worker.checkpoint.task_choice import generating_class
from worker.worker_errors import StartupError

PROMPTS = [[5, 9, 200, 31, 7], list(range(20, 43))]
NUM_TOKENS = 6
FORMATS = {
    "fp8": "FP8",
    "int4": "compressed-tensors int4",
    "float8": "compressed-tensors FP8",
    "awq": "AWQ",
    "gptq": "GPTQ",
    "nf4": "NF4",
}
"""Formats of tests/quantized_checkpoints.py, and their names for a reader."""
_OPEN = 1e-3
"""Gap between two logits, of sizes about 4, that other sums of the same numbers may turn."""
_DRAFT_HEAD = "mtp.fc.weight"


def build(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = generating_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
        vary_constants(model, torch)
    return model.eval()


def generated(model: Any, least_gap: float = 0.0) -> list[list[int]]:
    """Generate by transformers; each text ends where the two best tokens are no further apart than that."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(output.logits).topk(2).values
        is_open = (best[:, 0] - best[:, 1] < least_gap).tolist()
        num_decided = [*is_open, True].index(True)
        found.append(output.sequences[0, len(prompt) :][:num_decided].tolist())
    return found


def served(folder: Path) -> list[list[int]]:
    worker, _ = load_worker(folder, max_model_len=64)
    driver = PlanDriver(worker, BLOCK_SIZE)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(sequences, NUM_TOKENS)
    return [driver.generated(each) for each in sequences]


def formats_of(family: Family, root: Path, names: list[str]) -> list[str]:
    """Try a family in formats, with a draft head beside; returns those that give the plain numbers' tokens.

    A format that is refused, or gives others, is left out.
    """
    original = root / "original"
    config = tiny_config(family)
    build(config).save_pretrained(original)
    (original / "generation_config.json").unlink(missing_ok=True)
    found = []
    for name in names:
        plain, quantized = root / f"{name} plain", root / name
        plain.mkdir()
        for file in original.iterdir():
            (plain / file.name).write_bytes(file.read_bytes())
        quantize(plain, quantized, name)
        tensors = load_file(quantized / "model.safetensors") | {_DRAFT_HEAD: torch.ones(4, 4)}
        save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
        model = generating_class(config).from_pretrained(plain, dtype=torch.float32)
        try:
            pairs = zip(served(quantized), generated(model.eval(), least_gap=_OPEN), strict=True)
            if all(ours[: len(theirs)] == theirs for ours, theirs in pairs):
                found.append(name)
        except StartupError:
            continue
    return found
