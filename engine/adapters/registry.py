"""The adapters that requests may name, and their metrics.

Owns: which name stands for which content; loading and unloading while the server runs, by the name of a
folder below the one of --lora-directory and by no path; vLLM's gauge by which routers choose a server.
Never: reads an adapter: the engine process does, which knows the model.
Source: vllm:lora_requests_info, as the inference gateway of Kubernetes reads it: its value is the time.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.errors import AdapterConflict, EngineUnavailable, RequestRejected
from engine.options.adapter_options import MAX_ADAPTERS, is_adapter_name
from engine.process_messages import AdapterAnswer, AdapterUse, ForgetAdapter, LoadAdapter, ToEngine
from engine.types import ServedAdapter
from worker.worker_config import AdapterFacts

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MAX_LOAD_S = 120.0


class _Load:
    """A question to all engines that were ready when it was asked."""

    def __init__(self, engines: Iterable[int]) -> None:
        self._open = set(engines)
        self.answers: list[AdapterAnswer] = []
        self.is_over = asyncio.Event()
        if not self._open:
            self.is_over.set()

    def close(self, engine: int, answer: AdapterAnswer | None) -> None:
        """Take an engine's answer; None if the engine has ended."""
        if engine not in self._open:
            return
        self._open.discard(engine)
        if answer is not None:
            self.answers.append(answer)
        if not self._open:
            self.is_over.set()


