"""AsyncEngine: the engine's interface for the server.

Owns: that interface, and the dispatch of messages from the engine process. Every admitted request ends once:
with its last output, with an error, or because its reader left.
Never: imports torch or transformers, or blocks the event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from engine.adapters.registry import AdapterMetrics, AdapterRegistry
from engine.errors import EngineDied, EngineUnavailable, GrammarRejected, WrongTask
from engine.frontend.active_requests import ActiveRequests
from engine.frontend.health import HealthMonitor, Welcome
from engine.frontend.metrics import EngineMetrics
from engine.frontend.subscribers import JoinedViews, Subscribers
from engine.grammars.compiler import GrammarCompiler
from engine.options.engine_config import EngineConfig
from engine.process_messages import (
    AdapterAnswer,
    Beat,
    Explanation,
    Loading,
    Outputs,
    PrefixChanges,
    Pulse,
    Ready,
    ResetPrefixCache,
    ToClient,
    View,
)
from engine.processes.engine_processes import Death, EngineGroup, GaveUp
from engine.reports.kv_publisher import KVPublisher
from engine.reports.questions import Questions, report_in_line
from engine.text.checkpoint_texts import load_texts, tokenizer_config
from engine.text.tokenizer_threads import TokenizerThreads
from engine.types import (
    EngineLoad,
    GenerationRequest,
    Grammar,
    Health,
    ModelInfo,
    ModelNames,
    PoolingRequest,
    ReportPage,
    TokenOutput,
    TokenText,
)

if TYPE_CHECKING:
    from engine.frontend.queue_limits import Desk
    from engine.processes.supervisor import EngineProcess

_SHUTTING_DOWN = EngineUnavailable("the server is shutting down", code="shutting_down")


class AsyncEngine:
    """The engine, for use from one event loop. Keeps an engine process alive between `start` and `close`."""

    def __init__(self, config: EngineConfig, desk: "Desk | None" = None) -> None:
        """Raises OptionError if the ports of KV events cannot be had. Other models may share the `desk`."""
        self._config = config
        self._tokenizer, self._template, self._trial, self._response_template, self.pictures = load_texts(
            config.worker, config.media
        )
        self._grammars = GrammarCompiler(config.model_path, timeout_s=config.grammar_compile_timeout_s)
        self._health = HealthMonitor(config.heartbeat_timeout_s, config.num_engines)
        gone = self._health.engine_is_given_up
        self._engines = EngineGroup(config, self._take_message, self._take_death, on_given_up=gone)
        self._started = asyncio.Event()
        self._supervision: asyncio.Task[GaveUp | None] | None = None
        self._info: ModelInfo | None = None
        self._deaths: dict[int, Death] = {}
        """The death of each engine's last process, until the next is ready."""
        self._viewers = Subscribers(self._engines.send_all)
        self._views = JoinedViews(config.num_engines)
        metrics = self.metrics = EngineMetrics(
            config.served_names[0],
            num_engines=config.num_engines,
            target_first_token_s=config.target_first_token_s,
        )
        self.metrics.watch_health(self.health)
        self._template.on_merged = self.metrics.turns_merged
        self.pictures.count, self.pictures.counting_refusals = metrics.count, metrics.counting_refusals
        texts = self._texts = TokenizerThreads(self._tokenizer, self._template, metrics.counting_refusals)
        # Calls about texts, which the threads document.
        self.encode, self.encode_plain, self.encode_chat = texts.encode, texts.encode_plain, texts.encode_chat
        self.encode_texts, self.encode_pairs = texts.encode_texts, texts.encode_pairs
        self.encode_words, self.encode_infill = texts.encode_words, texts.encode_infill
        self.num_answer_tokens = texts.num_answer_tokens
        self.decode, self.vocabulary_strings = texts.decode, texts.vocabulary_strings
        calls = self._requests = ActiveRequests(config, self._tokenizer, metrics, self._engines.send, desk)
        self.require_room, self.require_any_room = calls.require_room, calls.require_any_room
        self.forecast = calls.forecast
        self.metrics.watch_load(calls.engines.live_counts)
        self._questions = Questions(self._engines.send)
        self._adapters = AdapterRegistry(
            config.lora_directory, config.own_names, self._engines.send_all, self._health.ready_engines
        )
        most = config.scheduler.max_adapters * config.num_engines
        self._adapter_metrics = AdapterMetrics(most, lambda: self._adapters.served, self._adapters_in_line)
        if most:
            self.metrics.registry.register(self._adapter_metrics)
        try:
            self._kv_events = None if config.kv_events is None else KVPublisher(config.kv_events)
        except BaseException:
            self._trial.close()
            raise

    # Life.

    def start(self, spare: "EngineProcess | None" = None) -> None:
        """Start the engine process, or use the spare, and return; `health` shows how far the model is."""
        self._health.is_asleep, self._health.given_up = False, ""
        self._engines.resume(spare)
        self._supervision = asyncio.create_task(self._supervise())
        self._started.set()

    def sleep(self, fault: str = "") -> None:
        """Be without a process until `start`, so that the server is ready without this model.

        `fault` is the reason why it is never started.
        """
        self._health.sleep(given_up=fault)

    async def unload(self, fault: str = "") -> None:
        """End the engine processes, which `start` brings back; texts are tokenized meanwhile.

        `fault` is the reason, where they could not go on.
        """
        self._started.clear()
        await self._engines.stop()
        if self._supervision is not None:
            await asyncio.shield(self._supervision)  # `close` waits for it too
        self._health.sleep(failure=fault)
        self._requests.fail_all(EngineDied())
        for engine in range(self._config.num_engines):
            self._forget(engine)
            self._requests.engine_died(engine)

    async def begun(self) -> None:
        """Wait until the first engine processes have been started, or could not be."""
        await self._engines.begun()

    async def texts_are_tried(self) -> None:
        """Wait for the trials of template and tokenizer; no client's text may come before.

        Raises TokenizerError, NoRenderer.
        """
        await asyncio.to_thread(self._template.judge)
        if self._info is not None:  # the engine was ready before
            self._info = replace(self._info, template_variables=self._template.variables)
        await asyncio.to_thread(self._trial.judge)

    async def gave_up(self) -> GaveUp | None:
        """Wait until no engine process runs any more, and return why; None after `close` or `unload`."""
        assert self._supervision is not None, "start first"
        return await asyncio.shield(self._supervision)

    async def ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineUnavailable if that is given up, with why."""
        await self._started.wait()
        assert self._supervision is not None
        ready = asyncio.create_task(self._health.became_ready.wait())
        await asyncio.wait([ready, self._supervision], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._health.became_ready.is_set():
            end = await self.gave_up()
            raise self._not_loaded() if end is None else EngineUnavailable(end.what)
        return self.info

    async def drain(self, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Refuse new requests and let the accepted ones end; False if some had to be cut off.

        For the first `delay_s` only probes fail; new requests are still accepted.
        """
        self._health.welcome = Welcome.LEAVING
        await asyncio.sleep(delay_s)
        self._health.welcome = Welcome.CLOSED
        self._viewers.close()
        self._engines.stop_replacing()
        num_cut_off = self._requests.num_cut_off
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._requests.is_empty.wait(), timeout_s)
        self._requests.fail_all(_SHUTTING_DOWN)
        return self._requests.num_cut_off == num_cut_off

    async def close(self) -> None:
        """End the engine process, and every active request with an error."""
        self._health.welcome = Welcome.CLOSED
        self._viewers.close()
        self._requests.fail_all(_SHUTTING_DOWN)
        await self._engines.stop()
        if self._supervision is not None:
            await self._supervision
        await self._grammars.close()
        await self.pictures.close()
        self._trial.close()
        self._texts.close()
        if self._kv_events is not None:
            self._kv_events.close()

    async def _supervise(self) -> GaveUp | None:
        gave_up = await self._engines.run()
        if gave_up is not None:
            self._health.given_up = gave_up.what
            self._requests.fail_all(EngineDied())
        return gave_up

    # Questions.

    @property
    def info(self) -> ModelInfo:
        """The model that is served. Raises EngineUnavailable until it was loaded once."""
        if self._info is None:
            raise self._not_loaded()
        return self._info

    def _not_loaded(self) -> EngineUnavailable:
        is_broken = self._health.is_asleep and self._health.given_up
        code = "model_broken" if is_broken else "not_ready"
        return EngineUnavailable(f"the model is not loaded: {self.health().detail}", code=code)

    @property
    def names(self) -> ModelNames:
        """The names that requests may use, also before the model is loaded."""
        loaded = self.info.served_adapters if self._info is not None else self._config.worker.adapters
        profiles = tuple(each.name for each in self._config.profiles)
        adapters = tuple(each.name for each in loaded)
        return ModelNames(self._config.served_names, self._config.name_patterns, profiles + adapters)

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters may be loaded while the server runs."""
        return self._config.lora_directory is not None

    def health(self) -> Health:
        return self._health.judge(now_s=time.monotonic())

    def load(self) -> EngineLoad:
        return self.metrics.live_load.summary(len(self._requests))

    # Requests.

    def token_text(self, token_id: int) -> TokenText:
        """Return the text and the bytes of one token in the middle of a text."""
        tokenizer = self._tokenizer
        return TokenText(token_id, tokenizer.token_string(token_id), tokenizer.token_bytes(token_id))

    async def tokenizer_config(self) -> dict[str, Any]:
        """Return tokenizer_config.json of the checkpoint; empty without one."""
        return await asyncio.to_thread(tokenizer_config, self._config.worker)

    async def compile_grammar(
        self, grammar: Grammar, *, param: str, num_choices: int, tenant: str
    ) -> Grammar:
        """Compile a grammar from the field `param` on trial, in another process; return it ready for params.

        Raises RequestRejected, Overloaded, EngineUnavailable.
        """
        with self.metrics.counting_refusals():
            return await self._grammars.compile(
                grammar, self.info, param=param, num_choices=num_choices, tenant=tenant
            )

    async def generate_all(
        self, requests: Sequence[GenerationRequest], *, is_read_whole: bool = False
    ) -> AsyncGenerator[tuple[int, TokenOutput], None]:
        """Yield the outputs of all choices as they come, each with the place of its request.

        With `is_read_whole` they come in few large pieces: a reply is looked at once all of it is there.

        Requests are admitted together or not at all; closing the generator aborts the unfinished ones.
        Raises Overloaded, EngineUnavailable, RequestRejected before the first output; RequestFailed,
        EngineDied at any time. The first error of one request ends all.
        """
        self._health.require_ready(now_s=time.monotonic())
        if self.info.pooling is not None:
            raise WrongTask("this model does not generate text")
        readable = asyncio.Event()
        admitted = self._requests.admit(requests, readable, is_read_whole=is_read_whole)
        try:
            while not all(active.is_over for active in admitted) or readable.is_set():
                await readable.wait()
                readable.clear()
                for place, active in enumerate(admitted):
                    if isinstance(active.error, GrammarRejected):
                        self._grammars.blame(active.request.params.grammar, str(active.error))
                    for output in active.take():
                        yield place, output
        finally:
            for active in admitted:
                self._requests.leave(active)
            for request in requests:
                if request.at_end is not None:
                    request.at_end()

    async def pool_all(self, requests: Sequence[PoolingRequest]) -> list[bytes]:
        """Return the vectors in the order of the requests, as float32, little-endian; cancelling aborts.

        Raises as `generate_all`.
        """
        self._health.require_ready(now_s=time.monotonic())
        if self.info.pooling is None:
            raise WrongTask("this model generates text; it makes no vectors")
        readable = asyncio.Event()
        admitted = self._requests.admit_pooling(requests, readable)
        try:
            while not all(active.is_over for active in admitted):
                await readable.wait()
                readable.clear()
                for active in admitted:
                    if active.error is not None:
                        raise active.error
            return [active.vector() for active in admitted]
        finally:
            for active in admitted:
                self._requests.leave(active)

    async def explain(self, page: ReportPage) -> tuple[list[dict[str, Any]], int]:
        """Report sequences: state, place in line, blocks, why each waits; and how many there are in all.

        Raises EngineUnavailable.
        """
        self._health.require_ready(now_s=time.monotonic())
        engines = self._health.ready_engines()
        in_line = [report_in_line(*each) for each in enumerate(self._requests.engines.owners())]
        reports, num_live = await self._questions.ask(page, engines, in_line)
        return [self._name(report) for report in reports], num_live

    def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield views of the engine as JSON, at most ten a second; empty ones while there is nothing new.

        Ends when the server shuts down. Raises Overloaded with too many viewers.
        """
        return self._viewers.views()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Raises EngineUnavailable."""
        self._health.require_ready(now_s=time.monotonic())
        self._engines.send_all(ResetPrefixCache())

    async def load_adapter(self, name: str, folder_name: str, *, replaces: bool) -> None:
        """Let requests name an adapter in the directory. Raises RequestRejected, EngineUnavailable."""
        self._health.require_ready(now_s=time.monotonic())
        await self._adapters.load(name, folder_name, replaces=replaces)
        self._info = replace(self.info, served_adapters=self._adapters.served)

    def unload_adapter(self, name: str) -> bool:
        """Let no further request name an adapter. False if there is none. Raises EngineUnavailable."""
        self._health.require_ready(now_s=time.monotonic())
        is_there = self._adapters.unload(name)
        self._info = replace(self.info, served_adapters=self._adapters.served)
        return is_there

    def _adapters_in_line(self) -> tuple[str, ...]:
        """Identities of the adapters of requests that no engine has."""
        requests = (active.request for active in self._requests.engines.owners())
        adapters = (each.adapter for each in requests if isinstance(each, GenerationRequest))
        return tuple(adapter.identity for adapter in adapters if adapter is not None)

    def _name(self, report: dict[str, Any]) -> dict[str, Any]:
        """Add the names by which clients know the sequence: request and choice."""
        active = self._requests.of_sequence(report["sequence_id"])
        if active is None:
            return {"request_id": None, "x_request_id": None, "trace_id": None, **report}
        journal = active.request.journal
        return {
            "request_id": active.request.request_id,
            "x_request_id": journal.request_id,
            "trace_id": journal.trace_id,
            "choice": active.choices[report["sequence_id"]].index,
            **report,
        }

    # Messages from the engine processes.

    def _take_message(self, engine: int, message: ToClient) -> None:
        match message:
            case Outputs():
                now_s, eos_token_ids = time.monotonic(), self.info.eos_token_ids
                self._requests.take_outputs(message.outputs, eos_token_ids, now_s, engine=engine)
            case PrefixChanges():
                self._take_prefix_changes(engine, message)
            case Beat():
                self._health.engines[engine].beat(message, now_s=time.monotonic())
                self.metrics.beat(engine, message)
                self._requests.engines.note_load(engine, message.stats)
                self._adapter_metrics.beat(engine, message.adapters)
            case View():
                self._viewers.show(self._views.join(engine, message.document))
            case Pulse():
                self._health.engines[engine].moved(now_s=time.monotonic())
            case Explanation():
                self._questions.answer(engine, message)
            case AdapterAnswer():
                self._adapters.take_answer(engine, message)
            case Loading():
                self._health.engines[engine].loading(message.progress, now_s=time.monotonic())
            case Ready():
                self._take_ready(engine, message)

    def _take_prefix_changes(self, engine: int, message: PrefixChanges) -> None:
        self._requests.engines.note_prefixes(engine, message.changes)
        if self._kv_events is not None:
            self._kv_events.note(engine, message.changes)

    def _take_ready(self, engine: int, message: Ready) -> None:
        facts = message.facts
        death = self._deaths.pop(engine, None)
        if death is not None:
            self.metrics.count("engine_restarts", death.cause)
        self._adapters.model_is_ready(facts.adapters)
        self._info = ModelInfo(
            **{each.name: getattr(facts, each.name) for each in fields(facts)},
            served_names=self._config.served_names,
            name_patterns=self._config.name_patterns,
            created_s=int(time.time()),
            has_chat_template=self._template.is_present,
            chat_template=self._template.source_with_tools,
            template_variables=self._template.variables,
            response_template=self._response_template,
            added_tokens=self._tokenizer.added_tokens,
            served_adapters=self._adapters.served,
            profiles=self._config.profiles,
            default_template_kwargs=self._config.default_template_kwargs,
        )
        self.metrics.model_is_ready(engine, self._info)
        self._health.ready(engine, now_s=time.monotonic())
        self._requests.engine_ready(
            engine,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            groups=facts.groups,
            max_model_len=facts.max_model_len,
        )

    def _take_death(self, engine: int, death: Death) -> None:
        self._forget(engine)
        self._deaths[engine] = death
        self._health.died(engine, death.what)
        if self._health.welcome is Welcome.CLOSED and not self._health.became_ready.is_set():
            self._requests.fail_all(EngineDied())  # no next process will come
        else:
            self._requests.engine_died(engine)

    def _forget(self, engine: int) -> None:
        """Forget the process of an engine, which has ended."""
        self._deaths.pop(engine, None)
        self.metrics.engine_is_gone(engine)
        self._views.forget(engine)
        self._questions.forget(engine)
        self._adapters.engine_died(engine)
        self._adapter_metrics.beat(engine, None)
        if self._kv_events is not None:
            self._kv_events.forget(engine)
