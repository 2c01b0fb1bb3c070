"""The engine's metrics for Prometheus.

Owns: every metric of queue, cache and latency, in one registry. Labels come from configured sets only.
Never: formats anything per token; children with labels are resolved once.

Definitions: a request arrives when it reaches AsyncEngine, tokenized. Queue time runs from its arrival in the
engine process to its first step; time to first token from arrival to the first token in the API process;
inter-token latency between two tokens of one choice, preemptions included.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.errors import Overloaded, OverloadReason
from engine.frontend.batched_histogram import BatchedHistogram
from engine.frontend.vllm_metrics import Derived, Timeline, VllmMetrics, value_of
from engine.logs.log_setup import num_dropped_lines
from engine.process_messages import Beat, StepTimes
from engine.processes.engine_processes import DeathCause
from engine.reports.live_load import LiveCounts, LiveLoad
from engine.types import Health, ModelInfo
from engine.version import VERSION
from scheduler.messages import FinishReason, PreemptionCause, SchedulerStats, WaitReason

# From a short queue on a fast device to a queue of minutes; from a small model's tokens to a stutter. Few
# buckets: a page of over 300 lines is rendered slowly, and some routers read it every 50 ms.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0)
_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0)
_END_TO_END_BUCKETS = _LATENCY_BUCKETS[2:]
_LENGTH_BUCKETS = (1, 16, 64, 256, 1024, 4096, 16384, 131072)
# Few: each band has a set of them.
_BAND_BUCKETS = (0.5, 2.5, 10.0, 60.0)

# Gauges of each engine that vLLM has under the same name.
_VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

_Word = TypeVar("_Word", bound=str)


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


class EngineMetrics:
    """Metrics that AsyncEngine feeds and the server renders from `registry`."""

    def __init__(self, model_name: str, *, num_engines: int = 1) -> None:
        # A third of all lines, and of no use.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._model_name = model_name
        self.registry = CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._num_engines = num_engines
        self.live_load = LiveLoad(num_engines)
        self._last_times: dict[int, StepTimes] = {}
        self._last_dropped: dict[tuple[Telemetry, int], int] = {}
        self._of_engines: dict[str, Gauge] = {}
        self._ranks: Gauge | None = None
        self._rank_time: dict[str, Counter] = {}
        self._make_gauges()
        self._make_counters()
        self._make_counters_of_ends()
        self._make_histograms()
        self._vllm = VllmMetrics(
            model_name, self._twins(), self._derived(), engine="0" if num_engines == 1 else "all"
        )
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
        if self._engine_ready:
            self._engine_ready[engine].set(1)
        if info.num_ranks > 1:
            self._count_ranks(info.num_ranks)

    def _count_ranks(self, num: int) -> None:
        if self._ranks is None:  # made by the first ranks: most models are not divided
            self._ranks = Gauge("tokenyard:ranks", "Processes that compute the model", registry=self.registry)
            self._rank_time = self._counters(
                "rank_time_seconds", "Time of rank 0 in exchanges, by part", "part", ("exchange", "wait")
            )
        self._ranks.set(num)

    def watch_health(self, health: Callable[[], Health]) -> None:
        """Ask for the health at each scrape, so that the page agrees with the probes."""
        self._ready.set_function(lambda: health().is_ready)
        self._live.set_function(lambda: health().is_live)

    def engine_is_gone(self, engine: int) -> None:
        """Set the gauges of a dead process to zero."""
        self._forget(engine)
        for gauge in (self._swapped, self._kv_usage, self._swap_usage):
            gauge[engine].set(0)
        if self._engine_ready:
            self._engine_ready[engine].set(0)
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
            self._running[engine].set(self.live_load.num_running(engine))
            self._waiting[engine].set(self.live_load.num_waiting(engine))
        for reason, gauge in self._waiting_by_reason.items():
            gauge.set(self.live_load.num_waiting_for(reason))

    @property
    def wait_reason(self) -> str:
        """Reason why most sequences wait, as of the last beats."""
        return self.live_load.wait_reason.value

    def engine_restarted(self, cause: DeathCause) -> None:
        self._restarts[cause].inc()

    def request_replayed(self) -> None:
        self._replayed.inc()

    def beat(self, engine: int, beat: Beat) -> None:
        """Set gauges to their values, and raise counters by the difference to the last beat."""
        stats = beat.stats
        last = self.live_load.last.get(engine) or SchedulerStats(num_blocks=stats.num_blocks)
        self.live_load.last[engine] = stats
        self._kv_usage[engine].set(stats.num_used_blocks / stats.num_blocks)
        num_steps = stats.num_steps - last.num_steps
        self._steps.inc(num_steps)
        self._vllm.stepped(num_steps, stats.num_scheduled_tokens - last.num_scheduled_tokens)
        self._stalls.inc(stats.num_stalls - last.num_stalls)
        self._out_of_memory.inc(stats.num_out_of_memory - last.num_out_of_memory)
        self._swapped[engine].set(stats.num_swapped)
        if stats.num_host_blocks:
            self._swap_usage[engine].set(stats.num_used_host_blocks / stats.num_host_blocks)
        before = {(count.cause, count.was_swapped): count.num for count in last.preemptions}
        for count in stats.preemptions:
            key = (count.cause, count.was_swapped)
            self._preemptions[key].inc(count.num - before.get(key, 0))
        self._swap_full.inc(stats.num_swap_space_full - last.num_swap_space_full)
        self._take_times(engine, beat.times)
        self._take_dropped_lines(engine, beat.num_dropped_log_lines)
        self._prefix_queries.inc(stats.num_prefix_queries - last.num_prefix_queries)
        self._prefix_hits.inc(stats.num_prefix_hits - last.num_prefix_hits)
        self._prefix_host_hits.inc(stats.num_prefix_host_hits - last.num_prefix_host_hits)
        self._kept_host_blocks.inc(stats.num_kept_host_blocks - last.num_kept_host_blocks)
        self._recomputed.inc(stats.num_recomputed_tokens - last.num_recomputed_tokens)
        self._drafts.inc(stats.num_draft_tokens - last.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_tokens - last.num_accepted_tokens)
        self._take_drafts(stats, last)

    def _take_drafts(self, stats: SchedulerStats, last: SchedulerStats) -> None:
        self._verified.inc(stats.num_verified_shares - last.num_verified_shares)
        before = (*last.num_accepted_by_place, *[0] * len(stats.num_accepted_by_place))
        for place, num in enumerate(stats.num_accepted_by_place):
            position = str(place)
            if position not in self._accepted_by_place:  # made by the first drafts: most servers verify none
                self._accepted_by_place[position] = self._accepted_places.labels(position)
            self._accepted_by_place[position].inc(num - before[place])

    def _take_dropped_lines(self, engine: int, num_of_engine: int) -> None:
        """Count dropped lines of an engine's process and of this one; each counts from its own start."""
        now = {
            (Telemetry.API_LOG_LINES, 0): num_dropped_lines(),
            (Telemetry.ENGINE_LOG_LINES, engine): num_of_engine,
        }
        for key, num in now.items():
            self._dropped[key[0]].inc(num - self._last_dropped.get(key, 0))
        self._last_dropped |= now

    def _take_times(self, engine: int, times: StepTimes) -> None:
        last, self._last_times[engine] = self._last_times.get(engine, StepTimes()), times
        for part, counter in (self._step_time | self._rank_time).items():
            counter.inc(getattr(times, f"{part}_s") - getattr(last, f"{part}_s"))

    def tokens_arrived(self, num_by_gap: Mapping[float, int]) -> None:
        """Count further tokens of choices, by the seconds since the token before."""
        self._generated.inc(sum(num_by_gap.values()))
        for gap_s, num in num_by_gap.items():
            self._inter_token.observe(gap_s, num=num)

    def first_token_arrived(self, num_tokens: int, since_arrival_s: float, priority: int) -> None:
        self._generated.inc(num_tokens)
        self._first_token.observe(since_arrival_s)
        self._first_token_of_band[band_of(priority)].observe(since_arrival_s)

    def sequence_started(self, queue_s: float) -> None:
        self._queue_time.observe(queue_s)

    def choice_finished(self, reason: FinishReason, num_tokens: int) -> None:
        self._finished[reason].inc()
        self._request_generated.observe(num_tokens)

    def request_admitted(self, num_prompt_tokens: int) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._request_prompt.observe(num_prompt_tokens)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count an Overloaded that is raised inside, by its reason."""
        try:
            yield
        except Overloaded as error:
            self._refused[error.reason].inc()
            raise

    def spans_dropped(self, num: float) -> None:
        """Count spans that the trace collector did not take. Called by any thread."""
        self._dropped[Telemetry.SPANS].inc(num)

    def request_displaced(self) -> None:
        """Count a waiting request that gave its place to a more urgent one."""
        self._refused[OverloadReason.DISPLACED].inc()

    def request_aborted(self, cause: AbortCause) -> None:
        self._aborted[cause].inc()

    def params_admitted(self, *, n: int, max_tokens: int) -> None:
        """Observe the parameters of a request that generates."""
        self._vllm.request_admitted(n=n, max_tokens=max_tokens)

    def request_finished(self, since_arrival_s: float, timeline: Timeline | None) -> None:
        """Observe a request's end; `timeline` None: it has generated nothing."""
        self._end_to_end.observe(since_arrival_s)
        if timeline is not None:
            self._vllm.request_ended(timeline)

    def _make_gauges(self) -> None:
        self._ready = Gauge("tokenyard:ready", "1 while requests are welcome", registry=self.registry)
        self._live = Gauge("tokenyard:live", "0 while the engine stands still", registry=self.registry)
        self._running = self._gauge("num_requests_running", "Sequences that take part in the steps")
        self._waiting = self._gauge("num_requests_waiting", "Sequences that wait for a place or for memory")
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1; cached but free ones not counted"
        )
        self._engine_ready: list[Gauge] = []
        if self._num_engines > 1:  # of one, tokenyard:ready says it
            self._engine_ready = self._gauge("engine_ready", "1 while this engine serves requests")
        self._swapped = self._gauge("num_requests_swapped", "Sequences whose KV waits in host memory")
        by_reason = Gauge(
            "tokenyard:num_requests_waiting_by_reason",
            "What the waiting line waits for",
            ["reason"],
            registry=self.registry,
        )
        self._waiting_by_reason = {reason: by_reason.labels(reason=reason.value) for reason in WaitReason}
        self._swap_usage = self._gauge("swap_space_usage_perc", "Share of the swap space in use, 0 to 1")
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        text = "Always 1; the labels carry the values"
        self._cache_info = Gauge("tokenyard:cache_config_info", text, labels, registry=self.registry)
        build = Gauge("tokenyard:build_info", text, ["version", "python"], registry=self.registry)
        build.labels(version=VERSION, python=platform.python_version()).set(1)

    def _make_counters(self) -> None:
        self._steps = self._counter("engine_steps", "Steps that computed something")
        preemptions = Counter(
            "tokenyard:num_preemptions",
            "Running sequences that gave up their blocks",
            ["mode", "cause"],
            registry=self.registry,
        )
        self._preemptions = {
            (cause, was_swapped): preemptions.labels(
                mode="swap" if was_swapped else "recompute", cause=cause.value
            )
            for cause in PreemptionCause
            for was_swapped in (False, True)
        }
        self._swap_full = self._counter(
            "swap_space_full", "Preemptions that recompute only because there was no room to swap"
        )
        self._stalls = self._counter(
            "scheduler_stalls", "Requests failed because the scheduler found no way to serve them"
        )
        self._out_of_memory = self._counter(
            "step_out_of_memory", "Steps made again in parts: the device had too little memory for the whole"
        )
        self._step_time = self._counters(
            "step_time_seconds", "Time of the step loop, by part", "part", ("schedule", "execute", "update")
        )
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found, and so not computed")
        self._prefix_host_hits = self._counter(
            "prefix_cache_host_hits", "Prompt tokens found in the swap space only, and copied back"
        )
        self._kept_host_blocks = self._counter(
            "prefix_cache_host_stores", "Blocks copied to the swap space when the device gave them up"
        )
        self._recomputed = self._counter("recomputed_tokens", "Tokens computed again after a preemption")
        self._drafts = self._counter("draft_tokens", "Guessed tokens that were verified")
        self._accepted = self._counter("accepted_draft_tokens", "Of these, those that held")
        self._verified = self._counter("verified_shares", "Sequences in steps, with guesses for them")
        self._accepted_places = Counter(
            "tokenyard:accepted_draft_tokens_per_pos",
            "Those that held, by place",
            ["position"],
            registry=self.registry,
        )
        self._accepted_by_place: dict[str, Counter] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests")
        self._generated = self._counter("generation_tokens", "Tokens generated")

    def _make_counters_of_ends(self) -> None:
        """Make the counters of ended engine processes, refused and ended requests, and dropped telemetry."""
        self._restarts = self._counters(
            "engine_restarts", "Engine processes that died and were replaced", "cause", DeathCause
        )
        self._replayed = self._counter(
            "requests_replayed", "Requests that no engine process had begun when it died, given to the next"
        )
        self._refused = self._counters(
            "admission_rejections", "Requests refused because too much waited", "reason", OverloadReason
        )
        self._aborted = self._counters("request_aborts", "Requests that were cut short", "cause", AbortCause)
        self._dropped = self._counters(
            "telemetry_dropped", "Lines of the log, or spans, that nobody took in time", "what", Telemetry
        )
        self._finished = self._counters(
            "request_success", "Choices by how they ended", "finished_reason", FinishReason
        )

    def _make_histograms(self) -> None:
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token")
        by_band = Histogram(
            "tokenyard:priority_time_to_first_token_seconds",
            "Arrival to first token, by band of priorities",
            ["band"],
            buckets=_BAND_BUCKETS,
            registry=self.registry,
        )
        self._first_token_of_band = {band: by_band.labels(band=band.value) for band in PriorityBand}
        self._inter_token = BatchedHistogram(
            "tokenyard:inter_token_latency_seconds",
            "Between two tokens of one choice",
            buckets=_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Until first part of a step")
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the last output", _END_TO_END_BUCKETS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt lengths", _LENGTH_BUCKETS)
        self._request_generated = self._histogram(
            "request_generation_tokens", "Tokens generated by a choice", _LENGTH_BUCKETS
        )

    def _twins(self) -> tuple[Collector, ...]:
        """Metrics that vLLM has under the same name and with the same meaning."""
        return (
            *(self._of_engines[name] for name in _VLLM_GAUGES),
            self._cache_info,
            *(self._prefix_queries, self._prompt_tokens, self._generated),
            *(self._first_token, self._inter_token, self._queue_time, self._end_to_end),
            *(self._request_prompt, self._request_generated),
        )

    def _derived(self) -> tuple[Derived, ...]:
        """Metrics of vLLM that are sums or other labels of ours."""
        counter, gauge = CounterMetricFamily, GaugeMetricFamily

        def by_word(counters: Mapping[_Word, Counter]) -> Callable[[], dict[str, float]]:
            return lambda: {str(word): value_of(child) for word, child in counters.items()}

        def preempted() -> float:
            return sum(map(value_of, self._preemptions.values()))

        by_place = by_word(self._accepted_by_place)

        def waiting() -> dict[str, float]:
            return {"capacity": sum(map(value_of, self._waiting)), "deferred": 0.0}

        def drafts() -> float:
            return value_of(self._drafts)

        def accepted() -> float:
            return value_of(self._accepted)

        def verified() -> float:
            return value_of(self._verified)

        success, refused = by_word(self._finished), by_word(self._refused)
        return (
            *self._derived_of_cache(),
            Derived("num_preemptions", "Sequences that gave up their blocks", counter, preempted),
            Derived("request_success", "Choices by their end", counter, success, "finished_reason"),
            Derived("admission_rejections", "Requests refused", counter, refused, "reason"),
            Derived("spec_decode_num_draft_tokens", "Guessed tokens, verified", counter, drafts),
            Derived("spec_decode_num_accepted_tokens", "Of these, those that held", counter, accepted),
            Derived("spec_decode_num_drafts", "Sequences in steps, with guesses", counter, verified),
            Derived(
                "spec_decode_num_accepted_tokens_per_pos",
                "By place",
                counter,
                by_place,
                "position",
            ),
            Derived("num_requests_waiting_by_reason", "Waiting sequences", gauge, waiting, "reason"),
        )

    def _derived_of_cache(self) -> tuple[Derived, ...]:
        """Tokens found in the caches; what vLLM calls external is the swap space here."""
        counter = CounterMetricFamily

        def found() -> float:
            return value_of(self._prefix_hits)

        def found_on_host() -> float:
            return value_of(self._prefix_host_hits)

        def found_on_device() -> float:
            return found() - found_on_host()

        def asked_of_host() -> float:
            return value_of(self._prefix_queries) - found_on_device()

        def by_source() -> dict[str, float]:
            return {
                "local_compute": max(0.0, value_of(self._prompt_tokens) - found()),
                "local_cache_hit": found_on_device(),
                "external_kv_transfer": found_on_host(),
            }

        return (
            Derived("prefix_cache_hits", "Prompt tokens found on the device", counter, found_on_device),
            Derived("external_prefix_cache_queries", "Tokens asked of the host", counter, asked_of_host),
            Derived("external_prefix_cache_hits", "Tokens found on the host", counter, found_on_host),
            Derived("prompt_tokens_cached", "Prompt tokens found in any cache", counter, found),
            Derived("prompt_tokens_by_source", "Prompt tokens by source", counter, by_source, "source"),
        )

    def _gauge(self, name: str, text: str) -> list[Gauge]:
        """Make a gauge of each engine."""
        family = Gauge(f"tokenyard:{name}", text, ["model_name", "engine"], registry=self.registry)
        self._of_engines[name] = family
        return [family.labels(self._model_name, str(engine)) for engine in range(self._num_engines)]

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tokenyard:{name}", text, registry=self.registry)

    def _counters(self, name: str, text: str, label: str, words: Iterable[_Word]) -> dict[_Word, Counter]:
        """Make one counter for each value of the label."""
        counter = Counter(f"tokenyard:{name}", text, [label], registry=self.registry)
        return {word: counter.labels(str(word)) for word in words}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
        return Histogram(f"tokenyard:{name}", text, buckets=buckets, registry=self.registry)
