"""KV events: the changes of all prefix caches, in the form in which routers outside read vLLM's.

Owns: that form, and the blocks that some engine has. A block that two engines have is stored once, and
removed when the last of them has lost it.
Never: sends anything (kv_publisher.py), or tells of blocks of a private key: salt and tokens are its secrets.
Source: vLLM's KV events: msgpack arrays of a time and events, each event a map with its name under "type".
"""

from array import array
from collections import Counter
from collections.abc import Iterable

import msgspec

from engine.options.api_keys import is_private
from scheduler.cache_groups import LifetimeKind
from scheduler.prefix_keys import ChangeKind, PrefixChange

_MEDIUM = "GPU"
"""The wire's word for blocks that are used where they are, on CPUs too. Blocks in the swap space are not."""
_KINDS = {
    LifetimeKind.ALL: "full_attention",
    LifetimeKind.WINDOW: "sliding_window",
    LifetimeKind.CHUNK: "chunked_local_attention",
}
_GroupKey = tuple[int | None, bytes]
"""Group of layers, None if there is one, and key of a block."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """One block that is found now."""

    block_hashes: tuple[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: tuple[tuple[str, ...]] | None = None
    """Name of the adapter, and cache salt of a first block."""
    group_idx: int | None = None
    """Group of layers, where a model has several: a prompt needs what it reads of each."""
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Blocks that are no longer found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class SharedBlocks:
    """The blocks of all engines, by key: for a router, they are one server."""

    def __init__(self) -> None:
        self._num_holders: Counter[_GroupKey] = Counter()
        self._of_engine: dict[int, set[_GroupKey]] = {}

    def events(self, engine: int, changes: Iterable[PrefixChange]) -> list[KVEvent]:
        """Return the events that changes of one engine make, in order."""
        events: list[KVEvent] = []
        for change in changes:
            if change.group is not None and change.group.lifetime.kind not in _KINDS:
                continue  # a state is none of the blocks before it
            if change.kind is ChangeKind.STORED:
                events += self._stored(engine, change)
            elif change.kind is ChangeKind.FORGOTTEN:
                events += self._removed(engine, {_key_of(change)})
            else:
                events += self.forget(engine)
        return events

    def forget(self, engine: int) -> list[KVEvent]:
        """Return the events of an engine that has lost all blocks, or is gone."""
        events = self._removed(engine, set(self._held(engine)))
        return [AllBlocksCleared()] if events and not self._num_holders else events

    def _held(self, engine: int) -> set[_GroupKey]:
        return self._of_engine.setdefault(engine, set())

    def _stored(self, engine: int, change: PrefixChange) -> list[KVEvent]:
        key = _key_of(change)
        if key in self._held(engine) or is_private(change.salt):
            return []
        self._held(engine).add(key)
        self._num_holders[key] += 1
        return [_stored_event(change)] if self._num_holders[key] == 1 else []

    def _removed(self, engine: int, keys: set[_GroupKey]) -> list[KVEvent]:
        held = self._held(engine)
        gone: dict[int | None, list[int]] = {}
        for key in keys & held:
            held.discard(key)
            self._num_holders[key] -= 1
            if not self._num_holders[key]:
                del self._num_holders[key]
                gone.setdefault(key[0], []).append(block_hash(key[1]))
        return [
            BlockRemoved(block_hashes=hashes, medium=_MEDIUM, group_idx=group)
            for group, hashes in gone.items()
        ]


def _key_of(change: PrefixChange) -> _GroupKey:
    return None if change.group is None else change.group.number, change.key


def block_hash(key: bytes) -> int:
    """Return the number by which routers know a block: 64 bits of its key."""
    return int.from_bytes(key[:8], "big")


def _stored_event(change: PrefixChange) -> BlockStored:
    token_ids = array("I", change.token_ids).tolist()
    lora_name = change.adapter.rpartition("@")[0] or None  # what requests name: the rest is of its content
    salt = "" if change.parent else change.salt
    extra_keys = tuple(filter(None, (lora_name, salt)))
    return BlockStored(
        block_hashes=(block_hash(change.key),),
        parent_block_hash=block_hash(change.parent) if change.parent else None,
        token_ids=token_ids,
        block_size=len(token_ids),
        lora_id=None,
        medium=_MEDIUM,
        lora_name=lora_name,
        extra_keys=(extra_keys,) if extra_keys else None,
        group_idx=_key_of(change)[0],
        kv_cache_spec_kind=None if change.group is None else _KINDS[change.group.lifetime.kind],
        kv_cache_spec_sliding_window=change.group.lifetime.window or None if change.group else None,
    )
