"""Comparison of checkpoints on different machines, in a moment.

Owns: a short text that is equal for equal checkpoints, and differs for another model or other training.
Never: reads all of the weights; --checksums does, where a single changed number must be noticed.
"""

import hashlib
from pathlib import Path

from worker.checkpoint.checkpoint_files import find_weights

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
_HEADER_BYTES = 1 << 20


def fingerprint(folder: Path) -> str:
    """Digest config.json, and of each file of weights size, beginning and samples. Raises StartupError."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in find_weights(folder):
        digest.update(f"{weights.path.name} {weights.num_bytes}".encode())
        with weights.path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for sample in range(_NUM_SAMPLES):
                file.seek(weights.num_bytes * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
