"""The lives of the engine process: a dead one is replaced, unless that is hopeless.

Owns: birth, death and rebirth with back-off; at most one process at a time.
Never: requests (client.py) or what a message means beyond a failed start.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.messages import Shutdown, StartFailed, ToClient, ToEngine
from engine.process import EXIT_START_FAILED
from engine.supervisor import EngineProcess

log = logging.getLogger(__name__)

EXIT_CRASH_LOOP = 70
_MAX_DEATHS, _DEATHS_WINDOW_S = 3, 300.0
_FIRST_BACK_OFF_S = 1.0
_GOODBYE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """Why there will be no further engine process."""

    what: str
    fix: str
    exit_code: int


class EngineLives:
    """Run `run` as a task; it returns when there will be no further life."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_message: Callable[[ToClient], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._config = config
        self._on_message = on_message
        self._on_death = on_death
        self._process: EngineProcess | None = None
        self._is_stopping = False
        self._deaths_s: deque[float] = deque(maxlen=_MAX_DEATHS + 1)
        self._start_failure: StartFailed | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def send(self, message: ToEngine) -> None:
        """Lost if nobody lives; then whoever waits for an answer was told, or will be."""
        if self._process is not None:
            self._process.side.send(message)

    async def run(self) -> GaveUp | None:
        """None after `stop`."""
        while not self._is_stopping:
            exit_code = await self._live()
            if self._is_stopping:
                return None
            gave_up = self._judge(exit_code)
            if gave_up is not None:
                log.critical("%s", gave_up.what)
                return gave_up
            back_off_s = _FIRST_BACK_OFF_S * 2 ** (len(self._deaths_s) - 1)
            log.critical("the engine process is replaced in %.0f s", back_off_s)
            await asyncio.sleep(back_off_s)
        return None

    async def stop(self) -> None:
        """Ask it to leave, then insist."""
        self._is_stopping = True
        if self._process is not None:
            self.send(Shutdown())
            await self._process.stop(grace_s=_GOODBYE_S)

    async def _live(self) -> int:
        process = await EngineProcess.start(self._config)
        self._process = process
        receiver = asyncio.create_task(self._receive(process))
        try:
            exit_code = await process.wait()
            # What it said before it died still counts; the socket holds it already.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(receiver), 0.05)
        finally:
            receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiver
            process.kill()
            self._process = None
            process.clean_up()
        if not self._is_stopping:
            cause = _describe(exit_code)
            log.critical("the engine process (pid %d) %s", process.pid, cause)
            self._on_death(cause)
        return exit_code

    async def _receive(self, process: EngineProcess) -> None:
        while True:
            message = await process.side.receive()
            if isinstance(message, StartFailed):
                self._start_failure = message
            else:
                self._on_message(message)

    def _judge(self, exit_code: int) -> GaveUp | None:
        if self._start_failure is not None:
            failure = self._start_failure
            return GaveUp(what=failure.what, fix=failure.fix, exit_code=EXIT_START_FAILED)
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - _DEATHS_WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) > _MAX_DEATHS:
            return GaveUp(
                what=f"the engine process died {len(self._deaths_s)} times in {_DEATHS_WINDOW_S:.0f} s, "
                f"last: it {_describe(exit_code)}",
                fix="the log above says what each one died of",
                exit_code=EXIT_CRASH_LOOP,
            )
        return None


def _describe(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = str(-exit_code)
    return f"was killed by signal {name}"
