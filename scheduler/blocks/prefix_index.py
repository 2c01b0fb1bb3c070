"""Index of KV that is there already, on the device or on the host.

Owns: the blocks that are found by content. Full places of each group of layers on the device (the prefix
cache) and in the swap space (its second tier), the tails of prompts, and states; the last two are copied and
never shared.
Sources: vLLM's lazy CPU offload, which saves blocks about to be evicted; copy-on-write of PagedAttention,
arXiv:2309.06180, for tails.

A tail is the part of a prompt behind its last full block, without the prompt's last token, which is computed
in any case. A request with n > 1 has n sequences with one tail. The sequence that computed it goes on writing
behind it in the same block; so the others get a copy of the block, if they are admitted in a later step. In
the same step the tail is not written yet when copies are made, and to compute it costs less than to wait.

A state stands for all tokens up to one position, the end of a block, under whose key it is found.
"""

from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from scheduler.blocks.prefix_cache import PrefixCache, Row, any_of
from scheduler.blocks.restore_points import ReplyEnd, ReplyEnds
from scheduler.blocks.swap_space import SwapSpace
from scheduler.config import HostTier, PrefixCaching, SchedulerConfig
from scheduler.group_places import GroupPlaces, main_group
from scheduler.longest_hit import IsFound, longest_hit
from scheduler.messages import BlockId
from scheduler.prefix_keys import ChangeKind, JournalContent, PrefixChange, block_key, root_key
from scheduler.sequence import Sequence


class EvictedRow(NamedTuple):
    """Blocks that were found until now, under which key."""

    group: int
    key: bytes
    row: Row


@dataclass(slots=True)
class GroupHit:
    """Part of one group in a prefix. Places count from the first of its table."""

    device: dict[int, Row] = field(default_factory=dict)
    """Blocks to share, by place."""
    host: dict[int, Row] = field(default_factory=dict)
    """Host blocks to copy in, by place."""

    def __len__(self) -> int:
        return len(self.device) + len(self.host)

    def cut(self, end: int) -> "GroupHit":
        """Leave out the places from `end` on."""
        device = {place: row for place, row in self.device.items() if place < end}
        return GroupHit(device, {place: row for place, row in self.host.items() if place < end})


@dataclass(slots=True, kw_only=True)
class PrefixHit:
    """Prefix that a sequence need not compute."""

    groups: list[GroupHit]
    num_tokens: int = 0
    """Length of the prefix; a window may have passed its beginning."""
    num_kept_tokens: int = 0
    """Length of what the groups that keep all tokens have: more, where a window or a state is gone."""
    bounded_by: int | None = None
    """Group that lacks what is read behind a longer prefix."""
    tail: Row = ()
    """Blocks to copy for the place behind `num_tokens`, of all groups; all but the last known token is then
    there."""
    point: dict[int, Row] = field(default_factory=dict)
    """Blocks to copy for each group that cannot share them: the state, and behind the end of a reply the
    beginning of the place that holds `num_tokens`."""

    def device_blocks(self) -> Iterator[BlockId]:
        """Blocks to share, of all groups."""
        return chain.from_iterable(chain.from_iterable([each.device.values() for each in self.groups]))

    def host_blocks(self) -> Iterator[BlockId]:
        return chain.from_iterable(chain.from_iterable([each.host.values() for each in self.groups]))

    def point_blocks(self) -> Row:
        """Blocks of the restore point, of all groups."""
        return tuple(chain.from_iterable(self.point.values()))


