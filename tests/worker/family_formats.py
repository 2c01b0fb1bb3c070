"""One family as a whole checkpoint on disk, in formats of quantized weights, and its text by the worker.

Owns: building, quantizing and serving of tiny models, which formats give the tokens of the plain numbers, and
whether pictures are read.
Never: what is expected of a family (docs/models.md has that).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.checkpoints import vary_constants
from tests.families import Family
from tests.gguf_checkpoints import FAMILIES as GGUF_FAMILIES
from tests.gguf_checkpoints import write_gguf
from tests.quantized_checkpoints import quantize
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.family_trial import tiny_config
from tests.worker.pictures.seeing import FAMILIES as SEEING_FAMILIES
from tests.worker.pictures.seeing import Prompt, Reference, Served, load, payloads_of
from tests.worker.plan_driver import PlanDriver
from worker.checkpoint.gguf.folder import folder_of
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
OPEN = 1e-3
"""Gap between two logits, of sizes about 4, that other sums of the same numbers may turn."""
_DRAFT_HEAD = "mtp.fc.weight"
_PICTURE_ERROR = 1e-4
"""Largest error of a log probability behind a picture."""


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


@torch.inference_mode()
def likeliest(
    model: Any, answers: list[list[int]], prompts: Sequence[list[int]] = PROMPTS, *, least_gap: float = 0.0
) -> list[list[int]]:
    """Best tokens of transformers behind each prompt and all beginnings of its answer, in one pass.

    Each text ends where its two best tokens are no further apart than `least_gap`.
    """
    found = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        best = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].topk(2)
        is_open = (best.values[:, 0] - best.values[:, 1] < least_gap).tolist()
        found.append(best.indices[: [*is_open, True].index(True), 0].tolist())
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
        if _gives_tokens_of(model, quantized):
            found.append(name)
    return found


def gguf_names(name: str) -> list[str]:
    """List the families of tests/gguf_checkpoints.py that are files of a family."""
    return [own for own, stored in GGUF_FAMILIES.items() if own in (name, f"{name}_text") or stored == name]


def reads_gguf(name: str, root: Path) -> bool:
    """Tell whether there are GGUF files of a family, of which each gives the tokens of the plain numbers."""
    found = []
    for own in gguf_names(name):
        path, plain = write_gguf(own, {"": "Q8_0"}, root, is_tied=False)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        found.append(_gives_tokens_of(model, folder_of(path)))
    return bool(found) and all(found)


def reads_pictures(name: str, root: Path) -> bool:
    """Tell whether text behind a picture is that of the family's own forward."""
    if name not in SEEING_FAMILIES:
        return False
    reference = Reference(name, root)
    prompt = Prompt(PROMPTS[0], reference.picture(0), PROMPTS[1])
    served = Served(*load(root))
    with payloads_of(prompt.pictures) as payloads:
        number = served.add(prompt, payloads)
        served.run()
    return served.error(number, reference) < _PICTURE_ERROR


def _gives_tokens_of(model: Any, folder: Path) -> bool:
    try:
        answers = served(folder)
    except StartupError:
        return False
    pairs = zip(answers, likeliest(model.eval(), answers, least_gap=OPEN), strict=True)
    return all(ours[: len(theirs)] == theirs for ours, theirs in pairs)
