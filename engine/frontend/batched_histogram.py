"""A histogram that observes many equal values at once, for events of every token.

Never: locks. One thread observes; a page rendered meanwhile in another thread may lack the latest values.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class BatchedHistogram(Collector):
    """A histogram that renders like prometheus_client's own, which takes one value at a time under a lock."""

    def __init__(
        self, name: str, text: str, *, buckets: tuple[float, ...], registry: CollectorRegistry | None
    ) -> None:
        """`registry` None: another collector renders it."""
        self._name = name
        self._text = text
        self._buckets = buckets
        self._nums = [0] * (len(buckets) + 1)
        """Count of each bucket alone; the last is for values above all bounds."""
        self._sum = 0.0
        if registry is not None:
            registry.register(self)

    def observe(self, value: float, *, num: int) -> None:
        self._nums[bisect_left(self._buckets, value)] += num
        self._sum += value * num

    def collect(self) -> Iterator[Metric]:
        names = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._nums)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def describe(self) -> Iterator[Metric]:
        """Yield the name, so that the registry refuses a second metric of this name."""
        yield HistogramMetricFamily(self._name, self._text)
