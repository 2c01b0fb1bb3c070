"""Heartbeats from within a long step.

Owns: a thread of the engine process that posts a pulse while a step makes progress. On a slow CPU one step
may take longer than any sensible heartbeat timeout, and is no hang.
Never: posts while `progress` stands still, whatever the reason: that silence is the alarm.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from engine.process_messages import Pulse
from engine.processes.transport import PulseSide

_EVERY_S = 0.5


class StepPulse:
    """The thread, from `start` to `stop`. `progress` returns a number that grows while a step is computed."""

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


def pulse_of_steps(directory: Path) -> StepPulse:
    """Return a pulse that layers feed, and masks of grammars: a step of dear masks is no hang either."""
    # Not at the top: they import torch, which takes a second.
    from worker.attention.interface import num_layers_begun
    from worker.sampling.grammar_rows import num_masks_begun

    return StepPulse(directory, lambda: num_layers_begun() + num_masks_begun())
