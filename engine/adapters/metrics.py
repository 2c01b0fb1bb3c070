"""Metrics of adapters: who runs and who waits with which, and which are in memory.

Owns: vLLM's gauge that routers choose a server by, with running and waiting apart as the scheduler has them.
Never: counts by itself: it says again what the last beat said.
Source: vllm:lora_requests_info, as the inference gateway of Kubernetes reads it: its value is the time.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.process_messages import AdapterUse
from engine.types import ServedAdapter


class AdapterMetrics(Collector):
    """The families, on a server that computes adapters."""

    def __init__(
        self,
        max_adapters: int,
        served: Callable[[], tuple[ServedAdapter, ...]],
        in_line: Callable[[], tuple[str, ...]],
    ) -> None:
        """`in_line` returns the identities that requests wait with which no engine has yet."""
        self._max_adapters = max_adapters
        self._served, self._in_line = served, in_line
        self._uses: dict[int, AdapterUse] = {}

    def beat(self, engine: int, use: AdapterUse | None) -> None:
        """Take the use that an engine process reports; None: it reports none, or is gone."""
        self._uses[engine] = use or AdapterUse()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        requests = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use; the time", labels=labels)
        uses = self._uses.values()
        running = _names([use.running for use in uses])
        waiting = _names([*(use.waiting for use in uses), self._in_line()])
        values = [str(self._max_adapters), running, waiting]
        requests.add_metric(values, time.time())
        yield requests
        in_memory = GaugeMetricFamily(
            "tokenyard:adapter_in_memory",
            "Engines that have the adapter in memory; 0: it is read when it is needed",
            labels=["adapter", "rank"],
        )
        for adapter in self._served():
            num_engines = sum(adapter.identity in use.resident for use in uses)
            in_memory.add_metric([adapter.name, str(adapter.rank)], num_engines)
        yield in_memory


def _names(identities: Iterable[tuple[str, ...]]) -> str:
    """List names; an adapter that was loaded again while the older one runs is listed once."""
    return ",".join(sorted({identity.rpartition("@")[0] for identity in chain(*identities)}))
