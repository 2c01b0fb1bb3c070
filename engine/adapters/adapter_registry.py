"""The adapters that requests may name.

Owns: which name stands for which content; loading and unloading while the server runs, by the name of a
folder below the one of --lora-directory and by nothing else.
Never: reads an adapter: the engine process does, which knows the model.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.errors import AdapterConflict, EngineUnavailable, RequestRejected
from engine.process_messages import AdapterAnswer, ForgetAdapter, LoadAdapter, ToEngine
from engine.types import ServedAdapter
from worker.worker_config import AdapterFacts

MAX_ADAPTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MAX_LOAD_S = 120.0


def is_adapter_name(text: str) -> bool:
    """Tell whether an adapter may have this name."""
    return _NAME.fullmatch(text) is not None


class AdapterRegistry:
    """The adapters by name. `send` posts to the engine process; answers come by `take_answer`."""

    def __init__(
        self, directory: str | None, taken_names: Iterable[str], send: Callable[[ToEngine], None]
    ) -> None:
        self._directory = None if directory is None else Path(directory)
        self._taken_names = frozenset(taken_names)
        self._send = send
        self._by_name: dict[str, ServedAdapter] = {}
        self._num_questions = 0
        self._answers: dict[int, asyncio.Future[AdapterAnswer]] = {}
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

    def take_answer(self, answer: AdapterAnswer) -> None:
        """Take the answer of the engine process."""
        waiting = self._answers.get(answer.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def engine_died(self) -> None:
        """End what waits for the engine process."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable("the engine stopped"))

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
        self._num_questions += 1
        question = self._num_questions
        answer: asyncio.Future[AdapterAnswer] = asyncio.get_running_loop().create_future()
        self._answers[question] = answer
        self._send(LoadAdapter(question=question, name=name, folder=str(folder)))
        try:
            found = await asyncio.wait_for(answer, _MAX_LOAD_S)
        except TimeoutError:
            raise EngineUnavailable("the engine did not answer in time") from None
        finally:
            del self._answers[question]
        if found.facts is None:
            raise RequestRejected(f"the adapter {name!r} is refused: {found.refusal}", param="lora_path")
        return found.facts


def _served(facts: AdapterFacts) -> ServedAdapter:
    return ServedAdapter(
        name=facts.name,
        identity=facts.identity,
        folder=facts.folder,
        rank=facts.rank,
        created_s=int(time.time()),
    )
