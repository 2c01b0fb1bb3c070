"""A private directory for one life of the engine process, and the end of those that nobody removed.

Owns: the directory (mode 0700) and the lock in it, which is held as long as its owner lives. A server that
was killed cannot tidy up; the next one removes what it left, recognizing it by the lock that nobody holds.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "tokenyard-"
_LOCK = "lock"


class RuntimeDirectory:
    """Use `make`; `path` is there until `remove`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> "RuntimeDirectory":
        """Raises OSError."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    """Only what is ours by owner and name, has a lock, and whose lock is free."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            if path.stat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
