"""AsyncEngine: the engine as the API process sees it.

Owns: the requests in flight and what becomes of them. Every admitted request ends once: with its last
output, with an error, or because its reader left.
Never: imports torch or transformers; the event loop waits for nothing but the network.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.admission import Admission
from engine.chat_template import ChatTemplate
from engine.config import EngineConfig
from engine.encoding import Encoder
from engine.errors import EngineDied, EngineUnavailable, Overloaded
from engine.health import HealthMonitor
from engine.live_request import LiveRequest
from engine.lives import EngineLives, GaveUp
from engine.messages import (
    AddRequest,
    Beat,
    EndSequences,
    Explain,
    Explanation,
    Loading,
    Outputs,
    Ready,
    ToClient,
)
from engine.metrics import EngineMetrics
from engine.tokenizer import Tokenizer
from engine.types import (
    ChatOptions,
    EngineState,
    FinishReason,
    GenerationRequest,
    Health,
    ModelInfo,
    ServiceTerms,
    TimeLimits,
    TokenOutput,
)
from scheduler.messages import SequenceId, SequenceOutput, SequenceReport
from worker.config import ModelFacts

_MAX_ANSWER_S = 5.0


class AsyncEngine:
    """Safe from one event loop. Between `start` and `close` it keeps an engine process alive."""

    def __init__(self, config: EngineConfig) -> None:
        folder = Path(config.model_path)
        self._config = config
        self._tokenizer = Tokenizer.load(folder)
        self._template = ChatTemplate.load(folder, special_tokens=self._tokenizer.special_tokens)
        self._encoder = Encoder(self._tokenizer, self._template)
        self._admission = Admission(max_queued=config.max_queued_requests)
        self._health = HealthMonitor(heartbeat_timeout_s=config.heartbeat_timeout_s)
        self._lives = EngineLives(config, on_message=self._take_message, on_death=self._take_death)
        self._living: asyncio.Task[GaveUp | None] | None = None
        self._info: ModelInfo | None = None
        self._next_id = 1
        self._num_questions = 0
        self._answers: dict[int, asyncio.Future[list[SequenceReport]]] = {}
        self._live: dict[str, LiveRequest] = {}
        self._by_sequence: dict[SequenceId, LiveRequest] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.metrics = EngineMetrics(config.served_names[0])

    # Life.

    def start(self) -> None:
        """Return at once; the model loads in its own process. `health` tells how far it is."""
        self._living = asyncio.create_task(self._lives.run())

    async def gave_up(self) -> GaveUp | None:
        """Wait until there is no engine process and never will be; None after `close`."""
        assert self._living is not None, "start first"
        return await asyncio.shield(self._living)

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineUnavailable if it never will be."""
        assert self._living is not None, "start first"
        ready = asyncio.create_task(self._health.became_ready.wait())
        await asyncio.wait([ready, self._living], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return self.info

    async def drain(self, *, timeout_s: float) -> bool:
        """Refuse new requests and let the accepted ones end; False if some had to be cut off."""
        self._health.is_draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        is_clean = not self._live
        self._fail_all(EngineUnavailable("the server is shutting down", code="shutting_down"))
        return is_clean

    async def close(self) -> None:
        """End the engine process; whoever is still in flight is told."""
        self._health.is_draining = True
        self._fail_all(EngineUnavailable("the server is shutting down", code="shutting_down"))
        await self._lives.stop()
        if self._living is not None:
            await self._living
        self._encoder.close()

    # Questions.

    @property
    def info(self) -> ModelInfo:
        """What is served. Raises EngineUnavailable until the model was loaded once."""
        if self._info is None:
            raise EngineUnavailable(f"the model is not loaded: {self.health().detail}")
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the engine process, for the log and for tests."""
        return self._lives.pid

    def health(self) -> Health:
        return self._health.judge(now_s=time.monotonic())

    # Requests.

    async def encode(self, text: str) -> tuple[int, ...]:
        """A plain prompt. Raises RequestRejected, Overloaded."""
        return await self._encoder.encode(text)

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        """A conversation, as the model's template renders it. Raises RequestRejected, Overloaded."""
        return await self._encoder.encode_chat(messages, options)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of all choices as they come; closing the generator aborts what still runs.

        Raises Overloaded, EngineUnavailable, RequestRejected before the first output; RequestFailed,
        EngineDied at any time.
        """
        live = self._admit(request)
        try:
            while outputs := await live.next_outputs():
                for output in outputs:
                    yield output
        finally:
            self._leave(live)

    async def explain(self) -> list[dict[str, Any]]:
        """Every live sequence: state, place in line, blocks, why it waits. Raises EngineUnavailable."""
        self._health.require_ready(now_s=time.monotonic())
        self._num_questions += 1
        question = self._num_questions
        answer: asyncio.Future[list[SequenceReport]] = asyncio.get_running_loop().create_future()
        self._answers[question] = answer
        self._lives.send(Explain(question=question))
        try:
            reports = await asyncio.wait_for(answer, _MAX_ANSWER_S)
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None
        finally:
            del self._answers[question]
        return [self._name(report) for report in reports]

    def _name(self, report: SequenceReport) -> dict[str, Any]:
        """As a client knows it: by request and choice."""
        live = self._by_sequence.get(report.sequence_id)
        if live is None:
            return {"request_id": None, **report._asdict()}
        index = live.choices[report.sequence_id].index
        return {"request_id": live.request.request_id, "choice": index, **report._asdict()}

    async def abort(self, request_id: str) -> None:
        """End a request from outside: its reader gets what there is and finish reason ABORTED."""
        live = self._live.get(request_id)
        if live is not None:
            self._lives.send(EndSequences(sequence_ids=live.unfinished_ids, reason=FinishReason.ABORTED))

    def _admit(self, request: GenerationRequest) -> LiveRequest:
        self._health.require_ready(now_s=time.monotonic())
        if request.request_id in self._live:
            raise ValueError(f"request {request.request_id} is in flight already")
        try:
            self._admission.admit(request.n, now_s=time.monotonic())
        except Overloaded:
            self.metrics.request_refused()
            raise
        ids = tuple(SequenceId(self._next_id + index) for index in range(request.n))
        self._next_id += request.n
        live = LiveRequest(request, ids, self._tokenizer)
        self._live[request.request_id] = live
        self._by_sequence.update(dict.fromkeys(ids, live))
        self._is_empty.clear()
        self.metrics.request_admitted(len(request.prompt_token_ids))
        self._lives.send(
            AddRequest(
                sequence_ids=ids,
                prompt_token_ids=request.prompt_token_ids,
                params=request.params,
                terms=self._terms(request),
            )
        )
        return live

    def _terms(self, request: GenerationRequest) -> ServiceTerms:
        """The request's own, but with no time limit longer than the operator's."""
        asked, allowed = request.terms.time_limits, self._config.time_limits
        return replace(
            request.terms,
            time_limits=TimeLimits(
                queue_s=min(asked.queue_s, allowed.queue_s),
                first_token_s=min(asked.first_token_s, allowed.first_token_s),
                total_s=min(asked.total_s, allowed.total_s),
            ),
        )

    def _leave(self, live: LiveRequest) -> None:
        """The one way out of flight, however it ended."""
        if self._live.pop(live.request.request_id, None) is None:
            return
        unfinished = [sequence_id for sequence_id in live.unfinished_ids if sequence_id in self._by_sequence]
        for sequence_id in live.choices:
            self._by_sequence.pop(sequence_id, None)
        self._admission.leave(live.num_unstarted)
        if unfinished:
            self._lives.send(EndSequences(sequence_ids=tuple(unfinished), reason=FinishReason.ABORTED))
            for sequence_id in unfinished:
                reason = FinishReason.FAILED if live.error else FinishReason.ABORTED
                self.metrics.choice_finished(reason, live.choices[sequence_id].num_tokens)
        self.metrics.request_finished(time.monotonic() - live.arrived_s)
        if not self._live:
            self._is_empty.set()

    # News from the engine process.

    def _take_message(self, message: ToClient) -> None:
        match message:
            case Outputs():
                now_s = time.monotonic()
                for output in message.outputs:
                    self._take_output(output, now_s)
            case Beat():
                self._health.beat(message, now_s=time.monotonic())
                self.metrics.beat(message)
            case Explanation():
                answer = self._answers.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message.reports)
            case Loading():
                self._health.loading(message.progress)
            case Ready():
                if self._info is not None:
                    self.metrics.engine_restarted()
                self._info = self._describe(message.facts)
                self.metrics.model_is_ready(self._info)
                self._health.ready(now_s=time.monotonic())

    def _take_output(self, output: SequenceOutput, now_s: float) -> None:
        live = self._by_sequence.get(output.sequence_id)
        if live is None:  # its reader has left
            return
        choice = live.choices[output.sequence_id]
        if output.start is not None:
            live.num_unstarted -= 1
            self._admission.start(now_s=now_s)
            self.metrics.sequence_started(output.start.queue_s)
        live.push(output, self.info.eos_token_ids)
        if output.token_ids:
            if choice.last_token_s is None:
                self.metrics.first_token_arrived(len(output.token_ids), now_s - live.arrived_s)
            else:
                self.metrics.tokens_arrived(len(output.token_ids), now_s - choice.last_token_s)
            choice.last_token_s = now_s
        if choice.finish_reason is not None:
            del self._by_sequence[output.sequence_id]
            self.metrics.choice_finished(choice.finish_reason, choice.num_tokens)
            if output.finish_reason is None:  # a stop string, which only we can see
                ended = EndSequences(sequence_ids=(output.sequence_id,), reason=FinishReason.STOP)
                self._lives.send(ended)

    def _take_death(self, cause: str) -> None:
        self._health.died(cause)
        self.metrics.engine_is_gone()
        self._fail_all(EngineDied("the engine stopped while this request was running; it may be sent again"))

    def _fail_all(self, error: EngineUnavailable | EngineDied) -> None:
        for live in list(self._live.values()):
            live.fail(error)
            self._leave(live)

    def _describe(self, facts: ModelFacts) -> ModelInfo:
        return ModelInfo(
            served_names=self._config.served_names,
            model_type=facts.model_type,
            num_parameters=facts.num_parameters,
            dtype=facts.dtype,
            device=facts.device,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            kv_cache_bytes=facts.kv_cache_bytes,
            eos_token_ids=facts.eos_token_ids,
            default_sampling=facts.default_sampling,
            created_s=int(time.time()),
            has_chat_template=self._template.is_present,
        )


__all__ = ["AsyncEngine", "EngineState"]
