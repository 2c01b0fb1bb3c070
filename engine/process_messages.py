"""What crosses between the API process and the engine process, grouped by who receives it.

Owns: the wire form, msgpack by msgspec: typed both ways, nothing in it can run (never pickle).
"""

import msgspec

from scheduler.messages import (
    FinishReason,
    PoolingParams,
    SamplingParams,
    SchedulerStats,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    ServiceTerms,
)
from worker.worker_config import LoadProgress, ModelFacts

# To the engine process.


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt; it becomes as many sequences as it has ids."""

    sequence_ids: tuple[SequenceId, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Sequence i draws with seed + i."""
    terms: ServiceTerms
    pooling: PoolingParams | None = None
    """Set: nothing is generated, and `params` is not read."""
    request_id: str = ""
    """What the log calls the HTTP request that it belongs to; empty if it came by no HTTP."""
    trace_id: str = ""
    """Of the distributed trace that it belongs to, as 32 hexadecimal digits; empty without one."""
    client_index: int = 0
    """Which API process wants the outputs."""


class EndSequences(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The client left, or found a stop string."""

    sequence_ids: tuple[SequenceId, ...]
    reason: FinishReason


class Explain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Somebody wants to know what every live sequence does or waits for."""

    question: int
    """Comes back with the answer."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Let nothing that was cached so far be found again."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave now; what runs is lost."""


ToEngine = AddRequest | EndSequences | Explain | ResetPrefixCache | Shutdown

# To the API process.


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is on its way."""

    progress: LoadProgress


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first step may come."""

    facts: ModelFacts


class StartFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """There will be no engine, and trying again will not help."""

    what: str
    fix: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """News of sequences, after a step."""

    outputs: list[SequenceOutput]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent since the start, by part of the step."""

    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0


class Beat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The loop moves. Sent after steps, a few times a second at most, and once a second when idle."""

    num_turns: int
    """Turns of the loop, with or without work: the heartbeat."""
    stats: SchedulerStats
    times: StepTimes
    num_dropped_log_lines: int = 0


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """The step that runs gets on. Sent by a thread beside the loop, twice a second at most."""


class Explanation(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The running line, then the waiting line, each in the order in which it is served."""

    question: int
    reports: list[SequenceReport]


ToClient = Loading | Ready | StartFailed | Outputs | Beat | Pulse | Explanation

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
