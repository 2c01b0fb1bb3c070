"""The end of a server: the signals that ask for it, and the exit code where HTTP ends by itself."""

import asyncio
import signal

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
