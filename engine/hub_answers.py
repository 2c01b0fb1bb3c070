"""The answers of a hub, checked before the hub's library makes paths and files of them.

Owns: the alphabet of names that come from the other side, and the count of bytes while they come.

huggingface_hub joins ETags and commits to the paths of its cache as they come, and compares sizes at the end.
"""

import re
import threading
from collections.abc import Iterator
from typing import Any

_MAX_REPLY_BYTES = 64 << 20
"""Limit of a list of files, which is JSON."""
_MAX_FILE_BYTES = 1 << 50
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ETAG = re.compile(r'(?:W/)?"?[0-9A-Za-z][0-9A-Za-z._+=-]{0,127}"?')
_PART = re.compile(r"[\w.][\w. +()=,@-]{0,200}")
_ETAG_HEADERS = ("ETag", "X-Linked-Etag")


class HubLies(Exception):
    """An answer that no hub gives. Its text says which."""


class HubAnswers:
    """The checks of all answers to this process."""

    def __init__(self) -> None:
        self.commit = ""
        """The one commit that files may be of."""
        self._is_over = False
        self._here = threading.local()

    def watch(self) -> None:
        """Let the hub's library ask through a client whose answers are checked."""
        from huggingface_hub import constants, set_client_factory

        # Its transfers are made by a library of their own, which counts nothing for us.
        constants.HF_HUB_DISABLE_XET = True
        set_client_factory(self._client)

    def expect(self, num_bytes: int) -> None:
        """Limit the bytes of each answer to this thread."""
        self._here.most = num_bytes

    def end(self) -> None:
        """Let transfers under way fail at their next bytes."""
        self._is_over = True

    def _client(self) -> Any:
        from huggingface_hub.utils._http import default_client_factory

        client = default_client_factory()
        client.headers["Accept-Encoding"] = "identity"  # so that bytes on the wire are those of the file
        client.event_hooks = {**client.event_hooks, "response": [self._check]}
        return client

    def _check(self, response: Any) -> None:
        """Check the headers, and count the body while it comes. Raises HubLies."""
        headers, is_of_a_file = response.headers, response.request.method == "HEAD"
        etags = [headers[name] for name in _ETAG_HEADERS if is_of_a_file and name in headers]
        for etag in etags:
            if not _ETAG.fullmatch(etag):
                raise HubLies(f"the ETag {etag[:80]!r}")
        commit = headers.get("X-Repo-Commit", self.commit)
        if self.commit and commit != self.commit:
            raise HubLies(f"a file of the commit {commit[:80]!r}, where {self.commit} was asked for")
        if headers.get("Content-Encoding", "identity") != "identity":
            raise HubLies("a compressed answer, which was not asked for")
        base = next(each for each in type(response.stream).__mro__ if each.__name__ == "SyncByteStream")
        most = getattr(self._here, "most", _MAX_REPLY_BYTES)
        pieces, close = self._counted(response.stream, most), response.stream.close
        counted = type("Counted", (base,), {"__iter__": lambda _: pieces, "close": lambda _: close()})
        response.stream = counted()

    def _counted(self, stream: Any, most: int) -> Iterator[bytes]:
        num_bytes = 0
        for piece in stream:
            num_bytes += len(piece)
            if num_bytes > most:
                raise HubLies(f"more than the {most:,} bytes that it had announced")
            if self._is_over:
                raise HubLies("more after the end")
            yield piece


def check_commit(commit: object) -> str:
    """Return the name of a commit. Raises HubLies."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise HubLies(f"the commit {str(commit)[:80]!r}")
    return commit


def check_text(name: object) -> str:
    """Return the name of a file, which need not be one that is fetched. Raises HubLies."""
    if not isinstance(name, str):
        raise HubLies(f"a file of the name {str(name)[:80]!r}")
    return name


def check_file(name: str, size: object, digest: object) -> int:
    """Return the size of a file, once its name may be a path. Raises HubLies."""
    parts = name.split("/")
    if len(name) > 1000 or not all(_PART.fullmatch(each) and each not in (".", "..") for each in parts):
        raise HubLies(f"a file of the name {name[:80]!r}")
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise HubLies(f"the SHA-256 {str(digest)[:80]!r} of {name}")
    if size is not None and not (type(size) is int and 0 <= size < _MAX_FILE_BYTES):
        raise HubLies(f"a size of {name} that no file has")
    return _MAX_REPLY_BYTES if size is None else int(size)
