"""One stream of tokens and where it stands.

Owns: the tokens of a sequence, how many of them are computed, its state and which states may follow.
Never: decides anything. Only the scheduler and the KV cache manager write to it.
"""

from enum import Enum

from scheduler.messages import (
    BlockId,
    FinishReason,
    NewSequence,
    SamplingParams,
    SequenceId,
    SequenceStart,
    ServiceTerms,
)

Rank = tuple[float, ...]
"""Where a sequence stands in the one line: the smallest is served first and preempted last."""


class Status(Enum):
    """Where a sequence is: in the waiting line, without or with a copy on the host, or running."""

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


class Sequence:
    """There is no prefill and no decode phase: `num_computed_tokens` runs after `num_tokens`.

    A new prompt is far behind, a decoding sequence is one token behind, a preempted one starts over,
    a prefix-cache hit starts further ahead.
    """

    __slots__ = (
        "admission",
        "admitted_s",
        "block_ids",
        "block_keys",
        "cache_salt",
        "client_index",
        "finish_reason",
        "host_block_ids",
        "num_bypasses",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "num_swapped_tokens",
        "num_tokens",
        "params",
        "pending_start",
        "priority",
        "protected_until",
        "rank",
        "sequence_id",
        "status",
        "tenant",
        "time_limits",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: SequenceId,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        terms: ServiceTerms = _DEFAULT_TERMS,
        *,
        client_index: int = 0,
    ) -> None:
        self.sequence_id = sequence_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(
            prompt_token_ids
        )  # kept beside token_ids: read for every sequence of every step
        self.params = params
        self.priority = terms.priority
        self.tenant = terms.tenant
        self.cache_salt = terms.cache_salt
        self.time_limits = terms.time_limits
        self.client_index = client_index

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.admission = 0
        self.admitted_s = 0.0
        self.rank: Rank = ()
        self.num_preemptions = 0
        self.num_bypasses = 0  # later sequences that were admitted while this one was first in line
        self.protected_until = 0  # number of tokens below which it cannot be displaced again
        self.pending_start: SequenceStart | None = None  # to be told with the first output

        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_ids: list[BlockId] = []
        self.num_slots = 0  # len(block_ids) * block_size
        self.host_block_ids: list[BlockId] = []  # while it is swapped out
        self.num_swapped_tokens = 0  # computed tokens whose KV is in them
        self.block_keys: list[bytes] = []  # of the full blocks, as far as anybody asked

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_protected(self) -> bool:
        """It was preempted, and has not made enough progress since to be sent away again."""
        return self.num_tokens < self.protected_until

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left to catch up; 1 for a decode, 0 while its next token is being computed."""
        return self.num_tokens - self.num_computed_tokens

    def become(self, status: Status) -> None:
        """Raises AssertionError on a transition that the table does not allow."""
        assert status in _MAY_BECOME[self.status], f"sequence {self.sequence_id}: {self.status} -> {status}"
        self.status = status

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.num_tokens += 1

    def as_new(self) -> NewSequence:
        """The whole of it, for a worker that has no row for it."""
        return NewSequence(
            sequence_id=self.sequence_id,
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            block_ids=tuple(self.block_ids),
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.sequence_id}, {self.status.value}, rank={self.rank}, "
            f"computed {self.num_computed_tokens} of {self.num_tokens}, {len(self.block_ids)} blocks)"
        )