class PrefixIndex:
    """Finds and publishes; keys are computed once for each sequence, since its tokens never change."""

    def __init__(self, config: SchedulerConfig, groups: tuple[GroupPlaces, ...]) -> None:
        self.caches = [PrefixCache() for _ in groups]
        self.swap_space = SwapSpace(config.num_host_blocks, len(groups))
        self._groups = groups
        self.main_group = main_group(groups)
        self.main_cache = self.caches[self.main_group]
        self._paged = [i for i, group in enumerate(groups) if not group.is_fixed]
        self._fixed = next((i for i, group in enumerate(groups) if group.is_fixed), None)
        self._tails = PrefixCache()
        self._ends = ReplyEnds()
        self._points: dict[tuple[PrefixCache, bytes], int] = {}  # blocks; the one used longest ago first
        ends = [] if self._fixed is None else [self._ends.rows]
        self.kept_by_group = [any_of([cache, *ends]) for cache in self.caches]
        """Blocks that can be found on the device, among those of each group."""
        self._new_tails: list[tuple[bytes, Row]] = []
        self._new_states: list[tuple[bytes, Row]] = []
        self._block_size = config.block_size
        self.is_on = config.prefix_caching is PrefixCaching.ON
        self.keeps_on_host = self.is_on and config.host_tier is HostTier.ON and config.num_host_blocks > 0

    def num_unhashed(self, seq: Sequence) -> int:
        """Tokens whose keys `find` would have to compute first; they are kept."""
        if not self.is_on or not seq.reads_prefix_cache:
            return 0
        return max(self._num_findable(seq) - len(seq.block_keys), 0) * self._block_size

    def find(self, seq: Sequence) -> PrefixHit:
        """Longest prefix of a sequence that has no blocks; its own copy on the host counts too."""
        is_read = self.is_on and seq.reads_prefix_cache
        hit = self._find_prefix(seq) if is_read else PrefixHit(groups=[GroupHit() for _ in self._groups])
        num_swapped = min(seq.num_swapped_tokens, seq.num_tokens - 1)
        if num_swapped > hit.num_tokens and (self._fixed is None or num_swapped == seq.num_swapped_tokens):
            return self._find_swapped(seq, num_swapped)
        if hit.num_tokens == self._num_findable(seq) * self._block_size:
            hit.tail = self._find_tail(seq)
        return hit

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        """Let others find the places that [start, end) completes, and a prompt's tail that it completes.

        Called when the step is planned: the worker writes the whole batch's keys and values before any
        of it attends, so that even a sequence of the same step may use them. If the step fails,
        `forget` undoes it.
        """
        if not self.is_on:
            return
        first, last = start // self._block_size, end // self._block_size
        if first < last:
            keys = self._keys(seq, last)
            if self._fixed is None:
                num_full_of_prompt = seq.num_prompt_tokens // self._block_size
                seq.num_kept_tokens = min(last, num_full_of_prompt) * self._block_size
            for group in self._paged:
                table = seq.tables[group]
                # Plans in flight may have moved a window past a place before its last token was known.
                begin = max(first, table.first)
                cache = self.caches[group]
                self._note_stored(cache, seq, range(begin, last))
                num_stripes = self._groups[group].num_stripes
                if begin + 1 == last:  # as in a decode
                    cache.publish(keys[begin], table.row(begin, num_stripes))
                else:
                    cache.publish_all(keys[begin:last], table.rows(begin, last, num_stripes))
        if start < seq.num_prompt_tokens <= end:
            key = self._tail_key(seq)
            if key:
                self._new_tails.append((key, self.row_at(seq, self._num_findable_of_prompt(seq))))

    def row_at(self, seq: Sequence, place: int) -> Row:
        """Return the blocks that a sequence holds at a place, group after group."""
        rows = [seq.tables[group].row(place, self._groups[group].num_stripes) for group in self._paged]
        return tuple(chain.from_iterable(rows))

    def publish_hit(self, seq: Sequence, hit: PrefixHit) -> None:
        """Let blocks that this plan copies in be found: they arrive before anything is computed."""
        if not self.is_on:
            return
        num_full = hit.num_tokens // self._block_size
        for group in self._paged:
            for place in hit.groups[group].host:
                if place < num_full:
                    key, cache = self._keys(seq, num_full)[place], self.caches[group]
                    self._note_stored(cache, seq, range(place, place + 1))
                    cache.publish(key, seq.tables[group].row(place, self._groups[group].num_stripes))

    def publish_swapped(self, group: int, device_row: Row, host_row: Row) -> None:
        """Let others find the copy of a preempted sequence as well, if they can find what was copied."""
        key = self.caches[group].key_of(device_row[0])
        if key is not None and self.keeps_on_host:
            self.swap_space.publish(group, key, host_row)

    def found_at(self, group: int, seq: Sequence, place: int) -> Row:
        """Return what the device has of a place; empty if nothing, or if its key is not known yet."""
        return self.caches[group].get(seq.block_keys[place]) or () if place < len(seq.block_keys) else ()

    def kept(self) -> Container[BlockId]:
        """Blocks that can be found on the device, of any group."""
        return any_of(self.caches if self._fixed is None else [*self.caches, self._ends.rows])

    def findable_blocks(self) -> Iterator[BlockId]:
        """Blocks that can be found on the device, of all groups."""
        return chain.from_iterable([cache.blocks for cache in (*self.caches, self._ends.rows)])

    def num_findable(self, group: int) -> int:
        """Count the blocks of a group that can be found on the device."""
        return len(self.caches[group].blocks) + len(self._ends) * self._groups[group].num_stripes

    @property
    def num_changes(self) -> int:
        """Count of changes: while it is the same, every sequence finds the same blocks."""
        caches = [*self.caches, self._ends.rows]
        return sum([cache.num_changes for cache in caches], self.swap_space.num_changes)

    def reuse_all(self, blocks: list[BlockId] | Row) -> list[EvictedRow]:
        """Forget blocks whose content is about to change; returns the rows that were found."""
        if len(self._tails):
            self._tails.forget_all(blocks)
        found: list[EvictedRow] = []
        for group, cache in enumerate(self.caches):
            if rows := cache.forget_all(blocks):
                found += [EvictedRow(group, key, row) for key, row in rows]
        gone = [(self._ends.rows, parent) for parent in self._ends.forget_all(blocks)]
        if self._points:
            for point in [*gone, *((self.caches[each.group], each.key) for each in found)]:
                self._points.pop(point, None)
        return found

    def forget(self, seq: Sequence, *, start: int = 0) -> None:
        """Forget all that this sequence computed from `start` on, wherever it is by now."""
        place = start // self._block_size
        for table, group in zip(seq.tables, self._groups, strict=False):
            skipped = 0 if group.is_fixed else max(place - table.first, 0) * group.num_stripes
            self.reuse_all(table.block_ids[skipped:])
        for key in seq.block_keys[place:]:
            for cache in (*self.caches, self._ends.rows):
                self.reuse_all(cache.get(key) or ())
            self.swap_space.forget_key(key)

    def clear(self) -> None:
        """Forget all that was computed so far, on both sides; running sequences keep their blocks."""
        for cache in self.caches:
            cache.clear()
        self._tails.clear()
        self._ends.clear()
        self._points.clear()
        self.swap_space.clear()

    def complete_plan(self) -> None:
        """Let the next plan find the tails and states of this plan. The newest tail lives longest."""
        for key, row in self._new_tails:
            self._tails.replace(key, row)
        self._new_tails.clear()
        if self._new_states:
            cache = self._state_cache
            for key, row in self._new_states:
                self._publish_point(cache, key, row)
            self._new_states.clear()

    def lacks_state(self, seq: Sequence, position: int) -> bool:
        """Whether the state at the end of a block is not found, nor will be kept by this plan."""
        if not self.is_on:
            return False
        key = self._keys(seq, position // self._block_size)[position // self._block_size - 1]
        is_new = any(key == each for each, _ in self._new_states)
        return not is_new and self._state_cache.get(key) is None

    def keep_state(self, seq: Sequence, position: int, row: Row) -> None:
        """Let the next plan find the state at a position in these blocks."""
        self._new_states.append((seq.block_keys[position // self._block_size - 1], row))

    def keep_end(self, seq: Sequence) -> None:
        """Let prompts go on behind a sequence that ends, in copies of its state and of its last place."""
        position, place = seq.num_computed_tokens, seq.num_computed_tokens // self._block_size
        if not self.is_on or seq.is_indivisible or not 0 < position <= len(seq.token_ids):
            return
        full = place * self._block_size
        self.publish(seq, max(full - 1, 0), full)  # its last token may have been unknown until now
        row = tuple(seq.tables[self._fixed].block_ids) if self._fixed is not None else ()
        if full == position:
            if self._state_cache.get(key := seq.block_keys[place - 1]) is None:
                self._publish_point(self._state_cache, key, row)
            return
        parent = self._parent_key(seq, place)
        self._ends.publish(parent, seq, full, position, self.row_at(seq, place) + row)
        self._note_use(self._ends.rows, parent)

    def give_up_points(self, max_blocks: int) -> list[Row]:
        """Take out the points that were used longest ago, until the others have at most `max_blocks`.

        They can be found until they are reused.
        """
        rows: list[Row] = []
        num_blocks = sum(self._points.values())
        while num_blocks > max_blocks:
            cache, key = next(iter(self._points))
            num_blocks -= self._points.pop((cache, key))
            rows.append(cache.get(key) or ())
        return rows

    def note_restored(self, row: Row) -> None:
        """Let the point of these blocks be given up last."""
        for cache in (self._ends.rows, *self.caches) if row else ():
            if (key := cache.key_of(row[-1])) is not None:  # the last is of the state
                self._note_use(cache, key)

    def _publish_point(self, cache: PrefixCache, key: bytes, row: Row) -> None:
        if cache.journal is not None and cache.get(key) is None:
            cache.journal.note_stored(PrefixChange(ChangeKind.STORED, key, group=cache.group))
        cache.publish(key, row)
        self._note_use(cache, key)

    def _note_use(self, cache: PrefixCache, key: bytes) -> None:
        """Let a point be given up last."""
        self._points.pop((cache, key), None)
        self._points[cache, key] = len(cache.get(key) or ())

    @property
    def _state_cache(self) -> PrefixCache:
        assert self._fixed is not None, "only where a group has a state"
        return self.caches[self._fixed]

    def _note_stored(self, cache: PrefixCache, seq: Sequence, places: range) -> None:
        """Tell readers outside of places that are about to be found, and were not before."""
        journal = cache.journal
        if journal is not None:
            for place in places:
                if cache.get(seq.block_keys[place]) is None:
                    journal.note_stored(self._stored(seq, place, cache, journal.content))

    def _stored(self, seq: Sequence, place: int, cache: PrefixCache, content: JournalContent) -> PrefixChange:
        key = seq.block_keys[place]
        if content is JournalContent.KEYS:
            return PrefixChange(ChangeKind.STORED, key, group=cache.group)
        start = place * self._block_size
        token_ids = array("I", seq.token_ids[start : start + self._block_size]).tobytes()
        parent = seq.block_keys[place - 1] if place else b""
        return PrefixChange(
            ChangeKind.STORED, key, parent, token_ids, seq.cache_salt, seq.adapter, cache.group
        )

    def _find_prefix(self, seq: Sequence) -> PrefixHit:
        """Longest prefix of full places of which each group has all that the next token reads."""
        num_findable = self._num_findable(seq)
        keys = self._keys(seq, num_findable)[:num_findable]
        leading = {
            index: self._find_leading(index, keys)
            for index, group in enumerate(self._groups)
            if group.keeps_all
        }
        if len(leading) == len(self._groups) == 1:
            return PrefixHit(groups=[leading[0]], num_tokens=len(leading[0]) * self._block_size)
        tests = [
            range(len(leading[index])).__contains__ if index in leading else self._finder(index, keys)
            for index in range(len(self._groups))
        ]
        end, bounded_by = longest_hit(self._groups, tests, num_findable, self._block_size)
        hit = PrefixHit(groups=[], num_tokens=end * self._block_size, bounded_by=bounded_by)
        num_leading = min(map(len, leading.values()), default=num_findable)
        hit.num_kept_tokens = (num_leading if leading else end) * self._block_size
        found = self._find_end(seq, tests, range(end, num_leading + 1)) if len(self._ends) else None
        if found is not None:
            end, reply_end = found
            hit.num_tokens = end * self._block_size + reply_end.num_tokens
            hit.point = self._parted(reply_end.row)
        for index, group in enumerate(self._groups):
            if group.is_fixed:
                is_state_due = end and not hit.point
                hit.groups.append(self._find_state(index, keys[end - 1], hit) if is_state_due else GroupHit())
            elif index in leading:
                hit.groups.append(leading[index].cut(end))
            else:
                hit.groups.append(self._find_places(index, keys, range(group.first(hit.num_tokens), end)))
        return hit

    def _find_end(self, seq: Sequence, tests: list[IsFound], places: range) -> tuple[int, ReplyEnd] | None:
        """Find the last end of a reply that windows have, behind one of `places`, and that place."""
        pairs = list(zip(self._groups, tests, strict=True))
        for place in reversed(places):
            parent, start = self._parent_key(seq, place), place * self._block_size
            reply_end = self._ends.find(parent, seq, start)
            if reply_end is not None:
                limited = [(each.first(start), test) for each, test in pairs if each.is_limited]
                if all(all(map(test, range(first, place))) for first, test in limited):
                    return place, reply_end
        return None

    def _parted(self, row: Row) -> dict[int, Row]:
        """Blocks of a reply's end by group, in the order of `keep_end`."""
        blocks = iter(row)
        fixed = [] if self._fixed is None else [self._fixed]
        return {
            index: tuple(islice(blocks, self._groups[index].num_stripes)) for index in (*self._paged, *fixed)
        }

    def _find_leading(self, group: int, keys: list[bytes]) -> GroupHit:
        """All places up to the first that is nowhere."""
        # One call, because a long prompt that does not fit is looked up in each step.
        hit = GroupHit(dict(enumerate(self.caches[group].leading_rows(keys))))
        if self.keeps_on_host:
            for place in range(len(hit.device), len(keys)):
                if (row := self.caches[group].get(keys[place])) is not None:
                    hit.device[place] = row
                elif (row := self.swap_space.find(group, keys[place])) is not None:
                    hit.host[place] = row
                else:
                    break
        return hit

    def _finder(self, group: int, keys: list[bytes]) -> IsFound:
        on_device, on_host = self.caches[group].get, self.swap_space.find
        if not self.keeps_on_host:
            return lambda place: on_device(keys[place]) is not None
        return lambda place: on_device(keys[place]) is not None or on_host(group, keys[place]) is not None

    def _find_state(self, group: int, key: bytes, hit: PrefixHit) -> GroupHit:
        """Note the state of a key that has one: to be copied on the device, or in from the host."""
        row = self.caches[group].get(key)
        if row is not None:
            hit.point = {group: row}
            return GroupHit()
        return GroupHit(host={0: self.swap_space.find(group, key) or ()})

    def _find_places(self, group: int, keys: list[bytes], places: range) -> GroupHit:
        """Rows of places that are on the device or on the host."""
        hit = GroupHit()
        for place in places:
            row = self.caches[group].get(keys[place])
            if row is not None:
                hit.device[place] = row
            else:
                hit.host[place] = self.swap_space.find(group, keys[place]) or ()
        return hit

    def _find_swapped(self, seq: Sequence, num_tokens: int) -> PrefixHit:
        """Prefix in its own copy on the host, but for the places that the device still has."""
        hit = PrefixHit(groups=[], num_tokens=num_tokens)
        num_full = num_tokens // self._block_size if self.is_on else 0
        keys = self._keys(seq, num_full)
        for index, (group, table) in enumerate(zip(self._groups, seq.tables, strict=True)):
            found = GroupHit()
            hit.groups.append(found)
            for place in range(group.first(num_tokens), group.end_written(num_tokens)):
                is_full = place < num_full and not group.is_fixed
                row = self.caches[index].get(keys[place]) if is_full else None
                if row is not None:
                    found.device[place] = row
                else:
                    start = (place - table.first) * group.num_stripes
                    found.host[place] = tuple(table.host_ids[start : start + group.num_stripes])
        return hit

    def _find_tail(self, seq: Sequence) -> Row:
        if not self.is_on or not seq.reads_prefix_cache or seq.num_tokens > seq.num_prompt_tokens:
            return ()
        return (self._tails.get(self._tail_key(seq)) or ()) if len(self._tails) else ()

    def _tail_key(self, seq: Sequence) -> bytes:
        """Key of a prompt's tail; empty if it has none."""
        if seq.tail_key is None:
            place, end = self._num_findable_of_prompt(seq), seq.num_prompt_tokens - 1
            start = place * self._block_size
            seq.tail_key = b""
            if start < end and self._fixed is None:  # a state is of a place's end
                parent = self._parent_key(seq, place)
                seq.tail_key = block_key(parent, seq.token_ids[start:end], seq.inputs_within(start, end))
        return seq.tail_key

    def _num_findable(self, seq: Sequence) -> int:
        """Full blocks of all known tokens but the last, which is computed in any case."""
        return (seq.num_tokens - 1) // self._block_size

    def _num_findable_of_prompt(self, seq: Sequence) -> int:
        return (seq.num_prompt_tokens - 1) // self._block_size

    def _parent_key(self, seq: Sequence, place: int) -> bytes:
        return self._keys(seq, place)[place - 1] if place else root_key(seq.cache_salt, seq.adapter)

    def _keys(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Return the keys of `seq` so far, the first `num_blocks` at least."""
        keys = seq.block_keys
        while len(keys) < num_blocks:
            start = len(keys) * self._block_size
            parent = keys[-1] if keys else root_key(seq.cache_salt, seq.adapter)
            end = start + self._block_size
            assert end <= len(seq.token_ids), "a key covers tokens, and these are not known yet"
            inputs = seq.inputs_within(start, end) if seq.encoder_inputs else b""
            keys.append(block_key(parent, seq.token_ids[start:end], inputs))
        return keys
