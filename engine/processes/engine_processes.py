"""The engines behind one API process: each a line of engine processes, where a dead one is replaced.

Owns: start, death and replacement with back-off, and the kill of a process that hangs; at most one process of
an engine at a time; the time since the last message of a loaded one, and the limit on it; the configuration
of each engine, and the end of the server when the last one is given up.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

import zmq

from engine.options.engine_config import EngineConfig
from engine.process_messages import Ready, Shutdown, StartFailed, ToClient, ToEngine
from engine.processes.child_process import EXIT_START_FAILED, describe_exit
from engine.processes.supervisor import EngineProcess
from worker.machine import num_killed_for_memory

log = logging.getLogger(__name__)

EXIT_CRASH_LOOP = EXIT_DIED = 70
_MAX_DEATHS, _DEATHS_WINDOW_S = 3, 300.0
_FIRST_BACK_OFF_S = 1.0
_GOODBYE_S = 2.0
_MAX_RECEIVING_S = 0.05
"""Longest time for taking in messages without a pause. If messages come faster than they are passed on, the
receiving task would never yield; so readers wait at most this long, and get the outputs merged."""
_STACKS_S = 1.0
"""Time for a hung process to write its stacks. One that is stopped, or waits in the kernel, never does."""


_LONGEST_INTERVAL_S = 0.5


class HangWatch:
    """The watch over one process. Silence counts only while this event loop itself moves.

    A frozen container or a stopped API process, which leaves the engine's beats unread, is no hang.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = min(timeout_s / 8, _LONGEST_INTERVAL_S)
        self._silent_s = 0.0
        self._is_loaded = False

    def loaded(self) -> None:
        """Note that the model is loaded: silence counts from now on."""
        self._is_loaded = True
        self._silent_s = 0.0

    def moved(self) -> None:
        self._silent_s = 0.0

    @property
    def is_hanging(self) -> bool:
        return self._silent_s > self._timeout_s

    async def until_hang(self) -> float:
        """Wait until the process has been silent for too long; return the seconds of silence."""
        last_s = time.monotonic()
        while not self.is_hanging:
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            if self._is_loaded:
                self._silent_s += min(now_s - last_s, 2 * self._interval_s)
            last_s = now_s
        return self._silent_s


class DeathCause(StrEnum):
    """Causes of a replacement; a label of the metrics."""

    CRASH = "crash"  # it ended by itself
    HANG = "hang"  # it stood still and was killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The unexpected end of a process."""

    cause: DeathCause
    what: str
    """Text for people, as the end of a sentence: `was killed by signal SIGSEGV`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """The reason why no further engine process is started."""

    what: str
    fix: str
    exit_code: int


class EngineProcesses:
    """Keeps one engine process alive. Run `run` as a task; it returns when no further process is started."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ToClient], None],
        on_death: Callable[[Death], None],
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._on_death = on_death
        self._process: EngineProcess | None = None
        self.begun = asyncio.Event()
        """Set once the first process was started, or could not be."""
        self._stopping = asyncio.Event()
        self._is_replacing = True
        self._deaths_s: deque[float] = deque(maxlen=_MAX_DEATHS + 1)
        self._start_failure: StartFailed | None = None
        self._has_been_ready = False
        self._spare: EngineProcess | None = None
        self._num_received = 0
        """Messages received, from all processes."""

    def send(self, message: ToEngine) -> None:
        """Post a message. It is lost without a process; its requests then fail or are held by `on_death`."""
        if self._process is not None:
            self._process.side.send(message)

    async def run(self) -> GaveUp | None:
        """Run processes until that is given up; return why, or None after `stop`."""
        while not self._stopping.is_set():
            death = await self._run_process()
            if self._stopping.is_set():
                return None
            gave_up = self._judge(death)
            if gave_up is not None:
                log.critical("%s", gave_up.what)
                return gave_up
            back_off_s = _FIRST_BACK_OFF_S * 2 ** (len(self._deaths_s) - 1)
            log.critical("the engine process is replaced in %.0f s", back_off_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), back_off_s)
        return None

    async def stop(self) -> None:
        """Ask the process to end, then kill it."""
        self._stopping.set()
        if self._process is not None:
            self.send(Shutdown())
            await self._process.stop(grace_s=_GOODBYE_S)

    def resume(self, spare: EngineProcess | None = None) -> None:
        """Let `run` be called again after `stop`, as if no process had died, first with the spare one."""
        self._spare = spare
        self._stopping.clear()
        self._deaths_s.clear()
        self._start_failure = None
        self._has_been_ready = False

    def stop_replacing(self) -> None:
        """Let the present process go on, but start no other after it."""
        self._is_replacing = False

    async def _run_process(self) -> Death:
        num_killed = num_killed_for_memory()
        try:
            process, self._spare = self._spare, None
            if process is None:
                process = await EngineProcess.start(self._config)
            else:
                process.configure(self._config)
        except (OSError, zmq.ZMQError) as error:
            return Death(cause=DeathCause.CRASH, what=f"could not be started: {error}")
        finally:
            self.begun.set()
        self._process = process
        watch = HangWatch(timeout_s=self._config.heartbeat_timeout_s)
        receiver = asyncio.create_task(self._receive(process, watch))
        try:
            if self._stopping.is_set():  # while it was started
                process.kill()
            death = _explained(await self._until_death(process, receiver, watch), num_killed)
            await self._receive_the_rest(receiver)
        finally:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
            process.kill()
            self._process = None
            process.clean_up()
        if not self._stopping.is_set():
            log.critical("the engine process (pid %d) %s", process.pid, death.what)
            self._on_death(death)
        return death

    async def _until_death(
        self, process: EngineProcess, receiver: "asyncio.Task[None]", watch: HangWatch
    ) -> Death:
        """Wait until the process ends, or kill it because it hangs or sends an invalid message."""
        dying = asyncio.create_task(process.wait())
        hanging = asyncio.create_task(watch.until_hang())
        try:
            while True:
                await asyncio.wait([dying, receiver, hanging], return_when=asyncio.FIRST_COMPLETED)
                if dying.done():
                    return Death(cause=DeathCause.CRASH, what=describe_exit(dying.result()))
                if not hanging.done():
                    break
                await _log_stacks(process, dying, hanging.result())
                if watch.is_hanging:
                    process.kill()
                    await dying
                    what = f"stood still for {hanging.result():.0f} s and was killed"
                    return Death(cause=DeathCause.HANG, what=what)
                log.warning("the engine process (pid %d) moves again", process.pid)
                hanging = asyncio.create_task(watch.until_hang())
            # A message that cannot be read has ended the receiver: no further one would be taken in.
            log.critical("a message of the engine process cannot be taken in", exc_info=receiver.exception())
            process.kill()
            return Death(cause=DeathCause.CRASH, what=describe_exit(await dying))
        finally:
            hanging.cancel()
            dying.cancel()
            await asyncio.gather(hanging, dying, return_exceptions=True)

    async def _receive(self, process: EngineProcess, watch: HangWatch) -> None:
        pause_due_s = time.monotonic() + _MAX_RECEIVING_S
        while True:
            if time.monotonic() > pause_due_s:
                await asyncio.sleep(0)
                pause_due_s = time.monotonic() + _MAX_RECEIVING_S
            message = await process.side.receive()
            watch.moved()
            self._num_received += 1
            if isinstance(message, StartFailed):
                self._start_failure = message
                continue
            if isinstance(message, Ready):
                watch.loaded()
                self._has_been_ready = True
                worker = replace(self._config.worker, is_replacement=True)
                self._config = replace(self._config, worker=worker)
            self._on_message(message)

    async def _receive_the_rest(self, receiver: "asyncio.Task[None]") -> None:
        """Take in messages that the dead process had sent; the socket holds them already."""
        num_received = -1
        while num_received != self._num_received:  # the receiver may have a backlog of more than one wait
            num_received = self._num_received
            await asyncio.wait([receiver], timeout=_MAX_RECEIVING_S)

    def _judge(self, death: Death) -> GaveUp | None:
        failure, self._start_failure = self._start_failure, None
        if failure is not None and not self._has_been_ready:
            return GaveUp(what=failure.what, fix=failure.fix, exit_code=EXIT_START_FAILED)
        if failure is not None:  # it has started with this configuration before: memory may come back
            log.critical("%s: %s", failure.what, failure.fix)
        if not self._is_replacing:
            return GaveUp(
                what=f"the engine process {death.what}", fix="start the server again", exit_code=EXIT_DIED
            )
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - _DEATHS_WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) > _MAX_DEATHS:
            return GaveUp(
                what=f"the engine process died {len(self._deaths_s)} times in {_DEATHS_WINDOW_S:.0f} s, "
                f"last: it {death.what}",
                fix=failure.fix if failure is not None else "the log above says what each one died of",
                exit_code=EXIT_CRASH_LOOP,
            )
        return None


