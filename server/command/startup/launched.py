"""A server between its start and its end: the engines, the listeners, and the signals that have come.

Owns: the two signals, and the exit code where HTTP ends by itself.
"""

import asyncio
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.options.engine_config import ServerConfig
from server.edge.http.listening import Listeners

if TYPE_CHECKING:  # names alone: launch.py makes both
    from engine.models.engines import ModelEngines
    from engine.models.entries import ModelSpec

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
    """A server whose models are being loaded."""

    engines: "ModelEngines"
    signals: Signals
    models: "tuple[ModelSpec, ...]"
    server_config: ServerConfig
    listeners: Listeners
