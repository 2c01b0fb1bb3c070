"""The messages between the API process and the engine process, grouped by receiver.

Owns: the wire form, msgpack by msgspec: typed in both directions, and data only (never pickle).
"""

import msgspec

from scheduler.messages import (
    FinishReason,
    Page,
    PoolingParams,
    SamplingParams,
    SchedulerStats,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    ServiceTerms,
)
from scheduler.prefix_keys import PrefixChange
from worker.worker_config import LoadProgress, ModelFacts

# To the engine process.


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt, which becomes one sequence for each of `sequence_ids`."""

    sequence_ids: tuple[SequenceId, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Sequence i samples with seed + i."""
    terms: ServiceTerms
    pooling: PoolingParams | None = None
    """Set for a pooling request; `params` is not read then."""
    prediction: tuple[int, ...] = ()
    """Text that the client expects, as tokens."""
    request_id: str = ""
    """The HTTP request's id, for the log; empty if there is none."""
    trace_id: str = ""
    """The distributed trace that it belongs to, as 32 hexadecimal digits; empty without one."""


class EndSequences(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """End sequences whose client left, or whose text has reached a stop string."""

    sequence_ids: tuple[SequenceId, ...]
    reason: FinishReason


class Explain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Report live sequences, and what each does or waits for."""

    question: int
    """Number of the question, which the answer repeats."""
    page: Page


class Watch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send views of steps and blocks for some time. Repeated while there are viewers."""

    lease_s: float


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now; running sequences are lost."""


ToEngine = AddRequest | EndSequences | Explain | Watch | ResetPrefixCache | Shutdown

# To the API process.


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is being loaded."""

    progress: LoadProgress


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, and requests may come."""

    facts: ModelFacts


class StartFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine cannot start, and trying again would fail again."""

    what: str
    fix: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of sequences, after a step."""

    outputs: list[SequenceOutput]


class PrefixChanges(msgspec.Struct, frozen=True, tag=True):
    """Blocks of the prefix cache that are found now, or are no longer found, in order."""

    changes: list[PrefixChange]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the start of the process, by part of the step."""

    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0


class Beat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The heartbeat, with statistics. Sent 20 times a second at most; once a second when idle."""

    num_turns: int
    """Turns of the loop, with or without work."""
    stats: SchedulerStats
    times: StepTimes
    num_dropped_log_lines: int = 0


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """Progress within a step. Sent by a thread beside the loop, twice a second at most."""


class Explanation(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to Explain: running sequences, then waiting ones, each in the order of service."""

    question: int
    num_live: int
    """Live sequences, on other pages too."""
    reports: list[SequenceReport]


class View(msgspec.Struct, frozen=True, tag=True):
    """Steps since the last view, live sequences and the use of blocks, as JSON (step_watch.py)."""

    document: bytes


ToClient = Loading | Ready | StartFailed | Outputs | PrefixChanges | Beat | Pulse | Explanation | View

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
