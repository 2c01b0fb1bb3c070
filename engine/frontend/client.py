"""AsyncEngine: the engine as the API process sees it.

Owns: the face that the server sees, and where messages go. Every admitted request ends once: with its last
output, with an error, or because its reader left.
Never: imports torch or transformers; the event loop waits for nothing but the network.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from engine.errors import EngineDied, EngineUnavailable, WrongTask
from engine.frontend.active_requests import InFlight
from engine.frontend.health import HealthMonitor, Welcome
from engine.frontend.metrics import EngineMetrics
from engine.grammars.grammar_compiler import GrammarCompiler
from engine.options.engine_config import EngineConfig
from engine.process_messages import (
    Beat,
    Explain,
    Explanation,
    Loading,
    Outputs,
    Pulse,
    Ready,
    ResetPrefixCache,
    ToClient,
)
from engine.processes.engine_processes import Death, EngineLives, GaveUp
from engine.text.checkpoint_texts import load_texts
from engine.text.encoding import Encoder
from engine.text.tokenizer import SpecialTokens
from engine.types import (
    ChatOptions,
    GenerationRequest,
    Grammar,
    Health,
    ModelInfo,
    PooledOutput,
    PoolingRequest,
    TextCut,
    TokenizedText,
    TokenOutput,
    TokenText,
)
from scheduler.messages import SequenceReport
from worker.worker_config import ModelFacts

_MAX_ANSWER_S = 5.0
_SHUTTING_DOWN = EngineUnavailable("the server is shutting down", code="shutting_down")


class AsyncEngine:
    """Safe from one event loop. Between `start` and `close` it keeps an engine process alive."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._tokenizer, self._template = load_texts(config.worker)
        self._encoder = Encoder(self._tokenizer, self._template)
        self._grammars = GrammarCompiler(config.model_path, timeout_s=config.grammar_compile_timeout_s)
        self._health = HealthMonitor(heartbeat_timeout_s=config.heartbeat_timeout_s)
        self._lives = EngineLives(config, on_message=self._take_message, on_death=self._take_death)
        self._living: asyncio.Task[GaveUp | None] | None = None
        self._info: ModelInfo | None = None
        self._death: Death | None = None
        """That of the process before this one, until the next is ready."""
        self._num_questions = 0
        self._answers: dict[int, asyncio.Future[list[SequenceReport]]] = {}
        self.metrics = EngineMetrics(config.served_names[0])
        self.metrics.watch_health(self.health)
        self._in_flight = InFlight(config, self._tokenizer, self.metrics, self._lives.send)

    # Life.

    def start(self) -> None:
        """Return at once; the model loads in its own process. `health` tells how far it is."""
        self._living = asyncio.create_task(self._live())

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

    async def drain(self, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Refuse new requests and let the accepted ones end; False if some had to be cut off.

        First, for `delay_s`, only say so to probes: who comes all the same is served.
        """
        self._health.welcome = Welcome.LEAVING
        await asyncio.sleep(delay_s)
        self._health.welcome = Welcome.CLOSED
        self._lives.no_more_lives()
        num_cut_off = self._in_flight.num_cut_off
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._in_flight.is_empty.wait(), timeout_s)
        self._in_flight.fail_all(_SHUTTING_DOWN)
        return self._in_flight.num_cut_off == num_cut_off

    async def close(self) -> None:
        """End the engine process; whoever is still in flight is told."""
        self._health.welcome = Welcome.CLOSED
        self._in_flight.fail_all(_SHUTTING_DOWN)
        await self._lives.stop()
        if self._living is not None:
            await self._living
        await self._grammars.close()
        self._encoder.close()

    async def _live(self) -> GaveUp | None:
        gave_up = await self._lives.run()
        if gave_up is not None:
            self._in_flight.fail_all(EngineDied())
        return gave_up

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
        with self.metrics.counting_refusals():
            return await self._encoder.encode(text)

    async def encode_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> tuple[int, ...]:
        """A conversation, as the model's template renders it. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_chat(messages, options)

    async def encode_plain(self, text: str) -> tuple[int, ...]:
        """A prompt without the special tokens around it. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_plain(text)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Bad words as token sequences. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_words(words)

    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        """A prompt with a hole. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_infill(prefix, suffix)

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        """The text of a whole prompt. Raises Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.decode(token_ids, special)

    def token_text(self, token_id: int) -> TokenText:
        """How one token looks in the middle of a text."""
        tokenizer = self._tokenizer
        return TokenText(token_id, tokenizer.token_string(token_id), tokenizer.token_bytes(token_id))

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the tokenizer spells them. Raises Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.vocabulary_strings(token_ids)

    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]:
        """Texts for a model that pools, with special tokens. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_texts(texts, cut)

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]:
        """Pairs of texts for a model that scores. Raises RequestRejected, Overloaded."""
        with self.metrics.counting_refusals():
            return await self._encoder.encode_pairs(pairs, cut)

    async def compile_grammar(self, grammar: Grammar, *, param: str, num_choices: int) -> Grammar:
        """Try a grammar that came in the field `param`, off the event loop; the result may go into params.

        Raises RequestRejected, Overloaded, EngineUnavailable.
        """
        with self.metrics.counting_refusals():
            return await self._grammars.compile(grammar, self.info, param=param, num_choices=num_choices)

    def require_room(self, priority: int | None) -> None:
        """Refuse a call that would find no place in the queue, before anything is spent on it.

        None stands for a priority that is not known yet. Raises Overloaded.
        """
        self._in_flight.require_room(priority)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """The outputs of all choices as they come; closing the generator aborts what still runs.

        Raises Overloaded, EngineUnavailable, RequestRejected before the first output; RequestFailed,
        EngineDied at any time.
        """
        async with aclosing(self.generate_all([request])) as outputs:
            async for _, output in outputs:
                yield output

    async def generate_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, TokenOutput], None]:
        """Several requests as one: admitted together or not at all, and aborted together.

        Yields each output with the place of its request. Raises as `generate` does; the first error of
        one ends all.
        """
        self._health.require_ready(now_s=time.monotonic())
        if self.info.pooling is not None:
            raise WrongTask("this model does not generate text")
        news = asyncio.Event()
        lives = self._in_flight.admit(requests, news)
        try:
            while not all(live.is_over for live in lives) or news.is_set():
                await news.wait()
                news.clear()
                for place, live in enumerate(lives):
                    for output in live.take():
                        yield place, output
        finally:
            for live in lives:
                self._in_flight.leave(live)

    async def pool(self, request: PoolingRequest) -> PooledOutput:
        """The vector of one prompt; cancelling the call aborts the request. Raises as `generate` does."""
        (output,) = await self.pool_all([request])
        return output

    async def pool_all(self, requests: Sequence[PoolingRequest]) -> list[PooledOutput]:
        """Several requests as one, as `generate_all`; their outputs are in the order of the requests."""
        self._health.require_ready(now_s=time.monotonic())
        if self.info.pooling is None:
            raise WrongTask("this model generates text; it makes no vectors")
        news = asyncio.Event()
        lives = self._in_flight.admit_pooling(requests, news)
        try:
            while not all(live.is_over for live in lives):
                await news.wait()
                news.clear()
                for live in lives:
                    if live.error is not None:
                        raise live.error
            return [output for live in lives for output in live.take()]
        finally:
            for live in lives:
                self._in_flight.leave(live)

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

    def reset_prefix_cache(self) -> None:
        """Let nothing that was cached so far be found again. Raises EngineUnavailable."""
        self._health.require_ready(now_s=time.monotonic())
        self._lives.send(ResetPrefixCache())

    def _name(self, report: SequenceReport) -> dict[str, Any]:
        """As a client knows it: by request and choice."""
        live = self._in_flight.of_sequence(report.sequence_id)
        if live is None:
            return {"request_id": None, "x_request_id": None, "trace_id": None, **report._asdict()}
        journal = live.request.journal
        return {
            "request_id": live.request.request_id,
            "x_request_id": journal.request_id,
            "trace_id": journal.trace_id,
            "choice": live.choices[report.sequence_id].index,
            **report._asdict(),
        }

    async def abort(self, request_id: str) -> None:
        """End a request from outside: its reader gets what there is and finish reason ABORTED."""
        live = self._in_flight.find(request_id)
        if live is not None:
            self._in_flight.abort(live, self.info.eos_token_ids)

    # News from the engine process.

    def _take_message(self, message: ToClient) -> None:
        match message:
            case Outputs():
                now_s, eos_token_ids = time.monotonic(), self.info.eos_token_ids
                self._in_flight.take_outputs(message.outputs, eos_token_ids, now_s)
            case Beat():
                self._health.beat(message, now_s=time.monotonic())
                self.metrics.beat(message)
            case Pulse():
                self._health.moved(now_s=time.monotonic())
            case Explanation():
                answer = self._answers.get(message.question)
                if answer is not None and not answer.done():
                    answer.set_result(message.reports)
            case Loading():
                self._health.loading(message.progress, now_s=time.monotonic())
            case Ready():
                if self._death is not None:
                    self.metrics.engine_restarted(self._death.cause)
                    self._death = None
                self._info = self._describe(message.facts)
                self.metrics.model_is_ready(self._info)
                self._health.ready(now_s=time.monotonic())
                self._in_flight.replay()

    def _take_death(self, death: Death) -> None:
        self._death = death
        self._health.died(death.what)
        self.metrics.engine_is_gone()
        if self._health.welcome is Welcome.CLOSED:  # there will be no next one
            self._in_flight.fail_all(EngineDied())
        else:
            self._in_flight.outlive_engine()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable("the engine stopped"))

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
            is_paged=facts.is_paged,
            eos_token_ids=facts.eos_token_ids,
            default_sampling=facts.default_sampling,
            created_s=int(time.time()),
            has_chat_template=self._template.is_present,
            chat_template=self._template.source_with_tools,
            added_tokens=self._tokenizer.added_tokens,
            pooling=facts.pooling,
        )
