"""Signs of life from within a long step.

Owns: a thread of the engine process that says so while a step gets on: on a slow CPU one step may take longer
than any sensible heartbeat timeout, and must not be taken for a hang.
Never: says anything while `progress` stands still, whatever the reason: that silence is the alarm.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from engine.process_messages import Pulse
from engine.processes.transport import PulseSide

_EVERY_S = 0.5


class StepPulse:
    """Use `start`, then `stop`. `progress` is any number that grows while a step gets on."""

    def __init__(self, directory: Path, progress: Callable[[], int]) -> None:
        self._directory = directory
        self._progress = progress
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        side = PulseSide(self._directory)
        last = self._progress()
        try:
            while not self._stopping.wait(_EVERY_S):
                now = self._progress()
                if now != last:
                    side.send(Pulse())
                last = now
        finally:
            side.close()
