"""The requests between admission and their end, and who is told what about them.

Owns: admission, the map from sequences to requests, and the metrics of both. Every admitted request leaves
once, through `leave`.
Never: the engine process (client.py hands messages on), or text (live_request.py).
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.admission import Admission
from engine.config import EngineConfig
from engine.errors import EngineError, Overloaded
from engine.live_request import LiveRequest
from engine.messages import AddRequest, EndSequences, ToEngine
from engine.metrics import EngineMetrics
from engine.tokenizer import Tokenizer
from engine.types import GenerationRequest, ServiceTerms, TimeLimits
from scheduler.messages import FinishReason, SequenceId, SequenceOutput


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
        self._next_id = 1
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[SequenceId, LiveRequest] = {}
        self.is_empty = asyncio.Event()
        self.is_empty.set()
        self.num_cut_off = 0
        """Requests that `fail_all` ended."""

    def __len__(self) -> int:
        return len(self._live)

    def find(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def of_sequence(self, sequence_id: SequenceId) -> LiveRequest | None:
        return self._by_sequence.get(sequence_id)

    def admit(self, requests: Sequence[GenerationRequest], news: asyncio.Event) -> list[LiveRequest]:
        """All of them or none; `news` is set whenever there is something to read from one of them.

        Raises Overloaded, and ValueError for an id that is in flight already.
        """
        for request in requests:
            if request.request_id in self._live:
                raise ValueError(f"request {request.request_id} is in flight already")
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        try:
            self._admission.admit(sum(request.n for request in requests), num_tokens, now_s=time.monotonic())
        except Overloaded:
            self._metrics.request_refused()
            raise
        lives = [self._register(request, news) for request in requests]
        try:
            for live in lives:
                self._send(self._message(live))
        except BaseException:  # what cannot be sent must not stay behind
            for live in lives:
                self.leave(live)
            raise
        return lives

    def leave(self, live: LiveRequest) -> None:
        """The one way out of flight, however it ended. May be called twice."""
        if self._live.get(live.request.request_id) is not live:
            return
        del self._live[live.request.request_id]
        unfinished = [sequence_id for sequence_id in live.unfinished_ids if sequence_id in self._by_sequence]
        for sequence_id in live.choices:
            self._by_sequence.pop(sequence_id, None)
        self._admission.leave(live.num_unstarted, 0 if live.has_started else live.num_prompt_tokens)
        if unfinished:
            self._send(EndSequences(sequence_ids=tuple(unfinished), reason=FinishReason.ABORTED))
            for sequence_id in unfinished:
                self._metrics.choice_finished(live.reason_of_end, live.choices[sequence_id].num_tokens)
        self._metrics.request_finished(time.monotonic() - live.arrived_s)
        if not self._live:
            self.is_empty.set()

    def fail_all(self, error: EngineError) -> None:
        """Nobody in flight will be served any more."""
        for live in list(self._live.values()):
            live.fail(error)
            self.leave(live)
            self.num_cut_off += 1

    def take_output(self, output: SequenceOutput, eos_token_ids: tuple[int, ...], now_s: float) -> None:
        """News of one sequence."""
        live = self._by_sequence.get(output.sequence_id)
        if live is None:  # its reader has left
            return
        choice = live.choices[output.sequence_id]
        if output.start is not None:
            self._note_start(live, output.start.queue_s, now_s)
        live.push(output, eos_token_ids)
        if output.token_ids:
            if choice.last_token_s is None:
                self._metrics.first_token_arrived(len(output.token_ids), now_s - live.arrived_s)
            else:
                self._metrics.tokens_arrived(len(output.token_ids), now_s - choice.last_token_s)
            choice.last_token_s = now_s
        if choice.finish_reason is not None:
            del self._by_sequence[output.sequence_id]
            self._metrics.choice_finished(choice.finish_reason, choice.num_tokens)
            if output.finish_reason is None:  # a stop string, which only we can see
                ended = EndSequences(sequence_ids=(output.sequence_id,), reason=FinishReason.STOP)
                self._send(ended)

    def _register(self, request: GenerationRequest, news: asyncio.Event) -> LiveRequest:
        ids = tuple(SequenceId(self._next_id + index) for index in range(request.n))
        self._next_id += request.n
        live = LiveRequest(request, ids, self._tokenizer, news)
        self._live[request.request_id] = live
        self._by_sequence.update(dict.fromkeys(ids, live))
        self.is_empty.clear()
        self._metrics.request_admitted(live.num_prompt_tokens)
        return live

    def _message(self, live: LiveRequest) -> AddRequest:
        return AddRequest(
            sequence_ids=tuple(live.choices),
            prompt_token_ids=live.request.prompt_token_ids,
            params=live.request.params,
            terms=self._terms(live.request),
        )

    def _terms(self, request: GenerationRequest) -> ServiceTerms:
        """The request's own, but with no time limit longer than the operator's."""
        asked, allowed = request.terms.time_limits, self._limits
        return replace(
            request.terms,
            time_limits=TimeLimits(
                queue_s=min(asked.queue_s, allowed.queue_s),
                first_token_s=min(asked.first_token_s, allowed.first_token_s),
                total_s=min(asked.total_s, allowed.total_s),
            ),
        )

    def _note_start(self, live: LiveRequest, queue_s: float, now_s: float) -> None:
        num_tokens = 0 if live.has_started else live.num_prompt_tokens
        live.num_unstarted -= 1
        self._admission.start(num_tokens, now_s=now_s)
        self._metrics.sequence_started(queue_s)
