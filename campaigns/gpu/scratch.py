"""The folder for checkpoints, which ends with the run.

Owns: the choice between memory and disk.
"""

import shutil
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 24 << 30
"""For those of 16 GB, with room to spare."""


def roomiest_folder() -> str | None:
    """Memory is read and written faster than a disk. None is where temporary files are in any case."""
    if not _SHARED_MEMORY.is_dir() or shutil.disk_usage(_SHARED_MEMORY).free < _ENOUGH_BYTES:
        return None
    return str(_SHARED_MEMORY)
