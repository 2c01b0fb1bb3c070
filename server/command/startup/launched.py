"""A server between its start and its end: the engine, the listeners, and the signals that have come.

Owns: the two signals, and the exit code where HTTP ends by itself.
Never: starts or ends any of it (launch.py, serving.py).
"""

import asyncio
import signal
from dataclasses import dataclass

from engine.frontend.client import AsyncEngine
from engine.options.engine_config import EngineConfig, ServerConfig
from server.edge.http.listening import Listeners

EXIT_HTTP_ENDED = 70
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Signals: the first asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._take)

    def restore(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A server whose engine is being loaded."""

    engine: AsyncEngine
    signals: Signals
    engine_config: EngineConfig
    server_config: ServerConfig
    listeners: Listeners
