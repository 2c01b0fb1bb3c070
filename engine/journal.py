"""What became of one HTTP request in the engine, for the line that the log gets about it and for its span.

Owns: the facts, from admission to the last choice. Written by active_requests.py, read when the reply is
over.
Never: text or tokens of anybody; how the facts are told (server/http/request_log.py,
server/observe/otel_spans.py).
"""

import time
from dataclasses import dataclass
from enum import StrEnum

from scheduler.messages import FinishReason, SequenceId

_MAX_EVENTS = 64
"""A request that is preempted for ever must not grow for ever."""


class JournalStage(StrEnum):
    """What a span's events are called."""

    QUEUED = "queued"
    STARTED = "started"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # known when it returns
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """Something that happened to one of the request's sequences."""

    stage: JournalStage
    time_ns: int
    """Unix time."""
    detail: str = ""


class Journal:
    """One HTTP request; it may have several prompts, and several choices for each."""

    def __init__(self, request_id: str = "", trace_id: str = "") -> None:
        self.request_id = request_id
        """As the client knows it, by x-request-id. Two requests may have the same."""
        self.trace_id = trace_id
        self.reply_id = ""
        """As the body of the reply says it."""
        self.tenant = ""
        """A key's name, or what a header says; never the field `user`."""
        self.priority: int | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_s: float | None = None
        """Until the first part of a step."""
        self.first_token_s: float | None = None
        """From arrival in the engine, as in the metrics."""
        self.finish_reasons: list[FinishReason] = []
        """Of the choices, in the order in which they ended."""
        self.abort_cause = ""
        """A word of AbortCause, if it was cut short."""
        self.events: list[JournalEvent] = []
        self._preemptions: dict[SequenceId, int] = {}

    @property
    def was_admitted(self) -> bool:
        """Whether the engine ever had it."""
        return self.priority is not None

    @property
    def num_preemptions(self) -> int:
        return sum(self._preemptions.values())

    def note_admission(self, num_prompt_tokens: int, priority: int) -> None:
        """One of its prompts may wait now."""
        self.num_prompt_tokens += num_prompt_tokens
        if self.priority is None:
            self._add(JournalStage.QUEUED)
        self.priority = priority

    def note_start(self, queue_s: float) -> None:
        """One of its sequences is part of a step for the first time."""
        if self.queue_s is None:
            self.queue_s = queue_s
            self._add(JournalStage.STARTED)

    def note_cached_tokens(self, num_tokens: int) -> None:
        """Of one of its prompts, once."""
        self.num_cached_tokens += num_tokens

    def note_first_token(self, since_arrival_s: float) -> None:
        """Of a choice; that of the first choice counts."""
        if self.first_token_s is None:
            self.first_token_s = since_arrival_s
            self._add(JournalStage.FIRST_TOKEN)

    def note_preemptions(self, sequence_id: SequenceId, num_so_far: int) -> None:
        """As its sequence counts them."""
        if num_so_far > self._preemptions.get(sequence_id, 0):
            self._preemptions[sequence_id] = num_so_far
            self._add(JournalStage.PREEMPTED)

    def note_end(self, reason: FinishReason, num_tokens: int) -> None:
        """Of a choice."""
        self.finish_reasons.append(reason)
        self.num_output_tokens += num_tokens
        self._add(JournalStage.FINISHED, reason.value)

    def _add(self, stage: JournalStage, detail: str = "") -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(JournalEvent(stage, time.time_ns(), detail))
