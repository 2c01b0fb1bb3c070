"""Plans written by hand: a scheduler without any policy, so that a test says exactly what a step computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.cache_groups import CacheGroup, LifetimeKind, num_tables
from scheduler.messages import (
    BlockCopy,
    BlockId,
    GroupBlocks,
    ModelRunnerOutput,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    StateTap,
)
from worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0)


def groups_of(worker: Worker) -> tuple[CacheGroup, ...]:
    """Groups of layers of the worker's model."""
    rows = getattr(getattr(worker, "_steps", None), "rows", None)
    return getattr(worker, "groups", (CacheGroup(),)) if rows is None else rows._groups


@dataclass
class _Sequence:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    adapter: str = ""
    num_computed: int = 0
    block_ids: list[BlockId] = field(default_factory=list)
    state_blocks: list[BlockId] = field(default_factory=list)
    host_block_ids: list[BlockId] = field(default_factory=list)
    points: dict[int, list[BlockId]] = field(default_factory=dict)
    """Blocks of its states at ends of blocks, by position."""
    is_new: bool = True


class PlanDriver:
    """Keeps the books of a few sequences over one worker.

    Every block is used once, but those of a sequence that was swapped out: they go to whoever asks next.
    Without taps no states are kept for sequences that share, and steps with prompts are not cut.
    """

    def __init__(self, worker: Worker, block_size: int, *, has_taps: bool = True) -> None:
        self._has_taps = has_taps
        self._worker = worker
        self._groups = groups_of(worker)
        self._block_size = block_size
        fixed = [group for group in self._groups if group.lifetime.kind is LifetimeKind.FIXED]
        self._num_state_blocks = sum(group.num_stripes for group in fixed)
        self._next_block = 1
        self._next_host_block = 1
        self._vacated: list[BlockId] = []
        self._swap_out: list[BlockCopy] = []
        self._copies: list[BlockCopy] = []
        self._step = 0
        self._released: list[SequenceId] = []
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._next_id = 0

    def add(
        self,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        *,
        shares_with: int | None = None,
        adapter: str = "",
    ) -> int:
        """Take in a prompt. With `shares_with`, its first blocks are those of that sequence.

        With states, it goes on from a copy of one: a step keeps those at the last end of a block in a share.
        """
        sequence_id = self._next_id
        self._next_id += 1
        sequence = _Sequence(list(prompt), len(prompt), params, adapter)
        self._grow(sequence, 0 if shares_with is not None else len(prompt))
        if shares_with is not None:
            owner = self._sequences[SequenceId(shares_with)]
            same = [a == b for a, b in zip(prompt, owner.token_ids, strict=False)]
            num_same = same.index(False) if False in same else len(same)
            num_shared = min(num_same, len(prompt) - 1) // self._block_size
            if self._num_state_blocks:
                known = [each // self._block_size for each in owner.points]
                num_shared = max([each for each in known if each <= num_shared], default=0)
                kept = owner.points.get(num_shared * self._block_size, [])
                self._copies += map(BlockCopy, kept, self._states_of(sequence))
            sequence.block_ids = owner.block_ids[: num_shared * num_tables(self._groups)]
            sequence.num_computed = num_shared * self._block_size
            assert num_shared > 0, "nothing to share: the test would show nothing"
        self._sequences[SequenceId(sequence_id)] = sequence
        return sequence_id

    def preempt(self, sequence_id: int) -> None:
        """Forget what was computed; the sequence comes back whole with its next share."""
        sequence = self._sequences[SequenceId(sequence_id)]
        sequence.num_computed, sequence.block_ids, sequence.is_new = 0, [], True
        sequence.state_blocks = []
        self._released.append(SequenceId(sequence_id))

    def swap_out(self, sequence_id: int) -> None:
        """Let it wait in the host's pool from the next plan on; it comes back with its next share."""
        sequence = self._sequences[SequenceId(sequence_id)]
        num_filled = -(-sequence.num_computed // self._block_size) * num_tables(self._groups)
        for source in sequence.block_ids[:num_filled] + sequence.state_blocks:
            target = BlockId(self._next_host_block)
            self._next_host_block += 1
            sequence.host_block_ids.append(target)
            self._swap_out.append(BlockCopy(source, target))
        left = sequence.block_ids + sequence.state_blocks
        sequence.block_ids, sequence.state_blocks, sequence.is_new = [], [], True
        shared = {block for each in self._sequences.values() for block in each.block_ids}
        self._vacated += [block for block in left if block not in shared]
        self._released.append(SequenceId(sequence_id))

    def step(self, shares: dict[int, int | None]) -> ModelRunnerOutput:
        """Compute so many more tokens of each sequence; None computes all that are known."""
        new_sequences, new_blocks, scheduled, swap_in = [], {}, [], []
        taps: list[StateTap] = []
        for key, asked in shares.items():
            sequence_id, sequence = SequenceId(key), self._sequences[SequenceId(key)]
            known = len(sequence.token_ids)
            num_tokens = known - sequence.num_computed if asked is None else asked
            end = sequence.num_computed + num_tokens
            swap_in += self._return(sequence)
            grown = self._grow(sequence, end)
            if sequence.is_new:
                new_sequences.append(
                    NewSequence(
                        sequence_id=sequence_id,
                        token_ids=tuple(sequence.token_ids),
                        num_prompt_tokens=sequence.num_prompt_tokens,
                        params=sequence.params,
                        tables=self._tables(sequence),
                        adapter=sequence.adapter,
                    )
                )
            elif grown:
                new_blocks[sequence_id] = self._by_group(grown)
            sequence.is_new = False
            scheduled.append(ScheduledSequence(sequence_id, sequence.num_computed, num_tokens, end == known))
            position = end // self._block_size * self._block_size
            is_kept = num_tokens > 1 and sequence.num_computed < position <= sequence.num_prompt_tokens
            if self._has_taps and self._num_state_blocks and is_kept and position not in sequence.points:
                sequence.points[position] = [self._next_free() for _ in range(self._num_state_blocks)]
                taps.append(StateTap(sequence_id, position, tuple(sequence.points[position])))
            sequence.num_computed = end
        plan = self._plan(tuple(new_sequences), new_blocks, tuple(scheduled))
        output = self._worker.execute(plan._replace(swap_in=tuple(swap_in), taps=tuple(taps)))
        for sequence_id, token_ids in output.token_ids.items():
            self._sequences[sequence_id].token_ids += token_ids
        return output

    def generate(self, sequence_ids: list[int], num_tokens: int) -> None:
        """Step all of them together until each has so many tokens beyond its prompt."""
        while waiting := [each for each in sequence_ids if len(self.generated(each)) < num_tokens]:
            output = self.step({each: None for each in waiting})
            assert not output.failures

    def generated(self, sequence_id: int) -> list[int]:
        sequence = self._sequences[SequenceId(sequence_id)]
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def blocks(self, sequence_id: int) -> list[BlockId]:
        return list(self._sequences[SequenceId(sequence_id)].block_ids)

    def release_all(self) -> None:
        """Free every row, with a plan that computes nothing."""
        self._released += self._sequences
        self._worker.execute(self._plan((), {}, ()))
        self._sequences.clear()

    def restart_blocks(self) -> None:
        """Hand out blocks from the first one again: what follows finds what earlier owners left in them."""
        self._next_block = 1

    def _return(self, sequence: _Sequence) -> list[BlockCopy]:
        sources, sequence.host_block_ids = sequence.host_block_ids, []
        if not sources:
            return []
        num_places = (len(sources) - self._num_state_blocks) // max(num_tables(self._groups), 1)
        self._grow(sequence, num_places * self._block_size)
        targets = sequence.block_ids + self._states_of(sequence)
        return [BlockCopy(*copy) for copy in zip(sources, targets, strict=True)]

    def _tables(self, sequence: _Sequence) -> tuple[NewTable, ...]:
        tables = tuple(map(NewTable, self._by_group(sequence.block_ids)))
        states = NewTable(tuple(self._states_of(sequence)))
        return (*tables[:-1], states) if self._num_state_blocks else tables

    def _states_of(self, sequence: _Sequence) -> list[BlockId]:
        """Take the blocks of a sequence's state, unless it has them."""
        while len(sequence.state_blocks) < self._num_state_blocks:
            sequence.state_blocks.append(self._next_free())
        return sequence.state_blocks

    def _grow(self, sequence: _Sequence, num_tokens: int) -> tuple[BlockId, ...]:
        num_places = -(-num_tokens // self._block_size)
        missing = num_places * num_tables(self._groups) - len(sequence.block_ids)
        grown = tuple(self._next_free() for _ in range(missing))
        sequence.block_ids += grown
        return grown

    def _by_group(self, block_ids: Sequence[BlockId]) -> GroupBlocks:
        """Blocks of places, of which those of all groups lie together, for each group."""
        per_place, parts, end = num_tables(self._groups), [], 0
        for group in self._groups:
            start, end = end, end + group.num_stripes
            parts.append(tuple(block for at, block in enumerate(block_ids) if start <= at % per_place < end))
        return tuple(parts)

    def _next_free(self) -> BlockId:
        if self._vacated:
            return self._vacated.pop()
        self._next_block += 1
        return BlockId(self._next_block - 1)

    def _plan(
        self,
        new_sequences: tuple[NewSequence, ...],
        new_blocks: dict[SequenceId, GroupBlocks],
        scheduled: tuple[ScheduledSequence, ...],
    ) -> SchedulerOutput:
        self._step += 1
        released, self._released = tuple(self._released), []
        swap_out, self._swap_out = tuple(self._swap_out), []
        copies, self._copies = tuple(self._copies), []
        return SchedulerOutput(
            step=self._step,
            released=released,
            new_sequences=new_sequences,
            new_blocks=new_blocks,
            scheduled=scheduled,
            num_scheduled_tokens=sum(share.num_tokens for share in scheduled),
            swap_out=swap_out,
            copies=copies,
        )
