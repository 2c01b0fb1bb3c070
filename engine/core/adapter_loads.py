"""Adapters of the engine process: the worker's store, as messages and the scheduler's sequences use it.

Owns: loading on demand, and giving an adapter up when the last sequence with it has ended.
Never: reads files, or decides who runs.
"""

from collections.abc import Iterable
from typing import Protocol

from engine.process_messages import AdapterAnswer, AdapterUse, AddRequest, ForgetAdapter, LoadAdapter
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.worker_config import AdapterFacts
from worker.worker_errors import AdapterRefused


class Adapters(Protocol):
    """The methods of the worker's store that the desk calls; it documents them."""

    @property
    def resident(self) -> tuple[str, ...]: ...
    def load(self, name: str, folder: str) -> AdapterFacts: ...
    def introduce(self, identity: str, folder: str) -> None: ...
    def forget(self, identity: str) -> None: ...


class AdapterLoads:
    """One for each loop; without a store it does nothing."""

    def __init__(self, scheduler: Scheduler, store: Adapters | None) -> None:
        self._scheduler = scheduler
        self._store = store
        self._leaving: set[str] = set()

    def introduce(self, request: AddRequest) -> None:
        """Let the worker know where the adapter of a request is, before its sequences come."""
        if self._store is not None and request.adapter:
            self._store.introduce(request.adapter, request.adapter_folder)

    def load(self, asked: LoadAdapter) -> AdapterAnswer:
        """Load an adapter between two steps, which wait meanwhile."""
        if self._store is None:
            return AdapterAnswer(question=asked.question, refusal="this server computes no adapters")
        try:
            facts = self._store.load(asked.name, asked.folder)
        except AdapterRefused as refusal:
            return AdapterAnswer(question=asked.question, refusal=str(refusal))
        self._leaving.discard(facts.identity)
        return AdapterAnswer(question=asked.question, facts=facts)

    def forget(self, asked: ForgetAdapter) -> None:
        """Give an adapter up once no sequence has it any more."""
        self._leaving.add(asked.identity)

    def report(self) -> AdapterUse | None:
        """Sum up the use of adapters, and give up those that nobody uses; None where there are none."""
        if self._store is None:
            return None
        running = _used(self._scheduler.running_sequences())
        waiting = _used(self._scheduler.waiting_sequences())
        for identity in self._leaving - running - waiting:
            self._store.forget(identity)
            self._leaving.discard(identity)
        return AdapterUse(
            running=tuple(sorted(running)), waiting=tuple(sorted(waiting)), resident=self._store.resident
        )


def _used(sequences: Iterable[Sequence]) -> set[str]:
    return {seq.adapter for seq in sequences if seq.adapter}
