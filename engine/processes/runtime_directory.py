"""A private directory for one engine process, and the removal of abandoned ones.

Owns: the directory (mode 0700) and the lock in it, which its owner holds as long as it runs. A killed server
leaves its directory behind; the next server finds the lock free and removes it. It is in TMPDIR unless that
has a longer path than sockets may have.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "tokenyard-"
_LOCK = "lock"
_MOST_PARENT_BYTES = 75
"""Room for 32 bytes more: sockets are in the directory, and the path of one has at most 107 (unix(7))."""


class RuntimeDirectory:
    """A directory made by `make`; `path` exists until `remove`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> "RuntimeDirectory":
        """Make a directory and remove abandoned ones. Raises OSError."""
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _MOST_PARENT_BYTES:
            parent = "/tmp"
        _remove_abandoned(Path(parent))
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of this user and name that have a lock which is free."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if path.stat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner runs
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
