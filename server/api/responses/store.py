"""Stored responses, which can be fetched and continued: in memory, within limits.

Owns: the owner of a stored response (the key that made it), and the one that is dropped for lack of room:
the one unused for longest.
Never: a clock of its own, the contents of a response (replies.py), or a disk.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from server.api.batches.store import RESPONSE_TTL_S
from server.api.responses.protocol import InputItem

MAX_RESPONSES = 1000
_ITEM_BYTES = 1536
_PART_BYTES = 768
"""Bytes of the objects around the text; measured, an item with one part: 1.3 to 1.9 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A finished response and the conversation that it ends."""

    owner: str
    """The key that made it, by name; empty where there are no keys."""
    body: bytes
    """The response object, as JSON."""
    input: tuple[InputItem, ...]
    """Items of its own request: a part of the conversation."""
    conversation: tuple[InputItem, ...]
    """Everything before it and itself; without instructions, which do not carry over."""
    num_conversation_bytes: int
    """Weight by `weigh`. Items shared with earlier responses count in each, so that the sum is never less
    than the memory in use."""

    @property
    def num_bytes(self) -> int:
        return len(self.body) + self.num_conversation_bytes


def weigh(items: Iterable[InputItem]) -> int:
    """Bytes that these items take in memory, roughly and not too few: 4 for each character."""
    num_bytes = 0
    for item in items:
        parts = [*(item.content or ()), *(item.output or ()), *(item.summary or ())]
        num_chars = sum(len(part.text or "") + len(part.refusal or "") for part in parts)
        others = (item.arguments, item.input, item.encrypted_content, item.action, item.tools)
        num_chars += sum(len(str(each)) for each in others if each is not None)
        num_bytes += sum(len(part.image_url or "") for part in parts)  # of one byte each, as all URLs are
        num_bytes += _ITEM_BYTES + _PART_BYTES * len(parts) + 4 * num_chars
    return num_bytes


@dataclass(slots=True)
class _Entry:
    stored: StoredResponse
    last_used_s: float


class ResponseStore:
    """An LRU of responses. All times are seconds of one clock, the caller's."""

    def __init__(self, *, max_responses: int, max_bytes: int, ttl_s: float = RESPONSE_TTL_S) -> None:
        """`max_bytes` 0 stores nothing. `ttl_s` counts from the last use."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one unused for longest is first
        self.num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._max_bytes > 0

    def add(self, response_id: str, stored: StoredResponse, *, now_s: float) -> None:
        """Store a response, and drop others for it. One that is larger than the whole store is not stored."""
        self._drop_expired(now_s)
        if not self.is_open or stored.num_bytes > self._max_bytes:
            return
        self._drop(response_id)
        while (
            len(self._entries) >= self._max_responses or self.num_bytes + stored.num_bytes > self._max_bytes
        ):
            self._drop(next(iter(self._entries)))
        self._entries[response_id] = _Entry(stored, now_s)
        self.num_bytes += stored.num_bytes

    def find(self, response_id: str, *, owner: str, now_s: float) -> StoredResponse | None:
        """Find a response; None if there is none of `owner`. Finding is a use."""
        self._drop_expired(now_s)
        entry = self._entries.get(response_id)
        if entry is None or entry.stored.owner != owner:
            return None
        entry.last_used_s = now_s
        self._entries.move_to_end(response_id)
        return entry.stored

    def delete(self, response_id: str, *, owner: str, now_s: float) -> bool:
        """Delete a response; False if there is none of `owner`."""
        if self.find(response_id, owner=owner, now_s=now_s) is None:
            return False
        self._drop(response_id)
        return True

    def _drop_expired(self, now_s: float) -> None:
        while self._entries:
            response_id, entry = next(iter(self._entries.items()))
            if now_s - entry.last_used_s < self._ttl_s:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self.num_bytes -= entry.stored.num_bytes
