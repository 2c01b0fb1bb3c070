"""vLLM's names for the engine's metrics, for boards, alerts, routers and autoscalers that ask for them.

Owns: the families called `vllm:`. Most say again what one of ours says, and are written when the page is
rendered; the phases of requests, which vLLM has as histograms of their own, are observed here.
Never: does anything for each token.
Source: the names, labels and meanings in vLLM's page of production metrics. Buckets are ours.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.frontend.batched_histogram import BatchedHistogram

_OURS, _THEIRS = "tokenyard:", "vllm:"
_PHASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
_TOKEN_TIME_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 131072)
_N_BUCKETS = (1, 2, 5, 10, 20)


class Timeline(NamedTuple):
    """The life of a request that has generated something. Seconds of one clock."""

    started_s: float
    first_token_s: float
    last_token_s: float
    num_tokens: int
    """Tokens of the longest choice."""
    num_computed_prompt_tokens: int
    """Prompt tokens that were in no cache."""


class Derived(NamedTuple):
    """A family whose values are computed from others."""

    name: str
    text: str
    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    value: Callable[[], Mapping[str, float] | float]
    """One value, or one by the value of `label`."""
    label: str = ""


class VllmMetrics(Collector):
    """The families of the page that begin with `vllm:`."""

    def __init__(
        self, model_name: str, twins: Iterable[Collector], derived: Iterable[Derived], *, engine: str
    ) -> None:
        """`engine` is the label of families that are not counted for each engine."""
        self._labels = {"model_name": model_name, "engine": engine}
        self._twins = tuple(twins)
        self._derived = tuple(derived)
        self._prefill = _histogram(
            "request_prefill_time_seconds", "First step to first token", _PHASE_BUCKETS
        )
        self._decode = _histogram("request_decode_time_seconds", "First token to last token", _PHASE_BUCKETS)
        self._inference = _histogram(
            "request_inference_time_seconds", "First step to last token", _PHASE_BUCKETS
        )
        self._token_time = _histogram(
            "request_time_per_output_token_seconds", "Mean of a request, after its first", _TOKEN_TIME_BUCKETS
        )
        self._num_max = _histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice", _LENGTH_BUCKETS
        )
        self._num_computed = _histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were in no cache", _LENGTH_BUCKETS
        )
        self._n = _histogram("request_params_n", "Choices asked for", _N_BUCKETS)
        self._max_tokens = _histogram(
            "request_params_max_tokens", "Tokens that a choice may have", _LENGTH_BUCKETS
        )
        self._histograms = (
            *(self._prefill, self._decode, self._inference, self._token_time),
            *(self._num_max, self._num_computed, self._n, self._max_tokens),
        )

    def request_admitted(self, *, n: int, max_tokens: int) -> None:
        """Observe the parameters of a request that generates."""
        self._n.observe(n, num=1)
        self._max_tokens.observe(max_tokens, num=1)

    def request_ended(self, timeline: Timeline) -> None:
        """Observe the phases of a request, however it ended."""
        decode_s = timeline.last_token_s - timeline.first_token_s
        self._prefill.observe(max(0.0, timeline.first_token_s - timeline.started_s), num=1)
        self._decode.observe(decode_s, num=1)
        self._inference.observe(max(0.0, timeline.last_token_s - timeline.started_s), num=1)
        if timeline.num_tokens > 1:
            self._token_time.observe(decode_s / (timeline.num_tokens - 1), num=1)
        self._num_max.observe(timeline.num_tokens, num=1)
        self._num_computed.observe(timeline.num_computed_prompt_tokens, num=1)

    def collect(self) -> Iterator[Metric]:
        for collector in (*self._twins, *self._histograms):
            for family in collector.collect():
                yield self._renamed(family)
        for derived in self._derived:
            yield self._family(derived)

    def _renamed(self, family: Metric) -> Metric:
        """Repeat a family under vLLM's name, with vLLM's labels beside its own."""
        renamed = Metric(_name(family.name), family.documentation, family.type)
        for sample in family.samples:
            renamed.add_sample(_name(sample.name), {**self._labels, **sample.labels}, sample.value)
        return renamed

    def _family(self, derived: Derived) -> Metric:
        labels = [*self._labels, *([derived.label] if derived.label else [])]
        family = derived.family(_THEIRS + derived.name, derived.text, labels=labels)
        value = derived.value()
        values: Mapping[str, float] = value if isinstance(value, Mapping) else {"": value}
        for word, number in values.items():
            family.add_metric([*self._labels.values(), *([word] if derived.label else [])], number)
        return family


def value_of(collector: Collector) -> float:
    """Sum the samples of a counter or gauge."""
    return sum(sample.value for family in collector.collect() for sample in family.samples)


def _name(name: str) -> str:
    return _THEIRS + name.removeprefix(_OURS).removeprefix(_THEIRS)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> BatchedHistogram:
    """Make a histogram that is collected with the others, and in no registry itself."""
    return BatchedHistogram(_THEIRS + name, text, buckets=buckets, registry=None)
