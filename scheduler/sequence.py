"""Sequence: one stream of tokens and its state.

Never: decides anything. Only the scheduler and its parts write to it.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import chain

from scheduler.input_messages import EncoderInput, Payload
from scheduler.messages import (
    NO_INPUTS,
    BlockId,
    FinishReason,
    NewSequence,
    NewTable,
    PoolingParams,
    PromptComputation,
    SamplingParams,
    SequenceId,
    SequenceInputs,
    SequenceStart,
    ServiceTerms,
    TimeLimits,
)
from scheduler.policy import Rank


class Status(StrEnum):
    """State of a sequence: waiting, without or with a copy of its KV on the host, running, or finished."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


_MAY_BECOME = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},  # admit; abort, reject
    Status.SWAPPED: {Status.RUNNING, Status.WAITING, Status.FINISHED},  # swap in; copy lost; abort
    Status.RUNNING: {Status.WAITING, Status.SWAPPED, Status.FINISHED},  # preempt; stop, abort, fail
    Status.FINISHED: frozenset[Status](),
}

_DEFAULT_TERMS = ServiceTerms()

_LEAST_COMPILE_S = 0.001
"""Time that a small grammar takes in the worker; the least that any grammar counts."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks of a sequence for one group of layers, without those that were passed.

    The blocks of a place lie together: that of stripe s of place p is at (p - first) * num_stripes + s.
    """

    first: int = 0  # place of the first block; still that of `host_ids` while it is swapped out
    end: int = 0  # place behind the last
    block_ids: list[BlockId] = field(default_factory=list)
    host_ids: list[BlockId] = field(default_factory=list)  # while it is swapped out

    def row(self, place: int, num_stripes: int) -> tuple[BlockId, ...]:
        """Blocks of a place."""
        start = (place - self.first) * num_stripes
        return tuple(self.block_ids[start : start + num_stripes])

    def rows(self, start: int, end: int, num_stripes: int) -> list[tuple[BlockId, ...]]:
        """Rows of the places [start, end), of which `start` is not passed."""
        if num_stripes == 1:
            return [(block,) for block in self.block_ids[start - self.first : max(end - self.first, 0)]]
        return [self.row(place, num_stripes) for place in range(start, end)]


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One stream of tokens. It has no prefill or decode phase: `num_computed_tokens` runs after `num_tokens`.

    A new prompt is far behind, a decoding sequence is one token behind, a preempted one starts over,
    a prefix-cache hit starts further ahead. Both count the tokens of plans in flight as done:

        token_ids   [ prompt .............. | generated ... ]        known
        num_tokens   ------------------------------------------->    and tokens that are being sampled
        num_computed_tokens  ------------------------------->        and tokens that are being computed
    """

    sequence_id: SequenceId
    prompt_token_ids: InitVar[tuple[int, ...]]
    params: SamplingParams
    terms: InitVar[ServiceTerms] = _DEFAULT_TERMS
    _: KW_ONLY
    inputs: InitVar[SequenceInputs] = NO_INPUTS
    client_index: int = 0

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # known or being sampled, as far as they will be computed
    max_length: int = 0  # set by the scheduler; a token that reaches it is not computed any more
    pooling: PoolingParams | None = field(init=False)
    adapter: str = field(init=False)
    encoder_inputs: tuple[EncoderInput, ...] = field(init=False)
    payloads: tuple[Payload, ...] = field(init=False)
    prediction: tuple[int, ...] = field(init=False)
    restore_at: tuple[int, ...] = field(init=False)
    prompt_computation: PromptComputation = field(init=False)
    is_indivisible: bool = field(init=False)  # all in one step
    priority: int = field(init=False)
    tenant: str = field(init=False)
    cache_salt: str = field(init=False)
    time_limits: TimeLimits = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    admission: int = 0
    admitted_s: float = 0.0
    rank: Rank = ()
    running_rank: Rank = ()
    turn: int = 0  # changes whenever it begins or ceases to wait: entries of another turn are dead
    num_preemptions: int = 0
    num_reached_tokens: int = 0  # computed before it was preempted: from here on no token is recomputed
    num_bypasses: int = 0  # later sequences that were admitted while this one was first in the queue
    protected_until: int = 0  # number of tokens below which it cannot be displaced again
    pending_start: SequenceStart | None = None  # for the first output
    is_compiled: bool = False  # the worker has compiled its grammar for the next admission

    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_kept_tokens: int = 0  # of the prompt, that later ones find
    num_lost_tokens: int = 0  # not found, for want of something of this group:
    lost_to: str = ""
    num_reported_positions: int = field(init=False)  # of which the client has logprobs
    tables: list[BlockTable] = field(default_factory=list)  # of each group of layers, once it was admitted
    points: tuple[int, ...] = ()  # positions behind which later prompts may go on
    num_slots: int = 0  # positions that have a place in each
    num_swapped_tokens: int = 0  # computed tokens whose KV is on the host, while it is swapped out
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks, as far as they were needed
    tail_key: bytes | None = None  # of the prompt's tail; empty: none that others could have

    def __post_init__(
        self, prompt_token_ids: tuple[int, ...], terms: ServiceTerms, inputs: SequenceInputs
    ) -> None:
        self.token_ids = [*prompt_token_ids, *inputs.generated]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.pooling, self.adapter = inputs.pooling, inputs.adapter
        self.encoder_inputs, self.payloads = inputs.encoder_inputs, inputs.payloads
        self.prediction, self.restore_at = inputs.prediction, inputs.restore_at
        self.num_reported_positions = inputs.num_reported_positions
        self.prompt_computation = _prompt_computation(self.params, inputs)
        self.is_indivisible = self.prompt_computation is PromptComputation.AT_ONCE
        self.priority, self.tenant, self.cache_salt = terms.priority, terms.tenant, terms.cache_salt
        self.time_limits = terms.time_limits

    def held_blocks(self) -> Iterator[BlockId]:
        """Blocks of all its tables."""
        return chain.from_iterable([table.block_ids for table in self.tables])

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        return sum([len(table.block_ids) for table in self.tables])

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its prompt may come from the prefix cache.

        Not while log-probabilities, or hidden states, of each position are still to be reported.
        """
        if self.prompt_computation is PromptComputation.REUSING:
            return True
        return self.pooling is None and self.num_reported_positions >= self.num_prompt_tokens - 1

    @property
    def has_grammar(self) -> bool:
        """Whether the worker compiles a grammar, each time it is given the sequence."""
        return self.params.grammar is not None

    @property
    def compile_s(self) -> float:
        """Time that compiling its grammar takes; 0 without one."""
        grammar = self.params.grammar
        return 0.0 if grammar is None else max(grammar.cost_s, _LEAST_COMPILE_S)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_protected(self) -> bool:
        """Whether it was preempted, and has not made enough progress since to be preempted again."""
        return self.num_preemptions > 0 and self.num_tokens < self.protected_until

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute.

        1 for a decode, 0 while a token that is being sampled decides how it goes on.
        """
        return self.num_tokens - self.num_computed_tokens

    def become(self, status: Status) -> None:
        """Change the state. Raises AssertionError on a transition that the table does not allow."""
        assert status in _MAY_BECOME[self.status], f"sequence {self.sequence_id}: {self.status} -> {status}"
        self.status = status

    def inputs_within(self, start: int, end: int) -> bytes:
        """Names of the encoder inputs at the positions [start, end); empty if they are all tokens."""
        if not self.encoder_inputs:
            return b""
        names = [
            f"{item.offset - start} {item.num_tokens} {sha256(item.content.encode()).hexdigest()}"
            for item in self.encoder_inputs
            if item.offset < end and item.end > start
        ]
        return " ".join(names).encode()

    def take_start(self) -> SequenceStart | None:
        """Facts for its first output; None for all later ones."""
        start, self.pending_start = self.pending_start, None
        return start and start._replace(num_kept_tokens=self.num_kept_tokens)

    def take_tokens(self, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Add tokens to those that are known, up to the one that ends the sequence."""
        known, stop_token_ids = self.token_ids, self.params.stop_token_ids
        for token_id in token_ids:
            known.append(token_id)
            if token_id in stop_token_ids and self._is_stop(token_id):
                return FinishReason.STOP
            if len(known) >= self.max_length:
                return FinishReason.LENGTH
        return None

    def _is_stop(self, token_id: int) -> bool:
        """Whether a stop token ends the sequence: the caller's own are meant for the answer."""
        answer = self.params.answer
        if answer is None or token_id not in answer.stop_token_ids:
            return True
        generated, begin = self.token_ids[self.num_prompt_tokens :], answer.begin_token_ids
        may_think = not answer.begin or (bool(begin) and tuple(generated[: len(begin)]) == begin)
        return not may_think or answer.token_ids[0] in generated[:-1]

    def expect_token(self) -> None:
        """Count the token that a plan samples, which will have to be computed unless it is the last."""
        if self.num_tokens + 1 < self.max_length:
            self.num_tokens += 1

    def as_new(self) -> NewSequence:
        """Message for a worker that has no row for the sequence. All its tokens must be known."""
        return NewSequence(
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            tables=tuple([NewTable(tuple(table.block_ids), table.first) for table in self.tables]),
            pooling=self.pooling,
            adapter=self.adapter,
            prediction=self.prediction,
            scope=(self.tenant, self.cache_salt),
            encoder_inputs=self.encoder_inputs,
            payloads=self.payloads,
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.status.value}, rank={self.rank}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, {self.num_blocks} blocks)"
        )


def _prompt_computation(params: SamplingParams, inputs: SequenceInputs) -> PromptComputation:
    if inputs.pooling is not None:
        return inputs.pooling.prompt
    if params.num_prompt_logprobs is not None:
        return PromptComputation.EVERY_POSITION
    return PromptComputation.REUSING