async def _log_stacks(process: EngineProcess, dying: "asyncio.Task[int]", silent_s: float) -> None:
    """Let a hung process write its stacks to the log, if it still can."""
    log.critical(
        "the engine process (pid %d) has not moved for %.0f s: where it stands follows, if it can tell",
        process.pid,
        silent_s,
    )
    process.ask_for_stacks()
    await asyncio.wait([dying], timeout=_STACKS_S)


def _explained(death: Death, num_killed_before: int) -> Death:
    """Add that the kernel has killed for want of memory meanwhile: of that a process cannot tell itself."""
    num_killed = num_killed_for_memory() - num_killed_before
    if num_killed <= 0 or death.cause is DeathCause.HANG:
        return death
    reason = f"the kernel has killed {num_killed} process(es) of this control group for want of memory"
    return replace(death, what=f"{death.what}; meanwhile {reason}: its limit is too low, or the machine full")


class EngineGroup:
    """All engines. Run `run` as a task; it returns when no further process is started for any."""

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[int, ToClient], None],
        on_death: Callable[[int, Death], None],
        *,
        on_given_up: Callable[[int], None],
    ) -> None:
        """`on_given_up`: for an engine of which no process is started any more, while others go on."""
        self._on_given_up = on_given_up
        self._engines = [
            EngineProcesses(
                config_of(config, engine),
                on_message=partial(on_message, engine),
                on_death=partial(on_death, engine),
            )
            for engine in range(config.num_engines)
        ]

    @property
    def pids(self) -> list[int | None]:
        """Process id of each engine; None while it has no process."""
        return [each._process.pid if each._process else None for each in self._engines]

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
                    if end is not None and end.exit_code == EXIT_START_FAILED:
                        return end
                    if end is not None and len(pending) > 1:
                        log.critical("engine %d is given up: %s; the others go on", number, end.fix)
                        self._on_given_up(number)
        finally:
            await self._end(running)
        return ends[-1]

    async def stop(self) -> None:
        """Ask all processes to end, then kill them."""
        await asyncio.gather(*(each.stop() for each in self._engines))

    def resume(self, spare: EngineProcess | None = None) -> None:
        """Let `run` be called again after `stop`; the spare process becomes the first engine's."""
        for number, each in enumerate(self._engines):
            each.resume(None if number else spare)

    def stop_replacing(self) -> None:
        """Let the present processes go on, but start no other after them."""
        for each in self._engines:
            each.stop_replacing()

    async def _end(self, running: "dict[asyncio.Task[GaveUp | None], int]") -> None:
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
