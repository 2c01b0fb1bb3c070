"""vLLM's names for the engine's metrics, for boards, alerts, routers and autoscalers that ask for them.

Owns: the families called `vllm:`. Most say again what one of ours says, and are written when the page is
rendered; the phases of requests, which vLLM has as histograms of their own, are observed here.
Never: does anything for each token.
Source: the names, labels and meanings in vLLM's page of production metrics. Buckets are ours.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.frontend.batched_histogram import BatchedHistogram

_THEIRS = "vllm:"
_PHASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
_TOKEN_TIME_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 131072)
_HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens of a step, the mean of those between two beats", _LENGTH_BUCKETS),
    "request_prefill_time_seconds": ("First step to first token", _PHASE_BUCKETS),
    "request_decode_time_seconds": ("First token to last token", _PHASE_BUCKETS),
    "request_inference_time_seconds": ("First step to last token", _PHASE_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean of a request, after its first", _TOKEN_TIME_BUCKETS),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice", _LENGTH_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens that were in no cache", _LENGTH_BUCKETS),
    "request_params_n": ("Choices asked for", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Tokens that a choice may have", _LENGTH_BUCKETS),
}
_SAME = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries", "prompt_tokens", "request_success"),
    *("admission_rejections", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_queue_time_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"),
    "request_generation_tokens",
)
_TWINS = {name: name for name in _SAME} | {
    "external_prefix_cache_hits": "prefix_cache_host_hits",
    "prompt_tokens_cached": "prefix_cache_hits",
    "spec_decode_num_draft_tokens": "draft_tokens",
    "spec_decode_num_accepted_tokens": "accepted_draft_tokens",
    "spec_decode_num_drafts": "verified_shares",
    "spec_decode_num_accepted_tokens_per_pos": "accepted_draft_tokens_per_pos",
}
"""Names of ours by theirs, where both mean the same."""


class Timeline(NamedTuple):
    """The life of a request that has generated something. Seconds of one clock."""

    started_s: float
    first_token_s: float
    last_token_s: float
    num_tokens: int
    """Tokens of the longest choice."""
    num_computed_prompt_tokens: int
    """Prompt tokens that were in no cache."""


class VllmMetrics(Collector):
    """The families of the page that begin with `vllm:`."""

    def __init__(self, model_name: str, ours: Mapping[str, Collector], *, num_engines: int) -> None:
        """`ours` are by name."""
        # Of families that are not counted for each engine.
        self._labels = {"model_name": model_name, "engine": "0" if num_engines == 1 else "all"}
        self._num_generated = [0] * num_engines
        self._ours = ours
        self._histograms = {
            name: BatchedHistogram(_THEIRS + name, text, buckets=buckets, registry=None)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def generated(self, engine: int, num_tokens: int) -> None:
        self._num_generated[engine] += num_tokens

    def stepped(self, num_steps: int, num_tokens: int) -> None:
        """Observe steps, which computed `num_tokens` together."""
        if num_steps > 0:
            self._observe("iteration_tokens_total", num_tokens / num_steps, num=num_steps)

    def request_admitted(self, *, n: int, max_tokens: int) -> None:
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def request_ended(self, timeline: Timeline) -> None:
        """Observe the phases of a request, however it ended."""
        decode_s = timeline.last_token_s - timeline.first_token_s
        prefill_s = max(0.0, timeline.first_token_s - timeline.started_s)
        self._observe("request_prefill_time_seconds", prefill_s)
        self._observe("request_decode_time_seconds", decode_s)
        inference_s = max(0.0, timeline.last_token_s - timeline.started_s)
        self._observe("request_inference_time_seconds", inference_s)
        if timeline.num_tokens > 1:
            token_s = decode_s / (timeline.num_tokens - 1)
            self._observe("request_time_per_output_token_seconds", token_s)
        self._observe("request_max_num_generation_tokens", timeline.num_tokens)
        self._observe("request_prefill_kv_computed_tokens", timeline.num_computed_prompt_tokens)

    def _observe(self, name: str, value: float, *, num: int = 1) -> None:
        self._histograms[name].observe(value, num=num)

    def collect(self) -> Iterator[Metric]:
        for name, ours in _TWINS.items():
            for family in self._ours[ours].collect():
                yield self._renamed(family, _THEIRS + name)
        for histogram in self._histograms.values():
            for family in histogram.collect():
                yield self._renamed(family, family.name)
        generated = CounterMetricFamily(
            _THEIRS + "generation_tokens", "Tokens generated", labels=[*self._labels]
        )
        for engine, num_tokens in enumerate(self._num_generated):
            generated.add_metric([self._labels["model_name"], str(engine)], num_tokens)
        yield generated
        yield from self._derived()

    def _renamed(self, family: Metric, name: str) -> Metric:
        """Repeat a family under vLLM's name, with vLLM's labels added to its own."""
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            renamed.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
        return renamed

    def _derived(self) -> Iterator[Metric]:
        """Families computed from ours. vLLM's word `external` means the swap space here."""
        found, on_host = self._sum("prefix_cache_hits"), self._sum("prefix_cache_host_hits")
        on_device = found - on_host
        asked_of_host = self._sum("prefix_cache_queries") - on_device
        sources = {
            "local_compute": max(0.0, self._sum("prompt_tokens") - found),
            "local_cache_hit": on_device,
            "external_kv_transfer": on_host,
        }
        waiting = {"capacity": self._sum("num_requests_waiting"), "deferred": 0.0}
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        add = self._family
        yield add(counter, "prefix_cache_hits", "Prompt tokens found on the device", {"": on_device})
        yield add(counter, "external_prefix_cache_queries", "Tokens asked of the host", {"": asked_of_host})
        yield add(counter, "prompt_tokens_by_source", "Prompt tokens by source", sources, "source")
        preempted = {"": self._sum("num_preemptions")}
        yield add(counter, "num_preemptions", "Sequences that gave up their blocks", preempted)
        yield add(gauge, "num_requests_waiting_by_reason", "Waiting sequences", waiting, "reason")

    def _family(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        values: Mapping[str, float],
        label: str = "",
    ) -> Metric:
        family = kind(_THEIRS + name, text, labels=[*self._labels, *([label] if label else [])])
        for word, value in values.items():
            family.add_metric([*self._labels.values(), *([word] if label else [])], value)
        return family

    def _sum(self, name: str) -> float:
        return sum(sample.value for family in self._ours[name].collect() for sample in family.samples)
