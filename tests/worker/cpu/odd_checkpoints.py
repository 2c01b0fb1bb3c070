"""Checkpoints of random sizes, formats and faults, each loaded with the kernels and asked.

    python -m tests.worker.cpu.odd_checkpoints [--cases 100] [--seed 0]

Says for each whether it was refused, by which error, or answered. For kernels built with sanitizers
(docs/security.md): what they find ends the process, and the case before which it ended is the one.

Owns: the drawing of a case. Never: is a test of the day, or judges a number.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import FORMATS, quantize
from tests.worker.conftest import load_worker
from tests.worker.cpu.conftest import INSTRUCTION_SETS
from tests.worker.plan_driver import PlanDriver
from worker.cpu.native import Kernels
from worker.worker_errors import StartupError

_FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "mixtral",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2",
    "deepseek_v2",
)
_BLOCK_SIZE = 4


def sizes(dice: random.Random) -> dict[str, Any]:
    """Draw sizes of which most divide into nothing."""
    heads = dice.choice((1, 2, 3, 4, 5))
    drawn = {
        "hidden_size": dice.choice((16, 48, 64, 72, 80, 100, 136)),
        "intermediate_size": dice.choice((1, 16, 40, 96, 100, 130)),
        "head_dim": dice.choice((8, 16, 24, 32, 40, 64)),
        "num_attention_heads": heads * dice.choice((1, 2)),
        "num_key_value_heads": heads,
        "num_hidden_layers": dice.choice((1, 2, 4)),
        "sliding_window": dice.choice((1, 3, 12)),
    }
    return dict(dice.sample(sorted(drawn.items()), dice.randint(0, len(drawn))))


def spoil(folder: Path, dice: random.Random) -> str:
    """Change one tensor of a checkpoint; return what was done."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = dice.choice(sorted(tensors))
    tensor = tensors[name]
    change = dice.choice(("empty", "a row less", "a column less", "flat", "extreme", "another type"))
    if change == "empty":
        tensor = tensor[:0]
    elif change == "a row less":
        tensor = tensor[:-1]
    elif change == "a column less":
        tensor = tensor[..., :-1]
    elif change == "flat":
        tensor = tensor.reshape(-1)
    elif change == "extreme":
        whole = not tensor.dtype.is_floating_point
        tensor = torch.full_like(tensor, torch.iinfo(tensor.dtype).max if whole else float("inf"))
    else:
        tensor = tensor.to(dice.choice((torch.int64, torch.uint8, torch.float64, torch.float16)))
    tensors[name] = tensor.contiguous()
    save_file(tensors, path, {"format": "pt"})
    return f"{name}: {change}"


def write(folder: Path, dice: random.Random) -> tuple[Path, str]:
    """Write a checkpoint; return its folder and what it is."""
    family, drawn = dice.choice(_FAMILIES), sizes(dice)
    plain, said = folder / "plain", f"{family} {json.dumps(drawn)}"
    make_checkpoint(family, plain, **drawn)
    written = plain
    if dice.random() < 0.6:
        name = dice.choice(sorted(FORMATS))
        written, said = folder / "quantized", f"{said} {name}"
        quantize(plain, written, name)
    if dice.random() < 0.4:
        said = f"{said}; {spoil(written, dice)}"
    return written, said


def ask(folder: Path, dice: random.Random) -> str:
    """Load a checkpoint, compute some steps of it, and return how that ended."""
    options = {
        "quantization": dice.choice(("none", "none", "int8", "int4")),
        "num_threads": dice.choice((1, 2)),
    }
    options["dtype"] = dice.choice(("float32", "bfloat16"))
    try:
        worker, facts = load_worker(folder, **options)
    except StartupError as refusal:
        return f"refused: {str(refusal).splitlines()[0][:100]}"
    driver = PlanDriver(worker, _BLOCK_SIZE)
    prompts = [[dice.randrange(facts.vocab_size) for _ in range(dice.randint(1, 40))] for _ in range(3)]
    asked = [driver.add(prompt) for prompt in prompts]
    for _ in range(4):
        output = driver.step(dict.fromkeys(asked))
        asked = [each for each in asked if each not in output.failures]
    driver.release_all()
    return f"answered {len(asked)} of {len(prompts)}"


def main(argv: list[str]) -> int:
    """Return 1 if a case ended in an error that is no refusal."""
    parser = argparse.ArgumentParser(prog="python -m tests.worker.cpu.odd_checkpoints", allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args(argv)
    ends: Counter[str] = Counter()
    opened = Kernels.__init__
    for number in range(options.cases):
        dice = random.Random(f"{options.seed} {number}")
        first_set = dice.choice(("", *INSTRUCTION_SETS))

        def open_set(
            self: Kernels, library: Path, num_threads: int, asked: str = "", first: str = first_set
        ) -> None:
            opened(self, library, num_threads, asked or first)

        Kernels.__init__ = open_set  # type: ignore[method-assign]
        with tempfile.TemporaryDirectory() as name:
            try:
                folder, said = write(Path(name), dice)
            except Exception as error:  # noqa: BLE001 -- there is no such model
                ends[f"not written: {type(error).__name__}"] += 1
                continue
            print(f"{number}: {first_set or 'first'} {said}", flush=True)
            try:
                end = ask(folder, dice)
            except Exception as error:  # noqa: BLE001 -- each is a fault, and the next case goes on
                end = f"FAULT {type(error).__name__}: {str(error)[:200]}"
        print(f"   {end}", flush=True)
        ends[end.partition(":")[0][:40]] += 1
    print("\n".join(f"{num:5} {end}" for end, num in ends.most_common()))
    return 1 if any(end.startswith("FAULT") for end in ends) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
