"""Stand-ins that behave: a worker without a model that still notices every misplaced block."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from scheduler.cache_groups import CacheGroup, LifetimeKind
from scheduler.input_messages import EncoderInput
from scheduler.messages import (
    BlockId,
    Encoded,
    ModelRunnerOutput,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    SequenceInputs,
    ServiceTerms,
    StateTap,
    TokenLogprobs,
)
from scheduler.sequence import Sequence
from worker.worker_errors import StepOutOfMemory

FAKE_VOCAB = 97


def next_token(token_ids: list[int]) -> int:
    """The fake model: any token anywhere in the prefix changes what comes next."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % 1_000_003
    return state % FAKE_VOCAB


def continuation(prompt: list[int], num_tokens: int) -> list[int]:
    """Tokens that the fake model generates for a prompt that is alone in the world."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def pooled(prompt: list[int]) -> bytes:
    """Result of the fake model for a prompt of which no token is generated."""
    return f"pooled {next_token(prompt)}".encode()


def prompt_logprobs(prompt: list[int]) -> list[TokenLogprobs]:
    """One for each token but the first, told apart by its position."""
    return [TokenLogprobs(token, -float(place), 1, ()) for place, token in enumerate(prompt) if place]


class WorkerExploded(Exception):
    """Injected."""


class OutOfMemory(Enum):
    """When a step that is launched finds too little memory."""

    BEFORE_ANYTHING = "before it has done anything"
    AFTER_RELEASE = "after it has freed rows, and nothing else"
    AT_THE_END = "after it has computed everything, when its result is asked for"


class FakeStep:
    """Result of a plan, handed out when it is asked for."""

    def __init__(self, worker: "FakeWorker", outcome: ModelRunnerOutput | Exception) -> None:
        self._worker, self._outcome = worker, outcome

    def result(self) -> ModelRunnerOutput:
        if isinstance(self._outcome, Exception):
            self._worker.num_untold_failures -= 1
            self._worker.is_in_doubt = self._worker.num_untold_failures > 0
            raise self._outcome
        return self._outcome


@dataclass
class _Row:
    new: NewSequence
    inputs: tuple[EncoderInput, ...]
    token_ids: list[int]
    tables: list[dict[int, tuple[BlockId, ...]]]
    """Blocks of each place that was ever given, for each group."""


@dataclass
class _Result:
    """The fields of ModelRunnerOutput, while they fill."""

    token_ids: dict[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    failures: dict[SequenceId, str] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    encoded: Encoded | None = None
    pooled: dict[SequenceId, bytes] = field(default_factory=dict)


Slot = tuple[object, ...]
"""Contents of a slot: of which group and stripe, a token, its position, and with which adapter and input it
was computed. The first slot of a block of a state holds all tokens that it stands for."""


@dataclass
class FakeWorker:
    """Obeys plans as the real worker does, over a cache whose slots hold (token, position).

    Before a token attends, every slot before it must hold the token that belongs there: a block that was
    freed too early, shared wrongly or never computed is found at once.
    """

    block_size: int
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    encoder_cache_tokens: int = 0
    slots: dict[tuple[BlockId, int], Slot] = field(default_factory=dict)
    host_slots: dict[tuple[BlockId, int], Slot | None] = field(default_factory=dict)
    rows: dict[SequenceId, _Row] = field(default_factory=dict)
    plans: list[SchedulerOutput] = field(default_factory=list)
    explode_next: bool = False
    poisoned: set[SequenceId] = field(default_factory=set)
    """Sequences that fail alone when they next sample."""
    silent: set[SequenceId] = field(default_factory=set)
    """Sequences for which the worker forgets to answer."""
    inputs: dict[SequenceId, tuple[EncoderInput, ...]] = field(default_factory=dict)
    """Encoder outputs to make, by sequence: the test says it, plans only name what is due."""
    encoded: dict[SequenceId, list[EncoderInput]] = field(default_factory=dict)
    most_encoded: int = 99
    """Inputs that a plan has time to encode."""
    takes_s: Callable[[float], float] = float
    """Time that encoding takes of a slice."""
    encodes_every: int = 1
    """Plans of which one has that time."""
    broken: set[str] = field(default_factory=set)
    """Contents that cannot be encoded."""
    lost: set[SequenceId] = field(default_factory=set)
    """Sequences that cannot go on: a plan that was to compute for them failed, and later plans were made
    before that was known."""
    is_in_doubt: bool = False
    """A plan failed, and the scheduler does not know yet."""
    num_untold_failures: int = 0
    out_of_memory: OutOfMemory | None = None
    """Fault of the next plan that is launched."""
    most_tokens: int | None = None
    """There is memory for no more in one plan."""

    def launch(self, plan: SchedulerOutput) -> FakeStep:
        """Launch as on a device that carries plans out by itself: a fault is seen when the result is due."""
        memory, self.out_of_memory = self.out_of_memory, None
        if self.most_tokens is not None and plan.num_scheduled_tokens > self.most_tokens:
            memory = OutOfMemory.AFTER_RELEASE
        if memory is OutOfMemory.BEFORE_ANYTHING:
            self.plans.append(plan)
            raise StepOutOfMemory
        if memory is OutOfMemory.AFTER_RELEASE:
            self.explode_next = True
        outcome: ModelRunnerOutput | Exception
        try:
            outcome = self.execute(plan)
        except WorkerExploded as error:
            outcome = error
        if memory is not None:
            self.lost.update(share.sequence_id for share in plan.scheduled)
            outcome = StepOutOfMemory()
        if isinstance(outcome, Exception):
            self.is_in_doubt = True
            self.num_untold_failures += 1
        return FakeStep(self, outcome)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.plans.append(plan)
        for sequence_id in plan.released:
            self.rows.pop(sequence_id, None)
            self.encoded.pop(sequence_id, None)
            self.lost.discard(sequence_id)
        if self.explode_next:
            self.explode_next = False
            for share in plan.scheduled:
                self.lost.add(share.sequence_id)
                self.encoded.pop(share.sequence_id, None)
            raise WorkerExploded
        _check_order_is_free(plan)
        self._copy(plan)
        for new in plan.new_sequences:
            self._add_row(new)
        for sequence_id, blocks in plan.new_blocks.items():
            if sequence_id not in self.lost:
                self._extend(self.rows[sequence_id], blocks)
        shares = [share for share in plan.scheduled if share.sequence_id not in self.lost]
        for share in shares:
            self.rows[share.sequence_id].token_ids += plan.draft_token_ids.get(share.sequence_id, ())
            self._write(self.rows[share.sequence_id], share.start, share.num_tokens)
        result = _Result(failures={s.sequence_id: "lost" for s in plan.scheduled if s not in shares})
        for share in shares:
            taps = [tap for tap in plan.taps if tap.sequence_id == share.sequence_id]
            self._compute(share, plan.draft_token_ids.get(share.sequence_id, ()), taps, result)
            self._check_room(share.sequence_id, plan.num_drafts_wanted.get(share.sequence_id, 0))
        self._encode(plan, result)
        return ModelRunnerOutput(**vars(result), logprobs={})

    def _compute(
        self,
        share: ScheduledSequence,
        drafts: tuple[int, ...],
        taps: list[StateTap],
        result: "_Result",
    ) -> None:
        row = self.rows[share.sequence_id]
        end = share.start + share.num_tokens
        self._check_prefix(row, share.start, end)
        self._move_states(row, share.start, end, len(drafts))
        for tap in taps:
            assert share.start < tap.position <= end, "a state is kept that the step does not compute"
            self._write_states(row, tap.block_ids, tap.position)
        self._forget_encoded(share.sequence_id, end)
        assert share.samples == (end == len(row.token_ids)), "samples exactly at the end of what is known"
        if row.new.params.num_prompt_logprobs is not None:
            known = prompt_logprobs(row.token_ids[: row.new.num_prompt_tokens])
            result.prompt_logprobs[share.sequence_id] = tuple(known[share.start : end])
        if not share.samples:
            return
        if share.sequence_id in self.silent:
            self.lost.add(share.sequence_id)
        elif share.sequence_id in self.poisoned:
            self.lost.add(share.sequence_id)
            result.failures[share.sequence_id] = "poisoned"
        elif row.new.pooling is not None:
            result.pooled[share.sequence_id] = pooled(row.token_ids)
        else:
            num_known = len(row.token_ids) - len(drafts)
            row.token_ids = _verified(row.token_ids[:num_known], drafts)
            result.token_ids[share.sequence_id] = tuple(row.token_ids[num_known:])

    def _check_room(self, sequence_id: SequenceId, num_drafts: int) -> None:
        """Check that a draft model has slots for the last token and for the drafts behind it."""
        row = self.rows[sequence_id]
        ends = [max(row.tables[group], default=-1) + 1 for group in self._groups_of_tokens()]
        num_slots = min(ends, default=len(row.token_ids) + num_drafts) * self.block_size
        assert not num_drafts or len(row.token_ids) + num_drafts <= num_slots

    def _encode(self, plan: SchedulerOutput, result: "_Result") -> None:
        done: dict[SequenceId, tuple[int, ...]] = {}
        has_time = plan.encoder_slice_s and len(self.plans) % self.encodes_every == 0
        num_left = self.most_encoded if has_time else 0
        for sequence_id, inputs in plan.encoder_inputs.items():
            encoded = self.encoded.setdefault(sequence_id, [])
            for item in inputs if sequence_id in self.rows and sequence_id not in self.lost else ():
                if item.content in self.broken:
                    result.failures[sequence_id] = "a broken input"
                    self.lost.add(sequence_id)
                    break
                if item not in encoded and num_left:
                    encoded.append(item)
                    num_left -= 1
                if item in encoded:
                    done[sequence_id] = (*done.get(sequence_id, ()), item.offset)
        result.encoded = Encoded(done, seconds=self.takes_s(plan.encoder_slice_s))
        num_tokens = sum(item.num_tokens for items in self.encoded.values() for item in items)
        assert num_tokens <= self.encoder_cache_tokens, "the encoder cache overflows"

    def _forget_encoded(self, sequence_id: SequenceId, end: int) -> None:
        if sequence_id in self.encoded:
            kept = [item for item in self.encoded[sequence_id] if item.end > end]
            self.encoded[sequence_id] = kept

    def _copy(self, plan: SchedulerOutput) -> None:
        for source, target in plan.swap_out:
            for offset in range(self.block_size):
                self.host_slots[target, offset] = self.slots.get((source, offset))
        for source, target in plan.swap_in:
            for offset in range(self.block_size):
                held = self.host_slots.get((source, offset))
                self.slots.pop((target, offset), None)
                if held is not None:
                    self.slots[target, offset] = held
        for source, target in plan.copies:
            for offset in range(self.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def _add_row(self, new: NewSequence) -> None:
        assert new.sequence_id not in self.rows, "the row was never released"
        if self.is_in_doubt:
            self.lost.add(new.sequence_id)
        inputs = self.inputs.get(new.sequence_id, ())
        row = _Row(new, inputs, list(new.token_ids), [{} for _ in self.groups])
        self.rows[new.sequence_id] = row
        for group, table, held in zip(self.groups, new.tables, row.tables, strict=True):
            held.update(enumerate(_rows(table.block_ids, group.num_stripes), start=table.first))

    def _extend(self, row: _Row, blocks: tuple[tuple[BlockId, ...], ...]) -> None:
        for group, more, held in zip(self.groups, blocks, row.tables, strict=True):
            held.update(enumerate(_rows(more, group.num_stripes), start=max(held, default=-1) + 1))

    def _write(self, row: _Row, start: int, num_tokens: int) -> None:
        due = [item for item in row.inputs if item.offset < start + num_tokens and item.end > start]
        encoded = self.encoded.get(row.new.sequence_id, [])
        assert all(item in encoded for item in due), "an input is computed that was not encoded"
        for position in range(start, start + num_tokens):
            content = _content(row, position)
            for group in self._groups_of_tokens():
                for stripe, slot in enumerate(self._slots(row, group, position)):
                    self.slots[slot] = group, stripe, content

    def _check_prefix(self, row: _Row, start: int, end: int) -> None:
        contents = _contents(row, end)
        for group in self._groups_of_tokens():
            for position in range(self.groups[group].lifetime.first_read(start), end):
                for stripe, slot in enumerate(self._slots(row, group, position)):
                    held = self.slots.get(slot)
                    assert held == (group, stripe, contents[position]), f"{position} holds {held}"

    def _move_states(self, row: _Row, start: int, end: int, num_drafts: int) -> None:
        """From `start`, where it must stand, to `end`; with drafts to the last of them that holds."""
        if num_drafts:
            known = row.token_ids[: len(row.token_ids) - num_drafts]
            end = len(_verified(known, tuple(row.token_ids[len(known) :]))) - 1
        for group, table in enumerate(row.tables):
            if self.groups[group].lifetime.kind is LifetimeKind.FIXED:
                contents = _contents(row, start)
                for stripe, block in enumerate(table[0]):
                    held = self.slots.get((block, 0))
                    assert not start or held == (stripe, contents), f"a state of {held}"
                self._write_states(row, table[0], end)

    def _write_states(self, row: _Row, blocks: tuple[BlockId, ...], end: int) -> None:
        contents = _contents(row, end)
        for stripe, block in enumerate(blocks):
            self.slots[block, 0] = stripe, contents

    def _groups_of_tokens(self) -> list[int]:
        fixed = LifetimeKind.FIXED
        return [index for index, group in enumerate(self.groups) if group.lifetime.kind is not fixed]

    def _slots(self, row: _Row, group: int, position: int) -> list[tuple[BlockId, int]]:
        blocks = row.tables[group].get(position // self.block_size)
        assert blocks, f"position {position} is read or written, but group {group} has no block for it"
        return [(block, position % self.block_size) for block in blocks]


def _rows(blocks: tuple[BlockId, ...], num_stripes: int) -> list[tuple[BlockId, ...]]:
    assert len(blocks) % num_stripes == 0, "a place has a block for each stripe"
    return [blocks[start : start + num_stripes] for start in range(0, len(blocks), num_stripes)]


def _contents(row: _Row, end: int) -> Slot:
    if row.inputs:
        return tuple([_content(row, position) for position in range(end)])
    adapter = row.new.adapter
    return tuple([(token, position, adapter, ()) for position, token in enumerate(row.token_ids[:end])])


def _content(row: _Row, position: int) -> Slot:
    input_names = tuple([item.content for item in row.inputs if item.offset <= position < item.end])
    return row.token_ids[position], position, row.new.adapter, input_names


def _verified(known: list[int], drafts: tuple[int, ...]) -> list[int]:
    """Known tokens, the drafts as far as the model agrees, and one token more."""
    token_ids = list(known)
    for draft in drafts:
        if draft != next_token(token_ids):
            break
        token_ids.append(draft)
    return [*token_ids, next_token(token_ids)]


def _check_order_is_free(plan: SchedulerOutput) -> None:
    """Copies of one kind may be made in any order, and nothing is overwritten before it was read."""
    for copies in (plan.swap_out, plan.swap_in, plan.copies):
        targets = [copy.target for copy in copies]
        assert len(targets) == len(set(targets)), "two copies to one block"
    sources = {copy.source for copy in plan.copies}
    assert sources.isdisjoint(copy.target for copy in plan.copies), "a copy reads what another one writes"
    arrived = {copy.target for copy in plan.swap_in}
    assert arrived.isdisjoint(copy.target for copy in plan.copies), "what came in is overwritten"


def make_sequence(
    sequence_id: int, prompt: list[int], *, max_tokens: int = 4, client_index: int = 0, **changes: object
) -> Sequence:
    """`changes` are fields of SamplingParams, of SequenceInputs or of ServiceTerms."""
    sampling = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__slots__}
    params = SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0} | sampling))
    inputs = {name: changes.pop(name) for name in list(changes) if name in SequenceInputs.__slots__}
    return Sequence(
        SequenceId(sequence_id),
        tuple(prompt),
        params,
        ServiceTerms(**changes),
        inputs=SequenceInputs(**inputs),
        client_index=client_index,
    )
