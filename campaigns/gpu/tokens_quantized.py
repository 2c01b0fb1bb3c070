"""The same tokens by codes: of checkpoints in each format as of the plain one, and by options in all ways.

Owns: the choice of formats, families and options.
Never: compares ways of its own (tokens.py).
"""

import importlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from campaigns.gpu.driving import Drive, open_worker, scheduler_config
from campaigns.gpu.results import Record
from campaigns.gpu.shapes import write_checkpoint
from campaigns.gpu.tokens import TokensDiffer, chosen_workload, compare

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_CHECKPOINTS = (
    *(
        ("llama", name)
        for name in ("int4", "int4 with zeros", "int8", "float8", "nvfp4", "awq", "gptq", "fp8")
    ),
    *(("gpt_oss", "mxfp4"), ("qwen3_moe", "int4")),
)
_OPTIONS = (
    *({"quantization": word} for word in ("int8", "int4", "fp8")),
    {"quantization": "fp8", "activations": "fp8"},
    {"kv_cache_dtype": "fp8"},
)
_PROMPTS = ([40, 41, 42, 43, 44, 9, 3], [7, 19, 5], [*range(3, 40)])
_LIMITS = {
    "max_num_seqs": 4,
    "num_blocks": 64,
    "block_size": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}


def run(record: Record, settings: "Settings") -> None:
    """Raises TokensDiffer."""
    formats = record.table("Checkpoints, float32", "Family", "Format", "Sequences alike")
    ways = record.table("Options", "Format", "Way", "Sequences alike", "Tokens alike", "Preempted", "Swapped")
    wrong = []
    with tempfile.TemporaryDirectory() as root:
        for family, name in _CHECKPOINTS[-2:-1] if settings.is_smoke else _CHECKPOINTS:
            found, expected = (_drawn(each, settings) for each in _written(family, name, Path(root)))
            num_alike = sum(one == other for one, other in zip(found, expected, strict=True))
            formats.add(family, name, f"{num_alike} of {len(expected)}")
            wrong += [f"{family} {name}"] * (num_alike < len(expected))
        checkpoint = write_checkpoint("tiny" if settings.is_smoke else "small", Path(root) / "shape")
        workload = chosen_workload(settings)
        for options in _OPTIONS[:1] if settings.is_smoke else _OPTIONS:
            # Rows that torch multiplies in FP8 are many or few: that rounds otherwise.
            is_exact = "activations" not in options
            dtype = "float32" if is_exact else "bfloat16"
            if not compare(ways, workload, checkpoint, settings.target, dtype, **options) and is_exact:
                wrong.append(" ".join(options.values()))
    record.figure("num_wrong", len(wrong))
    if wrong:
        raise TokensDiffer(f"other tokens in float32: {', '.join(wrong)}")


def _written(family: str, name: str, root: Path) -> tuple[Path, Path]:
    """Checkpoint of codes, and the plain one that it stands for."""
    folders: tuple[Path, Path] = importlib.import_module("tests.quantized_checkpoints").write_quantized(
        family, name, root
    )
    return folders


def _drawn(folder: Path, settings: "Settings") -> list[list[int]]:
    worker, facts = open_worker(folder, settings.target, dtype="float32", **_LIMITS)
    drive = Drive(worker, scheduler_config(facts, max_num_seqs=4, max_num_batched_tokens=64))
    for prompt in _PROMPTS:
        drive.add(prompt, 4 if settings.is_smoke else 16)
    drive.run().free_rows()
    worker.close()
    return list(drive.tokens.values())
