"""The engines behind one API process: each a line of engine processes, one after another.

Owns: their configurations, and when the server has none left. An engine that dies is replaced while the
others go on, and one that is given up leaves them at work.
Never: chooses an engine for a request (scheduler/routing).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.options.engine_config import EngineConfig
from engine.process_messages import Ready, ToClient, ToEngine
from engine.processes.child_process import EXIT_START_FAILED
from engine.processes.engine_processes import Death, EngineProcesses, GaveUp

log = logging.getLogger(__name__)


class EngineGroup:
    """All engines. Run `run` as a task; it returns when no further process is started for any."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[int, ToClient], None],
        on_death: Callable[[int, Death], None],
    ) -> None:
        self._on_message = on_message
        self._have_been_ready: set[int] = set()
        self._engines = [
            EngineProcesses(
                config_of(config, engine),
                on_message=partial(self._pass_on, engine),
                on_death=partial(on_death, engine),
            )
            for engine in range(config.num_engines)
        ]

    @property
    def pids(self) -> list[int | None]:
        """Process id of each engine; None while it has no process."""
        return [each.pid for each in self._engines]

    async def begun(self) -> None:
        """Wait until the first process of each engine has been started, or could not be."""
        await asyncio.gather(*(each.begun.wait() for each in self._engines))

    def send(self, engine: int, message: ToEngine) -> None:
        """Post a message to one engine; lost without a process."""
        self._engines[engine].send(message)

    def send_all(self, message: ToEngine) -> None:
        for each in self._engines:
            each.send(message)

    async def run(self) -> GaveUp | None:
        """Run all engines; return why the last one was given up, or None after `stop`.

        A configuration with which one has never started ends all: it is the operator's to correct.
        """
        running = {asyncio.create_task(each.run()): number for number, each in enumerate(self._engines)}
        ends: list[GaveUp | None] = []
        try:
            while len(ends) < len(self._engines):
                pending = [task for task in running if not task.done()]
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    end = task.result()
                    number = running.pop(task)
                    ends.append(end)
                    was_ready = number in self._have_been_ready
                    if end is not None and end.exit_code == EXIT_START_FAILED and not was_ready:
                        return end
                    if end is not None and len(pending) > 1:
                        log.critical("engine %d is given up: %s; the others go on", number, end.fix)
        finally:
            await self._end(running)
        return ends[-1]

    async def stop(self) -> None:
        """Ask all processes to end, then kill them."""
        await asyncio.gather(*(each.stop() for each in self._engines))

    def stop_replacing(self) -> None:
        """Let the present processes go on, but start no other after them."""
        for each in self._engines:
            each.stop_replacing()

    def _pass_on(self, engine: int, message: ToClient) -> None:
        if isinstance(message, Ready):
            self._have_been_ready.add(engine)
        self._on_message(engine, message)

    async def _end(self, running: "dict[asyncio.Task[GaveUp | None], int]") -> None:
        """End the engines that still run."""
        if running:
            await self.stop()
            await asyncio.gather(*running, return_exceptions=True)


def config_of(config: EngineConfig, engine: int) -> EngineConfig:
    """Return the configuration of one engine; each writes a trace of its own."""
    if config.num_engines == 1:
        return config
    trace = config.trace_file
    if trace is not None:
        path = Path(trace)
        trace = str(path.with_name(f"{path.stem}-{engine}{path.suffix}"))
    return replace(config, engine=engine, trace_file=trace)
