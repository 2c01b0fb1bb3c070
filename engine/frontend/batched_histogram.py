"""A histogram that takes in many equal values at once, for what happens to every token.

Owns: its buckets.
Never: locks: one thread observes. A page that is rendered meanwhile in another may lack the latest values.
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class BatchedHistogram(Collector):
    """On the page as prometheus_client's own Histogram, which takes one value at a time, under a lock."""

    def __init__(
        self, name: str, text: str, *, buckets: tuple[float, ...], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self._nums = [0] * (len(buckets) + 1)
        """Of each bucket alone; the last has what is above all of them."""
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, *, num: int) -> None:
        """So many times."""
        self._nums[bisect_left(self._buckets, value)] += num
        self._sum += value * num

    def collect(self) -> Iterator[Metric]:
        names = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._nums)), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)

    def describe(self) -> Iterator[Metric]:
        """Names only, so that the registry refuses a second metric of this name."""
        yield HistogramMetricFamily(self._name, self._text)
