"""Block tables of sequences: which blocks one needs, which it shares, when it gives them back.

Owns: the block tables, through the pool (which blocks are free) and the index (which are found by content).
Never: chooses which sequence is preempted; it says OK, LATER or NEVER and on anything but OK it changes
nothing.
Source: PagedAttention, arXiv:2309.06180. Hits are taken out of the free list before fresh blocks are
popped, otherwise a fresh block could evict a hit.

A plan's copies are made before it computes, in the order swap_out, swap_in, copies. So a block may be popped
in the plan that copies it out, but not in the plan that copies from it: sources of `swap_in` and of `copies`
are held until the plan is complete.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from sys import maxsize

from scheduler.blocks.block_demand import AdmissionCopies, AllocationStatus, BlockDemand
from scheduler.blocks.pool import BlockPool
from scheduler.blocks.prefix_cache import Row, rows_of
from scheduler.blocks.prefix_index import EvictedRow, PrefixHit, PrefixIndex
from scheduler.blocks.restore_points import STEADY_TOKENS, points_of
from scheduler.blocks.stakes import Stakes
from scheduler.config import SchedulerConfig
from scheduler.group_places import GroupPlaces, most_blocks, places_of
from scheduler.messages import BlockCopy, BlockId, GroupBlocks, SequenceId, StateTap
from scheduler.prefix_keys import ChangedGroup, PrefixJournal
from scheduler.sequence import BlockTable, Sequence

# Limits of a step for copying evicted blocks to the host: running requests do not notice as little as this.
_MOST_KEEPING_S = 0.01
_MOST_KEPT_BLOCKS = 1024
_POINTS_PART = 4
"""Number of blocks to one that is kept for states that prompts may go on from; two in any case."""


class KVCacheManager:
    """Blocks for sequences, shared where their prefixes are equal.

    All of a sequence's known tokens get their blocks at admission, so that a prefill, once begun, never
    waits for memory; a decode takes one place every `block_size` tokens. Of a group with a window a sequence
    gets as many places as it ever holds at once, and takes one further for each one that the window passed; a
    state has its one place from admission on.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.groups = places_of(config)
        self.passes_blocks = any(group.is_limited for group in self.groups)
        """Whether some group gives blocks back while a sequence runs."""
        self._paged = [index for index, group in enumerate(self.groups) if not group.is_fixed]
        self._num_state_blocks = sum([group.num_stripes for group in self.groups if group.is_fixed])
        self.has_state = self._num_state_blocks > 0
        row_size = sum([group.num_stripes for group in self.groups])
        self._most_point_blocks = max(config.num_blocks // _POINTS_PART, 2 * row_size)
        self._free_order = sorted(range(len(self.groups)), key=lambda index: self.groups[index].keeps_all)
        self.index = PrefixIndex(config, self.groups)
        """Record of all that is found by its content."""
        self.swap_space = self.index.swap_space
        self.is_plain = row_size == 1 and self.groups[0].keeps_all and not self.index.keeps_on_host
        """Whether a block is all that a decode ever needs, and nothing is copied out before it is taken."""
        self.stakes = Stakes(self.index, self.pool, self.groups, self.block_size)
        """Tokens that sequences would lose with their blocks."""
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._held_for_copies: list[BlockId] = []
        self._evicted: list[EvictedRow] = []
        self._max_kept = _MOST_KEPT_BLOCKS
        if config.copy_s_per_block:
            most = max(int(_MOST_KEEPING_S / config.copy_s_per_block), row_size)  # a state is kept whole
            self._max_kept = min(self._max_kept, most)
        self.num_kept_blocks = 0
        """Blocks copied to the host because the prefix cache on the device gave them up; since the start."""

    def keep_journal(self, journal: PrefixJournal) -> None:
        """Record what is found, and found no more, of all groups."""
        is_one = len(self.groups) == 1 and not self.has_state
        for index, (group, cache) in enumerate(zip(self.groups, self.index.caches, strict=True)):
            cache.journal, cache.group = journal, None if is_one else ChangedGroup(index, group.lifetime)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` ever holds at once."""
        return most_blocks(self.groups, num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether the empty pool would be large enough."""
        return self.most_blocks(num_tokens) <= self.pool.num_blocks

    def demand(self, seq: Sequence) -> BlockDemand:
        """Blocks that admitting `seq` would take now; it changes nothing."""
        hit, pool = self.index.find(seq), self.pool
        if pool.count_free(hit.tail):
            hit.tail = ()  # to hold it for the copy would cost a block
        start = hit.num_tokens
        places = [range(group.first(start), group.end(seq.num_tokens, start)) for group in self.groups]
        num_blocks = self._count_blocks(map(len, places))
        num_fresh = num_blocks - self._count_blocks([len(found.device) for found in hit.groups])
        num_from_free = num_fresh + pool.count_free(hit.device_blocks())
        num_free_of_point = pool.count_free(hit.point_blocks())
        takes_point = num_free_of_point > max(pool.num_free - num_from_free, 0)
        if takes_point:
            num_fresh -= num_free_of_point
        else:
            num_from_free += num_free_of_point
        return BlockDemand(hit, places, num_blocks, num_fresh, num_from_free, takes_point)

    def can_allocate(self, demand: BlockDemand, *, num_running: int) -> AllocationStatus:
        """Whether there is room now. The watermark counts only while others run."""
        if demand.num_blocks > self.pool.num_blocks:
            return AllocationStatus.NEVER
        reserve = self._watermark_blocks if num_running else 0
        has_room = demand.num_from_free + reserve <= self.pool.num_free
        return AllocationStatus.OK if has_room else AllocationStatus.LATER

    def pin(self, demand: BlockDemand) -> None:
        """Keep the host blocks that a sequence needs from the sequences that are preempted for it."""
        for block in demand.hit.host_blocks():
            self.swap_space.pin(block)

    def allocate(self, seq: Sequence, demand: BlockDemand) -> AdmissionCopies:
        """Give blocks to a sequence that has none, those found first; `demand` must fit.

        Sets `num_computed_tokens` to the prefix that was found: at most all but the last token, which must be
        computed to sample the next one.
        """
        assert not seq.num_blocks, f"{seq} has blocks already"
        hit = demand.hit
        for block in hit.device_blocks():
            self.pool.share(block)
        self.pin(demand)
        tail = hit.tail
        if self.pool.count_free(tail):
            tail = ()  # its holder was preempted meanwhile
        self._hold_for_copy(tail)
        point = hit.point_blocks()
        if demand.takes_point:
            for block in point:
                self.pool.share(block)
            self._reuse(point)
        else:
            self.index.note_restored(point)
            self._hold_for_copy(point)
        fresh = iter(self._take(demand.num_fresh))
        self.drop_copy(seq)
        seq.tables = [self._table(index, demand, fresh) for index in range(len(self.groups))]
        self._note_slots(seq)
        seq.num_computed_tokens = hit.num_tokens
        if self.has_state or self.passes_blocks:
            seq.points = points_of(seq, hit.num_kept_tokens, hit.num_tokens, self.block_size)
        self.index.publish_hit(seq, hit)
        copies = self._copies_within(seq, demand)
        if tail:
            copies += map(BlockCopy, tail, self.index.row_at(seq, hit.num_tokens // self.block_size))
            seq.num_computed_tokens = seq.num_tokens - 1
        return AdmissionCopies(self._copies_from_host(seq, hit), copies)

    def _table(self, index: int, demand: BlockDemand, fresh: Iterator[BlockId]) -> BlockTable:
        """Table of a group: what was found in its places, and fresh blocks in the others."""
        table, num_stripes = BlockTable(), self.groups[index].num_stripes
        places, found = demand.places[index], demand.hit.groups[index].device
        if demand.takes_point and index in demand.hit.point:
            found = {**found, self._place_of_point(index, demand.hit): demand.hit.point[index]}
        table.first, table.end = places.start, places.stop
        if not found:
            table.block_ids += islice(fresh, len(places) * num_stripes)
        else:
            for place in places:
                table.block_ids += found.get(place) or islice(fresh, num_stripes)
        return table

    def _place_of_point(self, index: int, hit: PrefixHit) -> int:
        """Place of a table that the blocks of a restore point are for."""
        return 0 if self.groups[index].is_fixed else hit.num_tokens // self.block_size

    def _copies_within(self, seq: Sequence, demand: BlockDemand) -> list[BlockCopy]:
        """Copies of the restore point that was found to the sequence's own blocks."""
        copies: list[BlockCopy] = []
        if not demand.takes_point:
            for index, row in demand.hit.point.items():
                place, num_stripes = self._place_of_point(index, demand.hit), self.groups[index].num_stripes
                copies += map(BlockCopy, row, seq.tables[index].row(place, num_stripes))
        return copies

    def _copies_from_host(self, seq: Sequence, hit: PrefixHit) -> list[BlockCopy]:
        """Copies of what was found on the host to the places of the tables."""
        copies: list[BlockCopy] = []
        for group, table, found in zip(self.groups, seq.tables, hit.groups, strict=True):
            for place, row in found.host.items():
                copies += map(BlockCopy, row, table.row(place, group.num_stripes))
        return copies

    def num_missing(self, seq: Sequence, *, num_lookahead: int = 0) -> int:
        """Number of blocks that `append` would take."""
        return sum(self._missing(seq, num_lookahead))

    def append(self, seq: Sequence, *, num_lookahead: int = 0) -> GroupBlocks | None:
        """Give blocks to the tokens that have none yet; None, and nothing changed, if too few are free.

        `num_lookahead` more tokens may be written behind the known ones. Empty if none were missing.
        """
        missing = self._missing(seq, num_lookahead)
        num_missing = sum(missing)
        if num_missing > self.pool.num_free:
            return None
        if not num_missing:
            return ()
        fresh, added, taken = self._take(num_missing), [], 0
        for num, group, table in zip(missing, self.groups, seq.tables, strict=True):
            blocks = tuple(fresh[taken : taken + num])
            table.block_ids += blocks
            table.end += num // group.num_stripes
            added.append(blocks)
            taken += num
        self._note_slots(seq)
        return tuple(added)

    def _missing(self, seq: Sequence, num_lookahead: int) -> list[int]:
        """Blocks of each group that the table of `seq` lacks."""
        num_tokens, start = seq.num_tokens + num_lookahead, seq.num_computed_tokens
        missing = []
        for group, table in zip(self.groups, seq.tables, strict=True):
            end = group.end(num_tokens, start)
            missing.append((end - table.end) * group.num_stripes if end > table.end else 0)
        return missing

    def append_blocks(self, seqs: list[Sequence]) -> dict[SequenceId, GroupBlocks]:
        """Give one block to each in turn, of the only group; as many must be missing, and free."""
        grown: dict[SequenceId, GroupBlocks] = {}
        for seq, block in zip(seqs, self._take(len(seqs)), strict=True):
            seq.tables[0].block_ids.append(block)
            seq.tables[0].end += 1
            seq.num_slots += self.block_size
            grown[seq.sequence_id] = ((block,),)
        return grown

    def pass_blocks(self, seq: Sequence) -> None:
        """Give up blocks that a window has passed, now that the next share of `seq` is planned.

        The worker need not know: it does not read that part of the table. They are reused before blocks of
        others that can be found, and can be found themselves until then.
        """
        for index, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            first = group.first(seq.num_computed_tokens)
            if first > table.first:
                for places, is_kept in self._parted(seq, group, range(table.first, first)):
                    passed = table.block_ids[: len(places) * group.num_stripes]
                    del table.block_ids[: len(passed)]
                    if is_kept:
                        self.pool.release(passed, self.index.caches[index].blocks)
                        self._use_again(index, seq, places)
                    else:
                        self.pool.release_passed(passed)
                table.first = first

    def _parted(self, seq: Sequence, group: GroupPlaces, places: range) -> Iterator[tuple[list[int], bool]]:
        """Runs of places that a restore point of the sequence needs, and that none does."""
        # One place more: a prompt may part from this one before a point, and a block is found whole.
        needed = [range(group.first(each) - 1, each // self.block_size) for each in seq.points]
        for is_kept, run in groupby(places, lambda place: any([place in each for each in needed])):
            yield list(run), is_kept

    def _use_again(self, index: int, seq: Sequence, places: list[int]) -> None:
        """Let what is found at these places be reused last, also where another sequence left it."""
        for place in places:
            row = self.index.found_at(index, seq, place)
            self.pool.requeue(row, row)

    def tap(self, seq: Sequence, start: int, end: int, running: Iterable[Sequence]) -> list[StateTap]:
        """Take blocks for the states that a share [start, end) passes and that later prompts may go on from.

        As a rule that costs the prefixes that were used longest ago. None is taken that the growth of the
        `running` sequences would lack, or that the watermark sets aside for it.
        """
        taps: list[StateTap] = []
        if not self.has_state or seq.is_indivisible:
            return taps
        num_blocks = self._num_state_blocks
        every = STEADY_TOKENS // self.block_size * self.block_size  # a state is found at a block's end
        steady = range((start // every + 1) * every, end + 1, every)
        for position in sorted({*seq.points, *steady}):
            if not start < position <= end or position > len(seq.token_ids):
                continue
            if not self.index.lacks_state(seq, position):
                continue
            growth = sum([self.num_missing(each) for each in running if each.num_tokens > each.num_slots])
            if self.pool.num_free < num_blocks + max(self._watermark_blocks, growth):
                continue
            if position not in seq.points and any(
                [block in self.index.kept() for block in self.pool.next_free(num_blocks)]
            ):
                continue
            self._give_up_points(num_blocks)
            row = tuple(self._take(num_blocks))
            self._held_for_copies += row
            self.index.keep_state(seq, position, row)
            taps.append(StateTap(seq.sequence_id, position, row))
            seq.num_kept_tokens = min(position, seq.num_prompt_tokens)
        return taps

    def keep_end(self, seq: Sequence) -> None:
        """Let prompts go on behind a sequence that is about to be freed, if it has a state."""
        if self.has_state:
            self.index.keep_end(seq)
            self._give_up_points(0)

    def _give_up_points(self, num_wanted: int) -> None:
        """Let points that were used longest ago be reused next, as far as all take more than their part.

        None while there are blocks that hold nothing.
        """
        if self.pool.num_free and self.pool.next_free(1)[0] not in self.index.kept():
            return
        for row in self.index.give_up_points(self._most_point_blocks - num_wanted):
            self.pool.requeue(row, ())

    def free(self, seq: Sequence) -> None:
        """Give all blocks back. The tail is reused first: it is shared least likely.

        Before it what windows hold, all of which a hit at the end needs.
        """
        for index in self._free_order:
            table = seq.tables[index]
            self.pool.release(reversed(table.block_ids), self.index.kept_by_group[index])
            table.block_ids, table.end = [], 0
        seq.num_slots = 0
        seq.num_computed_tokens = 0

    def num_written_blocks(self, seq: Sequence) -> int:
        """Blocks that `copy_out` would copy."""
        num_tokens, pairs = seq.num_computed_tokens, zip(self.groups, seq.tables, strict=True)
        return self._count_blocks([group.end_written(num_tokens) - table.first for group, table in pairs])

    def copy_out(self, seq: Sequence) -> list[BlockCopy]:
        """Take host blocks for all that `seq` has computed and still attends.

        It keeps its blocks on the device.

        The copies are in the order in which `free` lets others have the blocks.
        """
        copies: list[BlockCopy] = []
        for index in reversed(self._free_order):
            group, table = self.groups[index], seq.tables[index]
            num_places = group.end_written(seq.num_computed_tokens) - table.first
            sources = table.block_ids[: num_places * group.num_stripes]
            table.host_ids = self.swap_space.take(len(sources))
            pairs = (rows_of(blocks, group.num_stripes) for blocks in (sources, table.host_ids))
            for source, target in zip(*pairs, strict=True):
                self.index.publish_swapped(index, source, target)
            copies += map(BlockCopy, sources, table.host_ids)
        seq.num_swapped_tokens = seq.num_computed_tokens
        kept = self.index.kept()
        reused_last = [copy for copy in reversed(copies) if copy.source in kept]
        return [copy for copy in copies if copy.source not in kept] + reused_last

    def drop_copy(self, seq: Sequence) -> None:
        """Give up the copy on the host: the sequence is back or has ended, or its copy cannot be trusted."""
        for table in seq.tables:
            if table.host_ids:
                self.swap_space.give_back(reversed(table.host_ids))
                table.host_ids = []
        seq.num_swapped_tokens = 0

    def complete_plan(self) -> list[BlockCopy]:
        """Complete a plan, once all of it is decided.

        Returns the copies of evicted prefixes that it must make.
        """
        copies = self._keep_evicted() if self._evicted else []
        self.index.complete_plan()
        if self._held_for_copies:
            self.pool.release(self._held_for_copies, self.index.kept())
            self._held_for_copies.clear()
        self.swap_space.unpin()
        return copies

    def forget_copies(self, swap_out: tuple[BlockCopy, ...]) -> None:
        """Let the content that these copies were to bring to the host not be found: the step failed."""
        for copy in swap_out:
            self.swap_space.forget(copy.target)

    def _keep_evicted(self) -> list[BlockCopy]:
        """Copies of evicted blocks to the host.

        A plan copies out before it writes, so their content is still there.

        If they are too many for a step, the ones that were used last are kept.
        """
        most = min(self._max_kept, self.swap_space.num_free)
        kept: list[EvictedRow] = []
        for evicted in reversed(self._evicted):
            most -= len(evicted.row)
            if most < 0:
                break
            kept.append(evicted)
        copies: list[BlockCopy] = []
        for evicted in reversed(kept):
            target = self.swap_space.keep(evicted.group, evicted.key, len(evicted.row))
            copies += map(BlockCopy, evicted.row, target)
        self._evicted.clear()
        self.num_kept_blocks += len(copies)
        return copies

    def _hold_for_copy(self, row: Row) -> None:
        """Keep blocks from being reused in this plan."""
        for block in row:
            self.pool.share(block)
        self._held_for_copies += row

    def _count_blocks(self, num_places: Iterable[int]) -> int:
        """Number of blocks that some places of each group take."""
        return sum([num * group.num_stripes for num, group in zip(num_places, self.groups, strict=True)])

    def _note_slots(self, seq: Sequence) -> None:
        """Count the positions that have a place in each group; a state has none for them."""
        ends = [seq.tables[index].end for index in self._paged]
        seq.num_slots = min(ends) * self.block_size if ends else maxsize

    def _take(self, num_blocks: int) -> list[BlockId]:
        taken = self.pool.take(num_blocks)
        self._reuse(taken)
        return taken

    def _reuse(self, blocks: list[BlockId] | Row) -> None:
        evicted = self.index.reuse_all(blocks)
        if evicted and self.index.keeps_on_host:
            self._evicted += evicted
