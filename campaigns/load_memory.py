"""Memory that a loaded model takes, beside the size of its file.

    python -m campaigns.load_memory FOLDER --quantization int4

What the process had before the load, with all libraries imported, is not counted. The KV cache is there but
not written to, so that the system has given no memory for it yet.

Owns: the figures. Never: runs a step.
"""

import argparse
import gc
from pathlib import Path

from worker.worker import Worker
from worker.worker_config import WorkerConfig

_CACHE_BYTES = 64 << 20
_FIELDS = ("VmRSS", "RssAnon", "RssFile", "VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder, or a GGUF file's folder as the server makes it")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--quantize-head", default="none")
    parser.add_argument("--activations", default="none")
    options = parser.parse_args()
    before = _memory()
    worker = Worker(
        WorkerConfig(
            model_path=options.model,
            quantization=options.quantization,
            quantize_head=options.quantize_head,
            activations=options.activations,
            kv_cache_bytes=_CACHE_BYTES,
            max_model_len=256,
            max_num_batched_tokens=256,
        )
    )
    facts = worker.load(lambda _: None)
    gc.collect()
    after = _memory()
    file_bytes = sum(path.stat().st_size for path in Path(options.model).glob("*.safetensors"))
    print(f"file {_mib(file_bytes)}, weights {_mib(facts.weight_bytes)}, KV {_mib(facts.kv_cache_bytes)}")
    for name in _FIELDS:
        print(f"{name:8} {_mib(before[name])} before, {_mib(after[name] - before[name])} more after")


def _memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {name: int(found[name].split()[0]) << 10 for name in _FIELDS}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    main()
