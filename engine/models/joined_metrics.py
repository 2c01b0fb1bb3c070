"""One page of the metrics of several models.

Owns: that each family stands there once, its samples with the label `model_name`, and which families are of
the process and not of a model.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

_OF_THE_PROCESS = ("process_", "tokenyard:build_info")


class JoinedRegistry:
    """The registries of several models and that of their server, as one that can be rendered."""

    def __init__(self, server: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> None:
        """`models` are by the name that their samples get."""
        self._server = server
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, registry in self._models.items():
            for family in registry.collect():
                is_of_model = not family.name.startswith(_OF_THE_PROCESS)
                if family.name not in families:
                    families[family.name] = Metric(family.name, family.documentation, family.type)
                elif not is_of_model:
                    continue
                label = {"model_name": model} if is_of_model else {}
                samples = [each._replace(labels={**label, **each.labels}) for each in family.samples]
                families[family.name].samples += samples
        yield from families.values()
        yield from self._server.collect()