class AdapterRegistry:
    """The adapters by name. `send` posts to all engines, and `ready` says which of them will answer."""

    def __init__(
        self,
        directory: str | None,
        taken_names: Iterable[str],
        send: Callable[[ToEngine], None],
        ready: Callable[[], Iterable[int]],
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._taken_names = frozenset(taken_names)
        self._send, self._ready = send, ready
        self._by_name: dict[str, ServedAdapter] = {}
        self._num_questions = 0
        self._load: _Load | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def served(self) -> tuple[ServedAdapter, ...]:
        return tuple(self._by_name.values())

    def model_is_ready(self, at_start: Iterable[AdapterFacts]) -> None:
        """Take the adapters of the command line, as the engine process has read them just now.

        Those that were loaded later keep their place: their requests say where they are.
        """
        for facts in at_start:
            now = self._by_name.get(facts.name)
            if now is None or now.folder == facts.folder:
                self._by_name[facts.name] = _served(facts)

    async def load(self, name: str, folder_name: str, *, replaces: bool) -> ServedAdapter:
        """Load a folder below the directory. Raises RequestRejected, AdapterConflict, EngineUnavailable."""
        if not is_adapter_name(name) or name in self._taken_names:
            raise RequestRejected("lora_name: it is no name, or the model's own", param="lora_name")
        folder = self._find(folder_name)
        async with self._one_at_a_time:
            before = self._by_name.get(name)
            if before is not None and not replaces:
                raise AdapterConflict(
                    f"the adapter {name!r} is loaded; send load_inplace true to load it again",
                    param="lora_name",
                )
            if before is None and len(self._by_name) >= MAX_ADAPTERS:
                raise RequestRejected(f"there are {MAX_ADAPTERS} adapters; unload one", param="lora_name")
            adapter = _served(await self._ask(name, folder))
            self._by_name[name] = adapter
            if before is not None and before.identity != adapter.identity:
                self._send(ForgetAdapter(identity=before.identity))
        return adapter

    def unload(self, name: str) -> bool:
        """Let no request name an adapter any more; running ones finish with it. False if there is none."""
        adapter = self._by_name.pop(name, None)
        if adapter is not None:
            self._send(ForgetAdapter(identity=adapter.identity))
        return adapter is not None

    def take_answer(self, engine: int, answer: AdapterAnswer) -> None:
        """Take the answer of an engine. One that comes too late is undone."""
        if self._load is not None and answer.question == self._num_questions:
            self._load.close(engine, answer)
        else:
            self._undo([answer])

    def engine_died(self, engine: int) -> None:
        """Wait no longer for an engine. Its next process learns from requests what it must know."""
        if self._load is not None:
            self._load.close(engine, None)

    def _find(self, folder_name: str) -> Path:
        """Find a folder directly below the directory. Raises RequestRejected."""
        wrong = RequestRejected(
            "lora_path: it must be the name of a folder with an adapter, in the server's directory of them",
            param="lora_path",
        )
        if self._directory is None or not _FOLDER.fullmatch(folder_name):
            raise wrong
        folder = self._directory / folder_name
        # Links could lead anywhere.
        is_plain = folder.is_dir() and not folder.is_symlink()
        if not is_plain or any((folder / name).is_symlink() for name in _FILES):
            raise wrong
        if not all((folder / name).is_file() for name in _FILES):
            raise wrong
        return folder

    async def _ask(self, name: str, folder: Path) -> AdapterFacts:
        """Let all engines load a folder. If one refuses, the others give it up again."""
        self._num_questions += 1
        self._load = load = _Load(self._ready())
        self._send(LoadAdapter(question=self._num_questions, name=name, folder=str(folder)))
        try:
            await asyncio.wait_for(load.is_over.wait(), _MAX_LOAD_S)
        except TimeoutError:
            self._undo(load.answers)
            raise EngineUnavailable("the engine did not answer in time") from None
        except asyncio.CancelledError:
            self._undo(load.answers)
            raise
        finally:
            self._load = None
        found = {answer.facts for answer in load.answers if answer.facts is not None}
        refusal = next((answer.refusal for answer in load.answers if answer.facts is None), None)
        if refusal is None and len({facts.identity for facts in found}) == 1:
            return found.pop()
        self._undo(load.answers)
        if not load.answers:
            raise EngineUnavailable("the engine stopped")
        refusal = refusal or "engines read different files: they were changed meanwhile"
        raise RequestRejected(f"the adapter {name!r} is refused: {refusal}", param="lora_path")

    def _undo(self, answers: Iterable[AdapterAnswer]) -> None:
        """Let engines give up what they loaded and what no name stands for."""
        served = {adapter.identity for adapter in self._by_name.values()}
        loaded = {answer.facts.identity for answer in answers if answer.facts is not None}
        for identity in sorted(loaded - served):
            self._send(ForgetAdapter(identity=identity))


def _served(facts: AdapterFacts) -> ServedAdapter:
    return ServedAdapter(
        name=facts.name,
        identity=facts.identity,
        folder=facts.folder,
        rank=facts.rank,
        created_s=int(time.time()),
        is_of_tower=facts.is_of_tower,
    )


class AdapterMetrics(Collector):
    """Collector of the metrics of adapters, on a server that computes some."""

    def __init__(
        self,
        max_adapters: int,
        served: Callable[[], tuple[ServedAdapter, ...]],
        in_line: Callable[[], tuple[str, ...]],
    ) -> None:
        """`in_line` returns the identities that requests wait with which no engine has yet."""
        self._max_adapters = max_adapters
        self._served, self._in_line = served, in_line
        self._uses: dict[int, AdapterUse] = {}

    def beat(self, engine: int, use: AdapterUse | None) -> None:
        """Take the use that an engine process reports; None: it reports none, or is gone."""
        self._uses[engine] = use or AdapterUse()

    def collect(self) -> Iterator[Metric]:
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        requests = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use; the time", labels=labels)
        uses = self._uses.values()
        running = _names([use.running for use in uses])
        waiting = _names([*(use.waiting for use in uses), self._in_line()])
        values = [str(self._max_adapters), running, waiting]
        requests.add_metric(values, time.time())
        yield requests
        in_memory = GaugeMetricFamily(
            "tokenyard:adapter_in_memory",
            "Engines that have the adapter in memory; 0: it is read when it is needed",
            labels=["adapter", "rank"],
        )
        for adapter in self._served():
            num_engines = sum(adapter.identity in use.resident for use in uses)
            in_memory.add_metric([adapter.name, str(adapter.rank)], num_engines)
        yield in_memory


def _names(identities: Iterable[tuple[str, ...]]) -> str:
    """List names; an adapter that was loaded again while the older one runs is listed once."""
    return ",".join(sorted({identity.rpartition("@")[0] for identity in chain(*identities)}))
