"""Memory that a loaded model takes, beside the size of its file.

    python -m campaigns.load_memory MODEL --after SMALL --activations int8

What the process had before the load is not counted. Libraries and heaps grow when they are used first:
`--after` loads and forgets a small model before, in the same way, and what is left is the model's own. The KV
cache is there but not written to: the system has given no memory for it yet.

Owns: the figures. Never: runs a step.
"""

import argparse
from argparse import Namespace
from pathlib import Path

from worker.checkpoint.gguf.folder import folder_of
from worker.machine import return_freed_memory
from worker.worker import Worker
from worker.worker_config import ModelFacts, WorkerConfig

_CACHE_BYTES = 64 << 20
_FIELDS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="folder, or GGUF file")
    parser.add_argument("--after", type=Path, metavar="SMALL", help="folder or GGUF file to be loaded before")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--quantize-head", default="none")
    parser.add_argument("--activations", default="none")
    options = parser.parse_args()
    file_bytes = _file_bytes(options.model)
    if not file_bytes:
        parser.error(f"{options.model} has no *.safetensors; of a GGUF model, expected the file itself")
    if options.after is not None:
        _load(options.after, options)[0].close()
        return_freed_memory()
    before = _memory()
    worker, facts = _load(options.model, options)
    return_freed_memory()
    after = _memory()
    print(f"file {_mib(file_bytes)}, weights {_mib(facts.weight_bytes)}, KV {_mib(facts.kv_cache_bytes)}")
    for name in _FIELDS:
        more = after[name] - before[name]
        grown = f"{_mib(more)} more after, {more / file_bytes:.3f} of the file"
        print(f"{name:8} {_mib(before[name])} before, {grown}")
    worker.close()


def _load(model: Path, options: Namespace) -> tuple[Worker, ModelFacts]:
    worker = Worker(
        WorkerConfig(
            model_path=str(folder_of(model) if model.is_file() else model),
            quantization=options.quantization,
            quantize_head=options.quantize_head,
            activations=options.activations,
            kv_cache_bytes=_CACHE_BYTES,
            max_model_len=256,
            max_num_batched_tokens=256,
        )
    )
    return worker, worker.load(lambda _: None)


def _file_bytes(model: Path) -> int:
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(path.stat().st_size for path in files)


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) << 10 for name in _FIELDS}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
