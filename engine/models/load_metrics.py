"""The metrics of a model that comes and goes.

Owns: the families; they are in the registry of the model's engine, so that its name is their label.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from engine.models.yard import YardPlace


class LoadMetrics(Collector):
    def __init__(self, place: YardPlace) -> None:
        self._place = place

    def collect(self) -> Iterator[Metric]:
        place = self._place
        loads = CounterMetricFamily("tokenyard:model_loads", "Ends of loads", labels=["result"])
        for result in ("loaded", "failed"):
            loads.add_metric([result], place.num_loads[result])
        yield loads
        about = "Time to load the model, with the time in which others left"
        num, sum_s = place.num_loads["loaded"], place.sum_load_s
        yield SummaryMetricFamily("tokenyard:model_load_seconds", about, count_value=num, sum_value=sum_s)
        unloads = CounterMetricFamily("tokenyard:model_unloads", "Models that left", labels=["reason"])
        for reason in ("idle", "evicted", "died"):
            unloads.add_metric([reason], place.num_unloads[reason])
        yield unloads
        yield GaugeMetricFamily("tokenyard:model_loaded", "1: it is loaded", value=place.is_loaded)
        about = "Requests that wait for the model to be loaded"
        yield GaugeMetricFamily("tokenyard:requests_waiting_for_model", about, value=len(place.waiting))
