"""The journal of one HTTP request in the engine, for its line in the log and for its span.

Owns: the facts, from admission to the last choice. Written by active_requests.py, read when the reply is
complete.
Never: holds text or tokens, or formats the facts (request_log.py and otel_spans.py in server/edge/).
"""

import time
from dataclasses import dataclass
from enum import StrEnum

from scheduler.messages import FinishReason, SequenceId

_MAX_EVENTS = 64
"""Bound on the memory of a request that is preempted again and again."""


class JournalStage(StrEnum):
    """Kinds of events, by their names in a span."""

    QUEUED = "queued"
    STARTED = "started"
    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"  # noted when it runs again
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """An event of one of the request's sequences."""

    stage: JournalStage
    time_ns: int
    """Unix time."""
    detail: str = ""


class Journal:
    """The journal of one HTTP request, with all its prompts and choices."""

    def __init__(self, request_id: str = "", trace_id: str = "") -> None:
        self.request_id = request_id
        """The x-request-id, which two requests may share."""
        self.trace_id = trace_id
        self.reply_id = ""
        """The id in the body of the reply."""
        self.is_over = False
        """Whether the HTTP request has ended."""
        self.model = ""
        """The first name of its model, where there are several."""
        self.tenant = ""
        """The tenant by API key or header; never the field `user`."""
        self.priority: int | None = None
        self.own_limit_ran_out = False
        """Whether one of its time limits ran out that the client chose (frontend/waiting_deadlines.py)."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        """Prompt tokens that layers which keep all had, and that were computed for want of others' part."""
        self.lost_to = ""
        """Group of these other layers; empty if there were none."""
        self.num_output_tokens = 0
        self.queue_s: float | None = None
        """Seconds from arrival in the engine process to the first step."""
        self.first_token_s: float | None = None
        """Seconds from arrival to the first token, as in the metrics."""
        self.finish_reasons: list[FinishReason] = []
        """Finish reasons of the choices, in the order in which they ended."""
        self.abort_cause = ""
        """A value of AbortCause if the request was cut short; otherwise empty."""
        self.events: list[JournalEvent] = []
        self._preemptions: dict[SequenceId, int] = {}

    @property
    def was_admitted(self) -> bool:
        return self.priority is not None

    @property
    def num_preemptions(self) -> int:
        return sum(self._preemptions.values())

    @property
    def generation_s(self) -> float | None:
        """Seconds from the first token to the end of the last choice; None if either is not known."""
        times = {event.stage: event.time_ns for event in self.events}
        first, last = times.get(JournalStage.FIRST_TOKEN), times.get(JournalStage.FINISHED)
        return None if first is None or last is None else (last - first) / 1e9

    def note_admission(self, num_prompt_tokens: int, priority: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        if self.priority is None:
            self._add(JournalStage.QUEUED)
        self.priority = priority

    def note_start(self, queue_s: float) -> None:
        if self.queue_s is None:
            self.queue_s = queue_s
            self._add(JournalStage.STARTED)

    def note_cached_tokens(self, num_tokens: int, num_lost: int = 0, lost_to: str = "") -> None:
        """Note prompt tokens that were found, and further ones that were not for want of one group's."""
        self.num_cached_tokens += num_tokens
        self.num_lost_tokens += num_lost
        self.lost_to = lost_to or self.lost_to

    def note_first_token(self, since_arrival_s: float) -> None:
        """Note the first token of a choice; the first choice counts."""
        if self.first_token_s is None:
            self.first_token_s = since_arrival_s
            self._add(JournalStage.FIRST_TOKEN)

    def note_preemptions(self, sequence_id: SequenceId, num_so_far: int) -> None:
        """Note preemptions, as counted by the sequence so far."""
        if num_so_far > self._preemptions.get(sequence_id, 0):
            self._preemptions[sequence_id] = num_so_far
            self._add(JournalStage.PREEMPTED)

    def note_end(self, reason: FinishReason, num_tokens: int) -> None:
        self.finish_reasons.append(reason)
        self.num_output_tokens += num_tokens
        self._add(JournalStage.FINISHED, reason.value)

    def _add(self, stage: JournalStage, detail: str = "") -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(JournalEvent(stage, time.time_ns(), detail))
