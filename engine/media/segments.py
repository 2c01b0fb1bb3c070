"""Shared memory of prepared pictures, by content, as long as a request needs it.

Owns: names, the number of requests that hold each, the bound on all of it, and the removal: at the end of the
last request or of the server. A server that was killed leaves it to the process that prepares pictures, and
at the latest to the next server, which finds the lock free.
"""

import contextlib
import fcntl
import os
import secrets
import weakref
from collections.abc import Iterable
from typing import NamedTuple

from engine.media.messages import SHARED_MEMORY, PreparedPicture
from scheduler.input_messages import Payload

_PREFIX = "tokenyard-pictures-"
_LOCK = "-lock"
_SHARE = 2
"""The server takes at most half of the shared memory that the machine has."""
_MAX_BYTES = 4 * 2**30


class StoredPicture(NamedTuple):
    payload: Payload
    pieces: tuple[int | str, ...]
    """Prompt tokens of it: numbers of image tokens, and texts between them."""


class PictureLease:
    """The pictures of one request, held until `release`, or until the lease is garbage."""

    def __init__(self, segments: "Segments", salt: str, key: str) -> None:
        self.salt = salt
        """Part of the names of its pictures: those of another salt are others."""
        self.key = key
        """The tenant in whose turn they are prepared."""
        self._held: list[str] = []
        self._segments = segments
        self._end = weakref.finalize(self, segments.drop, self._held)

    def release(self) -> None:
        """Let the pictures go; a second call does nothing."""
        self._end()

    @property
    def num_bytes(self) -> int:
        return self._segments.num_bytes_of(self._held)

    def take(self, content: str) -> StoredPicture | None:
        """Hold a picture that is there; None if it is not."""
        return self._segments.hold(content, self._held)


class Segments:
    """The shared memory of one server."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.prefix = f"{_PREFIX}{secrets.token_hex(8)}"
        self._lock = os.open(
            SHARED_MEMORY / f"{self.prefix}{_LOCK}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        whole = os.statvfs(SHARED_MEMORY)
        self.num_bytes_at_most = min(whole.f_frsize * whole.f_blocks // _SHARE, _MAX_BYTES)
        self._stored: dict[str, StoredPicture] = {}
        self._holders: dict[str, int] = {}
        self._num_named = 0

    @property
    def num_free_bytes(self) -> int:
        return self.num_bytes_at_most - self.num_bytes_of(self._stored)

    def num_bytes_of(self, contents: Iterable[str]) -> int:
        return sum(self._stored[each].payload.num_bytes for each in contents)

    def new_name(self) -> str:
        self._num_named += 1
        return f"{self.prefix}-{self._num_named}"

    def add(self, content: str, segment: str, prepared: PreparedPicture) -> None:
        """Note a picture that was written; a lease must take it before anything is awaited."""
        payload = Payload(content, segment, prepared.num_bytes, prepared.grid)
        self._stored[content] = StoredPicture(payload, prepared.pieces)
        self._holders[content] = 0

    def hold(self, content: str, held: list[str]) -> StoredPicture | None:
        stored = self._stored.get(content)
        if stored is not None and content not in held:
            held.append(content)
            self._holders[content] += 1
        return stored

    def drop(self, contents: Iterable[str]) -> None:
        """Take one holder from each; remove what has none left."""
        for content in contents:
            self._holders[content] -= 1
            if not self._holders[content]:
                del self._holders[content]
                self.forget(self._stored.pop(content).payload.segment)

    def forget(self, segment: str) -> None:
        """Remove shared memory, if it is there."""
        (SHARED_MEMORY / segment).unlink(missing_ok=True)

    def close(self) -> None:
        for path in SHARED_MEMORY.glob(f"{self.prefix}*"):
            path.unlink(missing_ok=True)
        os.close(self._lock)


def _remove_abandoned() -> None:
    """Remove what servers of this user have left behind, whose lock is free."""
    for lock in SHARED_MEMORY.glob(f"{_PREFIX}*{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner runs
                for path in SHARED_MEMORY.glob(f"{lock.name.removesuffix(_LOCK)}*"):
                    path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
