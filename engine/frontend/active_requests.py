"""The requests between admission and their end.

Owns: admission, the map from sequences to requests, the metrics of both, when a request is sent to which
engine, and which requests survive the death of an engine process. Every admitted request leaves once, through
`leave`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from engine.errors import EngineDiedTwice, EngineError, Overloaded, OverloadReason
from engine.frontend.active_request import NO_TICKET, ActivePooling, RequestChoice
from engine.frontend.active_text import ActiveText
from engine.frontend.engine_line import AnyActive, EngineLine
from engine.frontend.metrics import EngineMetrics
from engine.frontend.queue_limits import Desk, QueueLimits
from engine.frontend.waiting_calls import CallTerms
from engine.frontend.waiting_deadlines import WaitingDeadlines, nearer_limits, remaining_limits
from engine.options.engine_config import EngineConfig
from engine.process_messages import AddRequest, EndSequences, ToEngine
from engine.text.tokenizer import Tokenizer
from engine.types import GenerationRequest, PoolingRequest, QueueForecast, ServiceTerms
from scheduler.cache_groups import CacheGroup
from scheduler.messages import (
    FinishReason,
    SequenceId,
    SequenceOutput,
    SequenceStart,
    TimeLimitKind,
    WaitReason,
)
from scheduler.routing.start_forecast import PromptTimes

if TYPE_CHECKING:
    from engine.journal import Journal

log = logging.getLogger(__name__)

_SUSPECT_S = 300.0
"""Time between two deaths within which a request that was there at both may be their cause. More than three
deaths within it end the server."""


class ActiveRequests:
    """The admitted requests. The receiver of messages feeds them; `send` posts to the engine of a number."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        send: Callable[[int, ToEngine], None],
        desk: Desk | None = None,
    ) -> None:
        """`desk` is the queue that it shares with other models; None: it has one for itself."""
        self._limits = config.time_limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._send = send
        self._desk = desk or Desk(config)
        self._room = self._desk.join()
        self.engines = EngineLine(config.num_engines, config.scheduler)
        self._by_id: dict[str, AnyActive] = {}
        self._by_sequence: dict[SequenceId, AnyActive] = {}
        self._patience = WaitingDeadlines()
        self._prompt_times = PromptTimes()
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self.num_cut_off = 0
        """Requests that the engine's death or a shutdown ended."""

    def __len__(self) -> int:
        return len(self._by_id)

    def of_sequence(self, sequence_id: SequenceId) -> AnyActive | None:
        return self._by_sequence.get(sequence_id)

    def require_room(self, priority: int | None, journal: "Journal") -> None:
        """Keep a place for a call that is prepared next. Raise Overloaded if even the smallest has none."""
        self._require_room(priority, [self._room])
        self._desk.keep_place(journal, self._room, now_s=time.monotonic())

    def require_any_room(self, priority: int | None) -> None:
        """Raise Overloaded if no model of the queue has a place. Priority None is any."""
        self._require_room(priority, self._room.all)

    def _require_room(self, priority: int | None, rooms: Sequence[QueueLimits]) -> None:
        """Raise Overloaded unless the smallest request of this priority has room, or displaces others."""
        now_s = time.monotonic()
        kept = self._desk.kept_places(now_s=now_s)
        if any(room.has_room(1, 1, freed=kept) for room in rooms):
            return
        terms = None
        if priority is not None:
            terms = CallTerms(priority=priority, tenant="", arrived_s=now_s)
        if not any(self._desk.displaceable(1, 1, terms, room) for room in rooms):
            with self._metrics.counting_refusals():
                raise self._room.refusal(1, now_s=now_s, freed=kept)

    def forecast(self, terms: ServiceTerms) -> QueueForecast:
        """Place that one more request of these terms would have now."""
        now_s = time.monotonic()
        call = CallTerms(priority=terms.priority, tenant=terms.tenant, arrived_s=now_s)
        num_ahead = self._desk.waiting.num_ahead(call, next_id=self._desk.next_id)
        if not (num_ahead or self.engines.are_full):
            return QueueForecast(0, 0.0, self._metrics.wait_reason)
        start_s = self._room.time_to_start(num_ahead, terms.priority, now_s=now_s)
        # Of places nothing has waited for yet, no engine can say.
        reason = self._metrics.wait_reason if num_ahead else WaitReason.PLACES.value
        return QueueForecast(num_ahead, start_s, reason)

    def admit(
        self, requests: Sequence[GenerationRequest], readable: asyncio.Event, *, is_read_whole: bool = False
    ) -> list[ActiveText]:
        """Admit all requests or none. `readable` is set whenever one of them has something to read.

        Where replies are read whole, that is at their ends, and before only for very long ones.
        Raises Overloaded, and ValueError for an id that is in use already.
        """
        self._take_places(requests, sum(request.n for request in requests))
        admitted = [
            ActiveText(
                request,
                self._desk.new_ids(request.n),
                self._tokenizer,
                readable,
                is_read_whole=is_read_whole,
            )
            for request in requests
        ]
        self._start(admitted)
        return admitted

    def admit_pooling(
        self, requests: Sequence[PoolingRequest], readable: asyncio.Event
    ) -> list[ActivePooling]:
        self._take_places(requests, len(requests))
        admitted = [ActivePooling(request, self._desk.new_ids(1)[0], readable) for request in requests]
        self._start(admitted)
        return admitted

    def leave(self, active: AnyActive) -> None:
        """Remove a request, however it ended: the only way out. May be called twice."""
        self._remove(active)
        self._bind()

    def _remove(self, active: AnyActive) -> None:
        if self._by_id.get(active.request.request_id) is not active:
            return
        del self._by_id[active.request.request_id]
        self._patience.let_go(active.first_id)
        ticket, active.ticket = active.ticket, NO_TICKET  # it holds the request: no cycle stays behind
        self.engines.close(ticket)
        self._desk.waiting.discard(active)
        unfinished = [each for each in active.unfinished_ids if each in self._by_sequence]
        for sequence_id in active.choices:
            self._by_sequence.pop(sequence_id, None)
        num_tokens = 0 if active.has_started else active.num_prompt_tokens
        terms = active.request.terms
        self._room.leave(active.num_unstarted, num_tokens, priority=terms.priority)
        self._desk.tenant_tokens.leave(terms.tenant, num_tokens)
        if unfinished:
            if ticket.engine is not None:
                self._end(ticket.engine, unfinished, FinishReason.ABORTED)
            for sequence_id in unfinished:
                num_generated = active.choices[sequence_id].num_tokens
                self._metrics.choice_finished(active.reason_of_end, num_generated)
                active.request.journal.note_end(active.reason_of_end, num_generated)
            if active.abort_cause is not None:
                self._metrics.count("request_aborts", active.abort_cause)
                active.request.journal.abort_cause = active.abort_cause
        self._metrics.request_finished(time.monotonic() - active.arrived_s, active.timeline)
        if not self._by_id:
            self.is_empty.set()

    def fail_all(self, error: EngineError) -> None:
        for active in list(self._by_id.values()):
            self._cut_off(active, error)

    def engine_died(self, engine: int) -> None:
        """Return the requests of the dead process to their place in the line, with their tokens so far.

        One that was there at two deaths of late may be their cause, and does not return.
        """
        self.engines.shut(engine)
        now_s = time.monotonic()
        for active in list(self._by_id.values()):
            if active.is_over or active.ticket.engine != engine:  # ended, in the line, or elsewhere
                continue
            active.num_deaths += 1
            was_there_s, active.last_death_s = active.last_death_s, now_s
            if now_s - was_there_s < _SUSPECT_S:
                self._cut_off(active, EngineDiedTwice())
            else:
                self.engines.take_back(active.ticket)
                self._hold(active)
        self._bind()

    def engine_ready(
        self,
        engine: int,
        *,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...] = (),
        max_model_len: int = 0,
    ) -> None:
        """Let a new engine process have requests of the line."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        self.engines.begin(engine, **sizes, groups=groups)
        self._bind()

    def take_outputs(
        self,
        outputs: Iterable[SequenceOutput],
        eos_token_ids: tuple[int, ...],
        now_s: float,
        *,
        engine: int = 0,
    ) -> None:
        num_new, num_by_gap = 0, dict[float, int]()
        for output in outputs:
            active = self._by_sequence.get(output.sequence_id)
            if active is None:  # its reader has left
                continue
            choice = active.choices[output.sequence_id]
            if output.start is not None:
                self._note_start(active, choice, output.start, now_s)
            if output.num_preemptions:
                active.request.journal.note_preemptions(output.sequence_id, output.num_preemptions)
            active.push(output, eos_token_ids)
            num_tokens = len(output.token_ids)
            num_new += num_tokens
            if self.engines.are_several:
                self.engines.note_output(active.ticket, num_tokens)
            if num_tokens and choice.last_token_s is not None:
                # All tokens of a step follow those of an earlier step: there are few different gaps.
                gap_s = (now_s - choice.last_token_s) / num_tokens
                num_by_gap[gap_s] = num_by_gap.get(gap_s, 0) + num_tokens
                choice.last_token_s = now_s
            elif num_tokens:
                self._note_first_token(active, choice, num_tokens, now_s)
            if choice.finish_reason is not None:
                self._note_end(active, choice, output)
        self._metrics.tokens_of_engine(engine, num_new)
        if num_by_gap:
            self._metrics.tokens_arrived(num_by_gap)
        self._bind()

    def _take_places(
        self, requests: Sequence[GenerationRequest | PoolingRequest], num_sequences: int
    ) -> None:
        for request in requests:
            if request.request_id in self._by_id:
                raise ValueError(f"request {request.request_id} is active already")
            self._desk.kept.pop(request.journal.reply_id, None)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        now_s = time.monotonic()
        self._require_tenants_room(requests, num_tokens, now_s)
        kept, terms = self._desk.kept_places(now_s=now_s), self._call_terms(requests, now_s)
        has_room = self._room.has_room(num_sequences, num_tokens, freed=kept)
        if not has_room and not self._make_room(num_sequences, num_tokens, terms):
            with self._metrics.counting_refusals():
                raise self._room.refusal(num_sequences, now_s=now_s, freed=kept)
        self._room.take_in(num_sequences, num_tokens, now_s=now_s, priority=terms.priority)
        if requests:
            self._desk.tenant_tokens.admit(requests[0].terms.tenant, num_tokens)

    def _require_tenants_room(
        self, requests: Sequence[GenerationRequest | PoolingRequest], num_tokens: int, now_s: float
    ) -> None:
        """Raise TenantOverloaded if a call does not fit. All requests of a call are of one tenant."""
        for request in requests[:1]:
            with self._metrics.counting_refusals():
                self._desk.tenant_tokens.require_room(
                    request.terms.tenant,
                    num_tokens,
                    request.max_tenant_tokens,
                    retry_after_s=partial(self._room.retry_after_s, now_s=now_s),
                )

    def _make_room(self, num_sequences: int, num_tokens: int, terms: CallTerms) -> bool:
        """Displace the calls that would be served last, if that makes room for a new one, and tell."""
        leaving = self._desk.displaceable(num_sequences, num_tokens, terms, self._room)
        error = Overloaded(
            "the queue is full, and a more urgent request took the place of this one; try again later",
            retry_after_s=self._room.retry_after_s(now_s=terms.arrived_s),
            reason=OverloadReason.DISPLACED,
        )
        for call in leaving:
            self._metrics.count("admission_rejections", OverloadReason.DISPLACED)
            for active in call.lives:
                call.displace(active, error)
        return bool(leaving)

    def _displace(self, active: AnyActive, error: Overloaded) -> None:
        active.fail(error)
        self._remove(active)

    @staticmethod
    def _call_terms(requests: Sequence[GenerationRequest | PoolingRequest], arrived_s: float) -> CallTerms:
        """Return the terms of a call, which are its most urgent request's."""
        terms = [request.terms for request in requests]
        return CallTerms(
            priority=min((each.priority for each in terms), default=0),
            tenant=terms[0].tenant if terms else "",
            arrived_s=arrived_s,
        )

    def _start(self, admitted: Sequence[AnyActive]) -> None:
        for active in admitted:
            active.allowed_limits = self._limits
            self._by_id[active.request.request_id] = active
            self._by_sequence.update(dict.fromkeys(active.choices, active))
            self.is_empty.clear()
            self._metrics.request_admitted(active.num_prompt_tokens)
            if isinstance(active, ActiveText):
                n, max_tokens = active.request.n, active.request.params.max_tokens
                self._metrics.params_admitted(n=n, max_tokens=max_tokens)
            active.request.journal.note_admission(active.num_prompt_tokens, active.request.terms.priority)
        self._foresee_first_tokens(admitted)
        try:
            self._desk.waiting.add(
                admitted,
                self._call_terms([active.request for active in admitted], admitted[0].arrived_s),
                self._displace,
                self._room,
            )
            for active in admitted:
                terms = self._call_terms([active.request], active.arrived_s)
                active.ticket = self.engines.enter(active, terms)
            self._bind()
        except BaseException:  # requests that cannot be sent must not stay behind
            for active in admitted:
                self.leave(active)
            raise
        for active in admitted:
            if active.ticket.engine is None and not active.is_over:
                self._hold(active)

    def _foresee_first_tokens(self, admitted: Sequence[AnyActive]) -> None:
        """Foresee the first token of each of a call, as things are at its admission."""
        start_s: float | None = 0.0
        if self.engines.are_full:
            priority, now_s = admitted[0].request.terms.priority, admitted[0].arrived_s
            num_own = sum(len(active.choices) for active in admitted)
            start_s = self._room.time_to_start_of_last(num_own, priority, now_s=now_s)
        for active in admitted:
            prompt_s = self._prompt_times.expected_s(active.num_prompt_tokens)
            if start_s is not None and prompt_s is not None:
                active.expected_first_token_s = start_s + prompt_s
                self._metrics.observe("predicted_first_token_seconds", start_s + prompt_s)

    def _bind(self) -> None:
        """Send the requests of the line that an engine can begin soon."""
        num_resent = 0
        while (ticket := self.engines.next()) is not None:
            active, engine = ticket.owner, ticket.engine
            assert engine is not None
            self._patience.let_go(active.first_id)
            if active.is_over:  # aborted meanwhile; its reader has not seen it yet
                self.engines.close(ticket)
                continue
            active.sent_s = time.monotonic()
            self._send(engine, self._message(active))
            if active.num_deaths:
                num_resent += 1
                self._metrics.count("requests_replayed")
        if num_resent:
            log.warning("%d requests of an engine process that died go on in another", num_resent)

    def _cut_off(self, active: AnyActive, error: EngineError) -> None:
        if active.is_over:  # complete; its reader has not fetched the rest yet
            return
        active.fail(error)
        self._remove(active)
        self.num_cut_off += 1

    def _hold(self, active: AnyActive) -> None:
        def give_up() -> None:
            if active.has_reply:
                self._expire_in_line(active)
                return
            why = "an engine was being replaced" if active.num_deaths else "it waited for an engine"
            active.expire(f"its time ran out while {why}", TimeLimitKind)
            self.leave(active)

        self._patience.hold(active.first_id, self._terms(active).time_limits.nearest_s, give_up)

    def _expire_in_line(self, active: AnyActive) -> None:
        """End a request that no engine process has; its reader gets the output so far."""
        ends = [SequenceOutput(each, (), FinishReason.EXPIRED) for each in active.unfinished_ids]
        self.take_outputs(ends, (), time.monotonic())

    def _message(self, active: AnyActive) -> AddRequest:
        request = active.request
        return AddRequest(
            sequence_ids=active.unfinished_ids,
            begun=active.begun(),
            prompt_token_ids=request.prompt_token_ids,
            **active.fields_of_kind(),
            terms=self._terms(active),
            request_id=request.journal.request_id,
            trace_id=request.journal.trace_id,
        )

    def _terms(self, active: AnyActive) -> ServiceTerms:
        """Return the request's terms, with time limits capped by the operator's and counted from now."""
        limits = nearer_limits(active.request.terms.time_limits, self._limits)
        if active.has_started:  # it has left the queue; with a token, only its whole time is still to come
            first_token_s = inf if active.has_reply else limits.first_token_s
            limits = replace(limits, queue_s=inf, first_token_s=first_token_s)
        if active.num_deaths or self.engines.are_several:
            limits = remaining_limits(limits, time.monotonic() - active.arrived_s)
        return replace(active.request.terms, time_limits=limits)

    def _note_start(
        self, active: AnyActive, choice: RequestChoice, start: SequenceStart, now_s: float
    ) -> None:
        self.engines.note_start(active.ticket)
        if choice.has_started:  # in a process that died
            return
        choice.has_started = True
        num_tokens = 0 if active.has_started else active.num_prompt_tokens
        if self.engines.are_several:
            start = start._replace(queue_s=start.queue_s + active.sent_s - active.arrived_s)
        active.request.journal.note_start(start.queue_s)
        if not active.has_started:
            active.started_s = active.arrived_s + start.queue_s
            active.num_cached_tokens = start.num_cached_tokens
            active.request.journal.note_cached_tokens(
                start.num_cached_tokens, start.num_lost_tokens, start.lost_to
            )
        self._desk.waiting.discard(active)
        active.num_unstarted -= 1
        self._room.start(num_tokens, now_s=now_s, priority=active.request.terms.priority)
        self._desk.tenant_tokens.leave(active.request.terms.tenant, num_tokens)
        self._metrics.observe("request_queue_time_seconds", start.queue_s)

    def _note_first_token(
        self, active: AnyActive, choice: RequestChoice, num_tokens: int, now_s: float
    ) -> None:
        since_arrival_s = now_s - active.arrived_s
        if active.first_token_s is None:
            active.first_token_s = now_s
            if not active.num_deaths:  # else an outage lies between
                self._prompt_times.note(active.num_prompt_tokens, now_s - active.started_s)
            if active.expected_first_token_s is not None:
                error_s = active.expected_first_token_s - since_arrival_s
                self._metrics.observe("predicted_first_token_error_seconds", error_s)
        self._metrics.first_token_arrived(num_tokens, since_arrival_s, active.request.terms.priority)
        active.request.journal.note_first_token(since_arrival_s)
        choice.last_token_s = now_s

    def _note_end(self, active: AnyActive, choice: RequestChoice, output: SequenceOutput) -> None:
        """Count the end of a sequence, after its last output."""
        assert choice.finish_reason is not None
        del self._by_sequence[output.sequence_id]
        engine = active.ticket.engine
        self.engines.note_end(active.ticket)
        self._metrics.choice_finished(choice.finish_reason, choice.num_tokens)
        active.request.journal.note_end(choice.finish_reason, choice.num_tokens)
        if output.finish_reason is None and engine is not None:  # a stop string, which it cannot see
            self._end(engine, [output.sequence_id], FinishReason.STOP)

    def _end(self, engine: int, ids: Iterable[SequenceId], reason: FinishReason) -> None:
        self._send(engine, EndSequences(sequence_ids=tuple(ids), reason=reason))
