"""The messages between the API process and the engine process, grouped by receiver.

Owns: the wire form, msgpack by msgspec: typed in both directions, and data only (never pickle).
"""

import msgspec

from scheduler.counters import GroupUse, SchedulerStats
from scheduler.input_messages import EncoderInput, Payload
from scheduler.messages import (
    FinishReason,
    PoolingParams,
    ReportPage,
    SamplingParams,
    SequenceId,
    SequenceOutput,
    SequenceReport,
    ServiceTerms,
)
from scheduler.prefix_keys import PrefixChange
from worker.worker_config import AdapterFacts, LoadProgress, ModelFacts

# To the engine process.


class Begun(msgspec.Struct, frozen=True):
    """Part of a sequence that a process made before it died: the client has it, the next one goes on."""

    index: int
    """Number of the sequence in its request."""
    token_ids: tuple[int, ...]
    """Generated tokens."""
    num_reported_positions: int = 0
    """Positions of the prompt of which the client has the log-probabilities."""


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt, which becomes one sequence for each of `sequence_ids`."""

    sequence_ids: tuple[SequenceId, ...]
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    """Sequence i samples with seed + i."""
    begun: tuple[Begun, ...] = ()
    """One for each of `sequence_ids`, if an earlier process had begun the request."""
    terms: ServiceTerms
    pooling: PoolingParams | None = None
    """Set for a pooling request; `params` is not read then."""
    prediction: tuple[int, ...] = ()
    """Text that the client expects, as tokens."""
    restore_at: tuple[int, ...] = ()
    """Numbers of prompt tokens behind which later prompts will go on otherwise."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    payloads: tuple[Payload, ...] = ()
    """See SequenceInputs."""
    adapter: str = ""
    """Identity of the adapter to run the model with; empty: none."""
    adapter_folder: str = ""
    """Folder that it is read from when it is not in memory; its content must then be that of the identity."""
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
    page: ReportPage


class ForgetQuestion(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give up a question: its client has left, or waits no more."""

    question: int


class Watch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Send views of steps and blocks for some time. Repeated while there are viewers."""

    lease_s: float


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Read an adapter, check that it fits the model, and take it into memory."""

    question: int
    name: str
    folder: str


class ForgetAdapter(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Give an adapter up after the last sequence with it: no more will come."""

    identity: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached prefixes."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process now; running sequences are lost."""


ToEngine = (
    AddRequest
    | EndSequences
    | Explain
    | ForgetQuestion
    | Watch
    | LoadAdapter
    | ForgetAdapter
    | ResetPrefixCache
    | Shutdown
)

# To the API process.


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is being loaded."""

    progress: LoadProgress


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, and requests may come."""

    facts: ModelFacts


class StartFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine cannot start. Trying again helps only one that has started before, if memory comes back."""

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
    exchange_s: float = 0.0
    """Part of `execute_s` in which rank 0 of a divided model copied and added what ranks exchange."""
    wait_s: float = 0.0
    """Part of `execute_s` in which it waited for the others."""


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True):
    """Identities of the adapters in use at this moment."""

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    """Adapters in the worker's memory."""


class Beat(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The heartbeat, with statistics. Sent 20 times a second at most; once a second when idle."""

    num_turns: int
    """Turns of the loop, with or without work."""
    stats: SchedulerStats
    times: StepTimes
    num_dropped_log_lines: int = 0
    adapters: AdapterUse | None = None
    """Adapters in use; None where none are computed."""
    groups: tuple[GroupUse, ...] = ()
    """KV blocks by groups of layers."""


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """Progress within a step. Sent by a thread of its own, twice a second at most."""


class Explanation(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer to Explain: running sequences, then waiting ones, each in the order of service."""

    question: int
    num_live: int
    """Live sequences, on other pages too."""
    reports: list[SequenceReport]


class AdapterAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    question: int
    facts: AdapterFacts | None = None
    """Facts of the adapter; None if it was refused."""
    refusal: str = ""


class View(msgspec.Struct, frozen=True, tag=True):
    """Steps since the last view, live sequences and the use of blocks, as JSON (step_watch.py)."""

    document: bytes


ToClient = (
    Loading
    | Ready
    | StartFailed
    | Outputs
    | PrefixChanges
    | Beat
    | Pulse
    | Explanation
    | AdapterAnswer
    | View
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
