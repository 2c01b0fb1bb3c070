"""The engine's metrics for Prometheus.

Owns: every metric of queue, cache and latency, in one registry. Labels come from configured sets only.
Never: formats anything per token; children with labels are resolved once.

Definitions: a request arrives when it reaches AsyncEngine, tokenized. Queue time runs from its arrival in the
engine process to its first step; time to first token from arrival to the first token in the API process;
inter-token latency between two tokens of one choice, preemptions included.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from engine.errors import Overloaded, OverloadReason
from engine.frontend.batched_histogram import BatchedHistogram
from engine.frontend.vllm_metrics import Timeline, VllmMetrics
from engine.logs.setup import num_dropped_lines
from engine.process_messages import Beat, StepTimes
from engine.processes.engine_processes import DeathCause
from engine.reports.live_load import LiveCounts, LiveLoad
from engine.text.template_messages import MergeReason
from engine.types import Health, ModelInfo
from engine.version import VERSION
from scheduler.counters import SchedulerStats
from scheduler.messages import FinishReason, PreemptionCause, WaitReason

# From a short queue on a fast device to a queue of minutes; from a small model's tokens to a stutter. Few
# buckets: a page of over 300 lines is rendered slowly, and some routers read it every 50 ms.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 131072)
_ERROR_BUCKETS = (-10.0, -2.5, -1.0, -0.5, -0.2, 0.2, 0.5, 1.0, 2.5, 10.0)
# Few: each band has a set of them.
_BAND_BUCKETS = (0.5, 2.5, 10.0, 60.0)


class AbortCause(StrEnum):
    """Causes that cut a correct request short."""

    CLIENT_LEFT = "client_left"
    SHUTDOWN = "shutdown"  # the time to drain was over
    ENGINE_DIED = "engine_died"


class Telemetry(StrEnum):
    """Kinds of telemetry that are dropped rather than waited for."""

    API_LOG_LINES = "api_log_lines"
    ENGINE_LOG_LINES = "engine_log_lines"
    SPANS = "spans"


class PriorityBand(StrEnum):
    """Bands of priorities: labels must be few, and priorities are any integers."""

    URGENT = "urgent"  # below 0
    NORMAL = "normal"  # 0
    BACKGROUND = "background"  # above 0


def band_of(priority: int) -> PriorityBand:
    if priority == 0:
        return PriorityBand.NORMAL
    return PriorityBand.URGENT if priority < 0 else PriorityBand.BACKGROUND


_EXPORTED = tuple(each for each in dataclasses.fields(SchedulerStats) if each.metadata)
"""Counters of a scheduler that are exported as they are."""

# Tables of metrics: name, and text; with a label, its name and values.
_GAUGES_OF_ENGINES = {
    "num_requests_running": "Sequences that take part in the steps",
    "num_requests_waiting": "Sequences that wait for a place or for memory",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1; cached but free ones not counted",
    "num_requests_swapped": "Sequences whose KV waits in host memory",
    "swap_space_usage_perc": "Share of the swap space in use, 0 to 1",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests",
    "generation_tokens": "Tokens generated",
    "requests_replayed": "Requests of an engine process that died, with which the next one went on",
}
_COUNTERS_BY_WORD: dict[str, tuple[str, str, Iterable[str]]] = {
    "step_time_seconds": ("Time of the step loop, by part", "part", ("schedule", "execute", "update")),
    "engine_restarts": ("Engine processes that died and were replaced", "cause", DeathCause),
    "admission_rejections": ("Requests refused because too much waited", "reason", OverloadReason),
    "request_aborts": ("Requests that were cut short", "cause", AbortCause),
    "telemetry_dropped": ("Lines of the log, or spans, that no reader took in time", "what", Telemetry),
    "merged_turns": ("Chats whose turns were merged for the chat template", "reason", MergeReason),
    "request_success": ("Choices by how they ended", "finished_reason", FinishReason),
}
_COUNTERS_OF_PICTURES = {
    "pictures": ("Pictures of requests", "outcome", ("prepared", "found", "refused")),
    "picture_seconds": ("Time of pictures, in their process and before it", "part", ("process", "wait")),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token", _LATENCY_BUCKETS),
    "request_queue_time_seconds": ("Until first part of a step", _LATENCY_BUCKETS),
    "predicted_first_token_seconds": ("Arrival to first token, as foreseen at admission", _LATENCY_BUCKETS),
    "predicted_first_token_error_seconds": ("Foreseen less real time to first token", _ERROR_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival to the last output", _LATENCY_BUCKETS[2:]),
    "request_prompt_tokens": ("Prompt lengths", _LENGTH_BUCKETS),
    "request_generation_tokens": ("Tokens generated by a choice", _LENGTH_BUCKETS),
}


class EngineMetrics:
    """Metrics that AsyncEngine feeds and the server renders from `registry`."""

    def __init__(
        self, model_name: str, *, num_engines: int = 1, target_first_token_s: float | None = None
    ) -> None:
        # A third of all lines, and of no use.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._model_name = model_name
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._num_engines = num_engines
        self.live_load = LiveLoad(num_engines)
        self._last_times: dict[int, StepTimes] = {}
        self._last_dropped: dict[tuple[Telemetry, int], int] = {}
        self._families: dict[str, Collector] = {}
        """Metrics that vLLM's names may repeat, by name."""
        self._of_engines: dict[tuple[str, int], Gauge] = {}
        self._counted: dict[tuple[str, str], Counter] = {}
        """Counters by name and by the value of their label; empty without one."""
        self._histograms: dict[str, Histogram] = {}
        self._ranks: Gauge | None = None
        self._make_gauges(target_first_token_s)
        self._make_counters()
        self._make_histograms()
        self._vllm = VllmMetrics(model_name, self._families, num_engines=num_engines)
        self.registry.register(self._vllm)

    def model_is_ready(self, engine: int, info: ModelInfo) -> None:
        """Publish the facts that cluster routers read from labels."""
        labels = {
            "model_name": self._model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
        }
        self._cache_info.clear()
        self._cache_info.labels(**labels).set(1)
        self._forget(engine)
        self._set_of_engine("engine_ready", engine, 1)
        if info.num_ranks > 1:
            self._count_ranks(info.num_ranks)
        for name, counter in _COUNTERS_OF_PICTURES.items() if info.vision is not None else ():
            if name not in self._families:
                self._make_counter(name, *counter)

    def _count_ranks(self, num: int) -> None:
        if self._ranks is None:  # made by the first ranks: most models are not divided
            self._ranks = Gauge("tokenyard:ranks", "Processes that compute the model", registry=self.registry)
            text = "Time of rank 0 in exchanges, by part"
            self._make_counter("rank_time_seconds", text, "part", ("exchange", "wait"))
        self._ranks.set(num)

    def watch_health(self, health: Callable[[], Health]) -> None:
        """Ask for the health at each scrape, so that the page agrees with the probes."""
        self._ready.set_function(lambda: health().is_welcoming)
        self._live.set_function(lambda: health().is_live)

    def engine_is_gone(self, engine: int) -> None:
        self._forget(engine)
        for name in ("num_requests_swapped", "kv_cache_usage_perc", "swap_space_usage_perc", "engine_ready"):
            self._set_of_engine(name, engine, 0)
        self._kv_blocks.clear()  # of other engines the next beats tell
        if self._ranks is not None and not self.live_load.last:
            self._ranks.set(0)

    def _forget(self, engine: int) -> None:
        """Forget the counts of an engine's last process: a fresh one counts from zero."""
        self.live_load.last.pop(engine, None)
        self._last_times.pop(engine, None)
        self._last_dropped.pop((Telemetry.ENGINE_LOG_LINES, engine), None)

    def watch_load(self, counts: Callable[[int], LiveCounts]) -> None:
        """Ask for the live sequences of each engine at each scrape."""
        self.live_load.counts = counts

    def look(self) -> None:
        """Set the gauges of what runs and waits now. Called by the event loop before a page is rendered."""
        for engine in range(self._num_engines):
            self._set_of_engine("num_requests_running", engine, self.live_load.num_running(engine))
            self._set_of_engine("num_requests_waiting", engine, self.live_load.num_waiting(engine))
        for reason, gauge in self._waiting_by_reason.items():
            gauge.set(self.live_load.num_waiting_for(reason))

    @property
    def wait_reason(self) -> str:
        """Reason why most sequences wait, as of the last beats."""
        return self.live_load.wait_reason.value

    def count(self, name: str, word: str = "", *, num: float = 1) -> None:
        """Add to a counter of the tables above; `word` is the value of its label."""
        self._counted[name, word].inc(num)

    def beat(self, engine: int, beat: Beat) -> None:
        """Set gauges to their values, and raise counters by the difference to the last beat."""
        stats = beat.stats
        last = self.live_load.last.get(engine) or SchedulerStats(num_blocks=stats.num_blocks)
        self.live_load.last[engine] = stats
        for each in _EXPORTED:
            num = getattr(stats, each.name) - getattr(last, each.name)
            self._counted[each.metadata["name"], ""].inc(num)
        for key, num in stats.num_preemptions.items():
            self._preemptions[key].inc(num - last.num_preemptions[key])
        before = (*last.num_accepted_by_place, *[0] * len(stats.num_accepted_by_place))
        for place, num in enumerate(stats.num_accepted_by_place):
            self._accepted_places.labels(str(place)).inc(num - before[place])
        num_tokens = stats.num_scheduled_tokens - last.num_scheduled_tokens
        self._vllm.stepped(stats.num_steps - last.num_steps, num_tokens)
        self._set_of_engine("kv_cache_usage_perc", engine, stats.num_used_blocks / stats.num_blocks)
        self._set_of_engine("num_requests_swapped", engine, stats.num_swapped)
        if stats.num_host_blocks:
            share = stats.num_used_host_blocks / stats.num_host_blocks
            self._set_of_engine("swap_space_usage_perc", engine, share)
        for group in beat.groups:
            for use, num in (("held", group.num_held), ("findable", group.num_findable)):
                self._kv_blocks.labels(group.name, use, str(engine)).set(num)
        self._take_times(engine, beat.times)
        self._take_dropped_lines(engine, beat.num_dropped_log_lines)

    def _take_dropped_lines(self, engine: int, num_of_engine: int) -> None:
        """Count dropped lines of an engine's process and of this one; each counts from its own start."""
        now = {
            (Telemetry.API_LOG_LINES, 0): num_dropped_lines(),
            (Telemetry.ENGINE_LOG_LINES, engine): num_of_engine,
        }
        for key, num in now.items():
            self._counted["telemetry_dropped", key[0]].inc(num - self._last_dropped.get(key, 0))
        self._last_dropped |= now

    def _take_times(self, engine: int, times: StepTimes) -> None:
        last, self._last_times[engine] = self._last_times.get(engine, StepTimes()), times
        for (name, part), counter in self._counted.items():
            if name in ("step_time_seconds", "rank_time_seconds"):
                counter.inc(getattr(times, f"{part}_s") - getattr(last, f"{part}_s"))

    def tokens_of_engine(self, engine: int, num_tokens: int) -> None:
        """Count new tokens by engine, where vLLM's names do."""
        self._vllm.generated(engine, num_tokens)

    def tokens_arrived(self, num_by_gap: Mapping[float, int]) -> None:
        """Count further tokens of choices, by the seconds since the token before."""
        self._counted["generation_tokens", ""].inc(sum(num_by_gap.values()))
        for gap_s, num in num_by_gap.items():
            self._inter_token.observe(gap_s, num=num)

    def first_token_arrived(self, num_tokens: int, since_arrival_s: float, priority: int) -> None:
        self._counted["generation_tokens", ""].inc(num_tokens)
        self._histograms["time_to_first_token_seconds"].observe(since_arrival_s)
        self._first_token_of_band[band_of(priority)].observe(since_arrival_s)

    def observe(self, name: str, value: float) -> None:
        """Observe a value of a histogram of the table above."""
        self._histograms[name].observe(value)

    def choice_finished(self, reason: FinishReason, num_tokens: int) -> None:
        self._counted["request_success", reason].inc()
        self._histograms["request_generation_tokens"].observe(num_tokens)

    def request_admitted(self, num_prompt_tokens: int) -> None:
        self._counted["prompt_tokens", ""].inc(num_prompt_tokens)
        self._histograms["request_prompt_tokens"].observe(num_prompt_tokens)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count an Overloaded that is raised inside, by its reason."""
        try:
            yield
        except Overloaded as error:
            self._counted["admission_rejections", error.reason].inc()
            raise

    def turns_merged(self, reason: MergeReason) -> None:
        """Count a chat whose turns were merged for its template. Called by any thread."""
        self._counted["merged_turns", reason].inc()

    def spans_dropped(self, num: float) -> None:
        """Count spans that the trace collector did not take. Called by any thread."""
        self._counted["telemetry_dropped", Telemetry.SPANS].inc(num)

    def params_admitted(self, *, n: int, max_tokens: int) -> None:
        self._vllm.request_admitted(n=n, max_tokens=max_tokens)

    def request_finished(self, since_arrival_s: float, timeline: Timeline | None) -> None:
        """Observe a request's end; `timeline` None: it has generated nothing."""
        self._histograms["e2e_request_latency_seconds"].observe(since_arrival_s)
        if timeline is not None:
            self._vllm.request_ended(timeline)

    def _make_gauges(self, target_first_token_s: float | None) -> None:
        self._ready = Gauge("tokenyard:ready", "1 while requests are welcome", registry=self.registry)
        self._live = Gauge("tokenyard:live", "0 while the engine stands still", registry=self.registry)
        of_engines = _GAUGES_OF_ENGINES
        if self._num_engines > 1:  # of one, tokenyard:ready says it
            of_engines = {**of_engines, "engine_ready": "1 while this engine serves requests"}
        for name, text in of_engines.items():
            family = self._make_gauge(name, text, ["model_name", "engine"])
            for engine in range(self._num_engines):
                self._of_engines[name, engine] = family.labels(self._model_name, str(engine))
        by_reason = self._make_gauge(
            "num_requests_waiting_by_reason", "What the waiting line waits for", ["reason"]
        )
        self._waiting_by_reason = {reason: by_reason.labels(reason=reason.value) for reason in WaitReason}
        text = "Time in which first tokens are to come, as --target-first-token says; 0: none"
        self._make_gauge("first_token_target_seconds", text, ()).set(target_first_token_s or 0.0)
        text = "KV blocks by groups of layers: held by sequences, and findable for prompts"
        self._kv_blocks = self._make_gauge("kv_blocks", text, ["group", "use", "engine"])
        text = "Always 1; the labels carry the values"
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        self._cache_info = self._make_gauge("cache_config_info", text, labels)
        build = self._make_gauge("build_info", text, ["version", "python"])
        build.labels(version=VERSION, python=platform.python_version()).set(1)

    def _set_of_engine(self, name: str, engine: int, value: float) -> None:
        """Set a gauge of an engine; nothing is set where there is none."""
        if (gauge := self._of_engines.get((name, engine))) is not None:
            gauge.set(value)

    def _make_counters(self) -> None:
        for each in _EXPORTED:
            self._make_counter(each.metadata["name"], each.metadata["text"])
        for name, text in _COUNTERS.items():
            self._make_counter(name, text)
        for name, row in _COUNTERS_BY_WORD.items():
            self._make_counter(name, *row)
        preemptions = self._family(
            "num_preemptions", "Running sequences that gave up their blocks", ["mode", "cause"]
        )
        self._preemptions = {
            (cause, was_swapped): preemptions.labels(
                mode="swap" if was_swapped else "recompute", cause=cause.value
            )
            for cause in PreemptionCause
            for was_swapped in (False, True)
        }
        self._accepted_places = self._family(
            "accepted_draft_tokens_per_pos", "Those that held, by place", ["position"]
        )

    def _make_histograms(self) -> None:
        for name, (text, buckets) in _HISTOGRAMS.items():
            family = Histogram(f"tokenyard:{name}", text, buckets=buckets, registry=self.registry)
            self._histograms[name] = self._families[name] = family
        by_band = Histogram(
            "tokenyard:priority_time_to_first_token_seconds",
            "Arrival to first token, by band of priorities",
            ["band"],
            buckets=_BAND_BUCKETS,
            registry=self.registry,
        )
        self._first_token_of_band = {band: by_band.labels(band=band.value) for band in PriorityBand}
        self._inter_token = self._families["inter_token_latency_seconds"] = BatchedHistogram(
            "tokenyard:inter_token_latency_seconds",
            "Between two tokens of one choice",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )

    def _make_gauge(self, name: str, text: str, labels: Iterable[str]) -> Gauge:
        family = Gauge(f"tokenyard:{name}", text, labels, registry=self.registry)
        self._families[name] = family
        return family

    def _family(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        family = Counter(f"tokenyard:{name}", text, labels, registry=self.registry)
        self._families[name] = family
        return family

    def _make_counter(self, name: str, text: str, label: str = "", words: Iterable[str] = ("",)) -> None:
        family = self._family(name, text, [label] if label else [])
        for word in words:
            self._counted[name, word] = family.labels(str(word)) if label else family
