"""The requests between admission and their end, and who is told what about them.

Owns: admission, the map from sequences to requests, the metrics of both, and who survives the death of an
engine process. Every admitted request leaves once, through `leave`.
Never: the engine process (client.py hands messages on), or text (active_text.py).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from engine.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineDiedTwice,
    EngineError,
    Overloaded,
    OverloadReason,
)
from engine.frontend.active_pooling import LivePooling
from engine.frontend.active_request import Part
from engine.frontend.active_text import LiveRequest
from engine.frontend.metrics import EngineMetrics
from engine.frontend.queue_limits import Admission
from engine.frontend.replay import ReplayQueue, what_is_left
from engine.frontend.tenant_tokens import TenantTokens
from engine.frontend.waiting_calls import Call, CallTerms, WaitingCalls
from engine.options.engine_config import EngineConfig
from engine.process_messages import AddRequest, EndSequences, ToEngine
from engine.text.tokenizer import Tokenizer
from engine.types import GenerationRequest, PoolingRequest, ServiceTerms, TimeLimits
from scheduler.messages import FinishReason, SamplingParams, SequenceId, SequenceOutput, SequenceStart

log = logging.getLogger(__name__)

AnyLive = LiveRequest | LivePooling
_NOTHING_DRAWN = SamplingParams()


class InFlight:
    """Fed by the receiver of messages; `send` carries ours to the engine process."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        send: Callable[[ToEngine], None],
    ) -> None:
        self._limits = config.time_limits
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._send = send
        self._admission = Admission(
            max_queued=config.max_queued_requests, max_queued_tokens=config.max_queued_tokens
        )
        self._tenant_tokens = TenantTokens()
        self._waiting: WaitingCalls[AnyLive] = WaitingCalls(config.scheduler)
        self._next_id = 1
        self._live: dict[str, AnyLive] = {}
        self._by_sequence: dict[SequenceId, AnyLive] = {}
        self._replays = ReplayQueue()
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self.num_cut_off = 0
        """Requests that an error of the engine's or the end of the server ended."""

    def __len__(self) -> int:
        return len(self._live)

    def find(self, request_id: str) -> AnyLive | None:
        return self._live.get(request_id)

    def of_sequence(self, sequence_id: SequenceId) -> AnyLive | None:
        return self._by_sequence.get(sequence_id)

    def require_room(self, priority: int | None) -> None:
        """Refuse now whom `admit` would refuse however little it asked for; None is any priority.

        Raises Overloaded.
        """
        if self._admission.has_room(1, 1):
            return
        now_s = time.monotonic()
        terms = None
        if priority is not None:
            terms = CallTerms(
                priority=priority, tenant="", arrived_s=now_s, time_limit_s=self._limits.nearest_s
            )
        if self._giving_way(1, 1, terms):
            return
        with self._metrics.counting_refusals():
            raise self._admission.refusal(1, now_s=now_s)

    def admit(self, requests: Sequence[GenerationRequest], news: asyncio.Event) -> list[LiveRequest]:
        """All of them or none; `news` is set whenever there is something to read from one of them.

        Raises Overloaded, and ValueError for an id that is in flight already.
        """
        self._take_places(requests, sum(request.n for request in requests))
        lives = [
            LiveRequest(request, self._new_ids(request.n), self._tokenizer, news) for request in requests
        ]
        self._start(lives)
        return lives

    def admit_pooling(self, requests: Sequence[PoolingRequest], news: asyncio.Event) -> list[LivePooling]:
        """As `admit`."""
        self._take_places(requests, len(requests))
        lives = [LivePooling(request, self._new_ids(1)[0], news) for request in requests]
        self._start(lives)
        return lives

    def leave(self, live: AnyLive) -> None:
        """The one way out of flight, however it ended. May be called twice."""
        if self._live.get(live.request.request_id) is not live:
            return
        del self._live[live.request.request_id]
        self._replays.let_go(live.first_id)
        self._waiting.discard(live)
        unfinished = [sequence_id for sequence_id in live.unfinished_ids if sequence_id in self._by_sequence]
        for sequence_id in live.choices:
            self._by_sequence.pop(sequence_id, None)
        num_tokens = 0 if live.has_started else live.num_prompt_tokens
        self._admission.leave(live.num_unstarted, num_tokens)
        self._tenant_tokens.leave(live.request.terms.tenant, num_tokens)
        if unfinished:
            self._send(EndSequences(sequence_ids=tuple(unfinished), reason=FinishReason.ABORTED))
            for sequence_id in unfinished:
                num_generated = live.choices[sequence_id].num_tokens
                self._metrics.choice_finished(live.reason_of_end, num_generated)
                live.request.journal.note_end(live.reason_of_end, num_generated)
            if live.abort_cause is not None:
                self._metrics.request_aborted(live.abort_cause)
                live.request.journal.abort_cause = live.abort_cause
        self._metrics.request_finished(time.monotonic() - live.arrived_s)
        if not self._live:
            self.is_empty.set()

    def fail_all(self, error: EngineError) -> None:
        """Nobody in flight will be served any more."""
        for live in list(self._live.values()):
            self._cut_off(live, error)

    def outlive_engine(self) -> None:
        """The engine process died: what it had begun fails, the rest waits for the next one.

        But only once: whatever was in flight in two deaths may be what they died of.
        """
        for live in list(self._live.values()):
            if live.is_over or live.first_id in self._replays:  # no process has it any more, or had it
                continue
            live.num_deaths += 1
            if live.num_deaths > 1:
                self._cut_off(live, EngineDiedTwice())
            elif live.has_started:
                self._cut_off(live, EngineDied())
            else:
                self._hold(live)

    def replay(self) -> None:
        """A new engine process is ready: it gets what waited for it, in order of arrival."""
        held = [self._by_sequence.get(first_id) for first_id in self._replays.take_all()]
        # One that was aborted meanwhile is over, but its reader may not have seen it yet.
        lives = [live for live in held if live is not None and not live.is_over]
        if lives:
            log.warning("%d requests that had not begun go to the new engine process", len(lives))
        for live in lives:
            self._send(self._message(live))
            self._metrics.request_replayed()

    def abort(self, live: AnyLive, eos_token_ids: tuple[int, ...]) -> None:
        """End it from outside: its reader gets what there is."""
        if live.first_id not in self._replays:
            self._send(EndSequences(sequence_ids=live.unfinished_ids, reason=FinishReason.ABORTED))
            return
        for sequence_id in live.unfinished_ids:  # there is no engine to say so
            aborted = SequenceOutput(sequence_id, (), FinishReason.ABORTED)
            self.take_outputs([aborted], eos_token_ids, time.monotonic())

    def take_outputs(
        self, outputs: Iterable[SequenceOutput], eos_token_ids: tuple[int, ...], now_s: float
    ) -> None:
        """News of some sequences, which came together."""
        num_by_gap: dict[float, int] = {}
        for output in outputs:
            live = self._by_sequence.get(output.sequence_id)
            if live is None:  # its reader has left
                continue
            choice = live.choices[output.sequence_id]
            if output.start is not None:
                self._note_start(live, output.start, now_s)
            if output.num_preemptions:
                live.request.journal.note_preemptions(output.sequence_id, output.num_preemptions)
            live.push(output, eos_token_ids)
            num_tokens = len(output.token_ids)
            if num_tokens and choice.last_token_s is not None:
                # Those of one step were all preceded by those of another: there are few different gaps.
                gap_s = (now_s - choice.last_token_s) / num_tokens
                num_by_gap[gap_s] = num_by_gap.get(gap_s, 0) + num_tokens
                choice.last_token_s = now_s
            elif num_tokens:
                self._note_first_token(live, choice, num_tokens, now_s)
            if choice.finish_reason is not None:
                self._note_end(live, choice, output)
        if num_by_gap:
            self._metrics.tokens_arrived(num_by_gap)

    def _take_places(
        self, requests: Sequence[GenerationRequest | PoolingRequest], num_sequences: int
    ) -> None:
        for request in requests:
            if request.request_id in self._live:
                raise ValueError(f"request {request.request_id} is in flight already")
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        now_s = time.monotonic()
        self._require_tenants_room(requests, num_tokens, now_s)
        if not self._admission.has_room(num_sequences, num_tokens):
            self._make_room(num_sequences, num_tokens, self._call_terms(requests, now_s))
        with self._metrics.counting_refusals():
            self._admission.admit(num_sequences, num_tokens, now_s=now_s)
        if requests:
            self._tenant_tokens.admit(requests[0].terms.tenant, num_tokens)

    def _require_tenants_room(
        self, requests: Sequence[GenerationRequest | PoolingRequest], num_tokens: int, now_s: float
    ) -> None:
        """All that come together are of one tenant. Raises TenantOverloaded."""
        for request in requests[:1]:
            with self._metrics.counting_refusals():
                self._tenant_tokens.require_room(
                    request.terms.tenant,
                    num_tokens,
                    request.max_tenant_tokens,
                    retry_after_s=self._admission.retry_after_s(now_s=now_s),
                )

    def _make_room(self, num_sequences: int, num_tokens: int, terms: CallTerms) -> None:
        """Let the calls that would be served last give way to a new one, if that is any help."""
        leaving = self._giving_way(num_sequences, num_tokens, terms)
        error = Overloaded(
            "the queue is full, and a more urgent request took the place of this one; try again later",
            retry_after_s=self._admission.retry_after_s(now_s=terms.arrived_s),
            reason=OverloadReason.DISPLACED,
        )
        for call in leaving:
            self._metrics.request_displaced()
            for live in call.lives:
                live.fail(error)
                self.leave(live)

    def _giving_way(
        self, num_sequences: int, num_tokens: int, terms: CallTerms | None
    ) -> list[Call[AnyLive]]:
        """Calls that would leave for a new one; none if even that would not make room."""
        leaving: list[Call[AnyLive]] = []
        freed_sequences = freed_tokens = 0
        for call in self._waiting.giving_way(terms, next_id=self._next_id):
            leaving.append(call)
            freed_sequences += call.num_sequences
            freed_tokens += call.num_tokens
            if self._admission.has_room(
                num_sequences, num_tokens, freed_sequences=freed_sequences, freed_tokens=freed_tokens
            ):
                return leaving
        return []

    def _call_terms(
        self, requests: Sequence[GenerationRequest | PoolingRequest], arrived_s: float
    ) -> CallTerms:
        """Terms of requests that are served together: those of the most urgent."""
        terms = [request.terms for request in requests]
        limits = (each.time_limits.nearest_s for each in terms)
        return CallTerms(
            priority=min((each.priority for each in terms), default=0),
            tenant=terms[0].tenant if terms else "",
            arrived_s=arrived_s,
            time_limit_s=min([self._limits.nearest_s, *limits]),
        )

    def _new_ids(self, num: int) -> tuple[SequenceId, ...]:
        ids = tuple(SequenceId(self._next_id + index) for index in range(num))
        self._next_id += num
        return ids

    def _start(self, lives: Sequence[AnyLive]) -> None:
        for live in lives:
            self._live[live.request.request_id] = live
            self._by_sequence.update(dict.fromkeys(live.choices, live))
            self.is_empty.clear()
            self._metrics.request_admitted(live.num_prompt_tokens)
            live.request.journal.note_admission(live.num_prompt_tokens, live.request.terms.priority)
        try:
            for live in lives:
                self._send(self._message(live))
            self._waiting.add(lives, self._call_terms([live.request for live in lives], lives[0].arrived_s))
        except BaseException:  # what cannot be sent must not stay behind
            for live in lives:
                self.leave(live)
            raise

    def _cut_off(self, live: AnyLive, error: EngineError) -> None:
        if live.is_over:  # complete: its reader has only not come for the rest
            return
        live.fail(error)
        self.leave(live)
        self.num_cut_off += 1

    def _hold(self, live: AnyLive) -> None:
        def give_up() -> None:
            live.fail(DeadlineExceeded("its time ran out while the engine was being replaced"))
            self.leave(live)

        self._replays.hold(live.first_id, self._terms(live).time_limits.nearest_s, give_up)

    def _message(self, live: AnyLive) -> AddRequest:
        request = live.request
        return AddRequest(
            sequence_ids=tuple(live.choices),
            prompt_token_ids=request.prompt_token_ids,
            params=_NOTHING_DRAWN if isinstance(request, PoolingRequest) else request.params,
            pooling=request.params if isinstance(request, PoolingRequest) else None,
            terms=self._terms(live),
            request_id=request.journal.request_id,
            trace_id=request.journal.trace_id,
        )

    def _terms(self, live: AnyLive) -> ServiceTerms:
        """The request's own, but with no time limit longer than the operator's, from now on."""
        asked, allowed = live.request.terms.time_limits, self._limits
        limits = TimeLimits(
            queue_s=min(asked.queue_s, allowed.queue_s),
            first_token_s=min(asked.first_token_s, allowed.first_token_s),
            total_s=min(asked.total_s, allowed.total_s),
        )
        if live.num_deaths:
            limits = what_is_left(limits, time.monotonic() - live.arrived_s)
        return replace(live.request.terms, time_limits=limits)

    def _note_start(self, live: AnyLive, start: SequenceStart, now_s: float) -> None:
        num_tokens = 0 if live.has_started else live.num_prompt_tokens
        live.request.journal.note_start(start.queue_s)
        if not live.has_started:
            live.request.journal.note_cached_tokens(start.num_cached_tokens)
        self._waiting.discard(live)
        live.num_unstarted -= 1
        self._admission.start(num_tokens, now_s=now_s)
        self._tenant_tokens.leave(live.request.terms.tenant, num_tokens)
        self._metrics.sequence_started(start.queue_s)

    def _note_first_token(self, live: AnyLive, part: Part, num_tokens: int, now_s: float) -> None:
        since_arrival_s = now_s - live.arrived_s
        self._metrics.first_token_arrived(num_tokens, since_arrival_s, live.request.terms.priority)
        live.request.journal.note_first_token(since_arrival_s)
        part.last_token_s = now_s

    def _note_end(self, live: AnyLive, part: Part, output: SequenceOutput) -> None:
        """This output was the last that is read of a sequence."""
        assert part.finish_reason is not None
        del self._by_sequence[output.sequence_id]
        self._metrics.choice_finished(part.finish_reason, part.num_tokens)
        live.request.journal.note_end(part.finish_reason, part.num_tokens)
        if output.finish_reason is None:  # a stop string, which only we can see
            ended = EndSequences(sequence_ids=(output.sequence_id,), reason=FinishReason.STOP)
            self._send(ended)
