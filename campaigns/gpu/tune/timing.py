"""Time of a kernel's calls, in a graph, since launching most takes longer than computing them.

Owns: the measurement of one call.
Never: chooses what is measured.
"""

import time
from collections.abc import Callable, Sequence

from campaigns.gpu.device_facts import timed
from worker.devices.device import Device

_CALLS_OF_A_GRAPH = 32


def time_calls(calls: Sequence[Callable[[], object]], device: Device | None) -> float:
    """Measure the seconds of one call; the calls take turns, each with its own memory.

    Without a device the first is called once: to try the part, not the device.
    """
    if device is None:
        started_s = time.perf_counter()
        calls[0]()
        return time.perf_counter() - started_s
    repeats = max(1, _CALLS_OF_A_GRAPH // len(calls))

    def work() -> None:
        for _ in range(repeats):
            for call in calls:
                call()

    graph = device.capture(work)
    return timed(graph.replay, "cuda") / (repeats * len(calls))
