"""The page of metrics: what is counted under which label, and that it stays small, clean and cheap."""

import dataclasses
import re
import time

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import Overloaded, OverloadReason, RequestRejected
from engine.frontend.metrics import AbortCause, EngineMetrics, PriorityBand, band_of
from engine.frontend.queue_limits import QueueLimits
from engine.process_messages import Beat, StepTimes
from engine.types import EngineState, Health
from scheduler.config import SchedulerConfig
from scheduler.counters import SchedulerStats
from scheduler.scheduler import Scheduler
from server.edge.observe.http_metrics import HttpMetrics
from tests.server.fake_engine import INFO

READY = Health(state=EngineState.READY, is_live=True, detail="ready", num_steps=1, progress=1.0)
MAX_LINES = 370
_STATUSES = ("200", "400", "401", "429", "499", "500", "503")
_CODES = ("invalid_value", "invalid_api_key", "server_overloaded", "engine_restarted", "shutting_down")


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("model")


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"tokenyard:{name}", labels)
    assert found is not None, name
    return found


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_queued": 2, "max_queued_tokens": 99}, "requests"),
        ({"max_queued": 9, "max_queued_tokens": 5}, "tokens"),
    ],
)
def test_a_refusal_is_counted_under_what_there_was_too_much_of(metrics, limits, reason) -> None:
    admission = QueueLimits(**limits)
    admission.take_in(2, 4, now_s=0.0)
    with pytest.raises(Overloaded), metrics.counting_refusals():
        raise admission.refusal(1, now_s=0.0)
    counts = {word: value(metrics, "admission_rejections_total", reason=word) for word in OverloadReason}
    assert counts == {**dict.fromkeys(OverloadReason, 0.0), reason: 1.0}


def test_a_request_that_is_wrong_is_not_counted_as_refused(metrics) -> None:
    with pytest.raises(RequestRejected), metrics.counting_refusals():
        raise RequestRejected("no")
    assert all(value(metrics, "admission_rejections_total", reason=word) == 0 for word in OverloadReason)


def test_priorities_fall_into_three_bands_however_large_they_are(metrics) -> None:
    bands = {priority: band_of(priority) for priority in (-(2**31), -1, 0, 1, 2**31)}
    assert list(bands.values()) == ["urgent", "urgent", "normal", "background", "background"]
    for priority in bands:
        metrics.first_token_arrived(1, 0.3, priority)
    counts = [
        value(metrics, "priority_time_to_first_token_seconds_count", band=band) for band in PriorityBand
    ]
    assert counts == [2, 1, 2]
    assert value(metrics, "time_to_first_token_seconds_count") == 5


def test_the_page_says_ready_exactly_when_a_probe_would(metrics) -> None:
    now = [READY]
    asleep = dataclasses.replace(READY, state=EngineState.LOADING, is_optional=True)
    metrics.watch_health(lambda: now[0])
    for health, ready, live in (
        (READY, 1, 1),
        (dataclasses.replace(READY, state=EngineState.DRAINING), 0, 1),
        (dataclasses.replace(READY, is_live=False), 0, 0),
        (asleep, 1, 1),  # it comes when it is asked for
        (dataclasses.replace(asleep, state=EngineState.DRAINING), 0, 1),
        (dataclasses.replace(asleep, is_given_up=True), 0, 1),
    ):
        now[0] = health
        assert (value(metrics, "ready"), value(metrics, "live")) == (ready, live)


def test_dropped_lines_are_counted_across_engine_processes(metrics) -> None:
    sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 16}
    stats = Scheduler(SchedulerConfig(**sizes, max_num_seqs=2, max_num_batched_tokens=8)).stats()
    for num in (3, 5):
        metrics.beat(0, Beat(num_turns=1, stats=stats, times=StepTimes(), num_dropped_log_lines=num))
    assert value(metrics, "telemetry_dropped_total", what="engine_log_lines") == 5
    metrics.model_is_ready(0, INFO)  # another process, which counts from zero
    metrics.beat(0, Beat(num_turns=1, stats=stats, times=StepTimes(), num_dropped_log_lines=2))
    assert value(metrics, "telemetry_dropped_total", what="engine_log_lines") == 7
    assert value(metrics, "telemetry_dropped_total", what="api_log_lines") == 0


DECLARED = [each for each in dataclasses.fields(SchedulerStats) if each.metadata]


def test_every_counter_that_the_scheduler_declares_is_exported_and_grows_with_the_beats(metrics) -> None:
    for num in (3, 5):
        counted = {each.name: num + place for place, each in enumerate(DECLARED)}
        stats = SchedulerStats(num_blocks=8, **counted)
        metrics.beat(0, Beat(num_turns=1, stats=stats, times=StepTimes()))
    found = {each.name: value(metrics, f"{each.metadata['name']}_total") for each in DECLARED}
    assert found == counted
    assert len(found) > 10


def test_times_of_steps_and_of_ranks_are_counted_across_engine_processes(metrics) -> None:
    sizes = {"num_blocks": 8, "block_size": 4, "max_model_len": 16}
    stats = Scheduler(SchedulerConfig(**sizes, max_num_seqs=2, max_num_batched_tokens=8)).stats()
    divided = dataclasses.replace(INFO, num_ranks=2)
    metrics.model_is_ready(0, divided)
    for seconds in (3.0, 5.0):
        times = StepTimes(execute_s=10 * seconds, exchange_s=seconds, wait_s=2 * seconds)
        metrics.beat(0, Beat(num_turns=1, stats=stats, times=times, num_dropped_log_lines=0))
    metrics.model_is_ready(0, divided)  # another process, which counts from zero
    metrics.beat(0, Beat(num_turns=1, stats=stats, times=StepTimes(exchange_s=1.0), num_dropped_log_lines=0))
    assert value(metrics, "step_time_seconds_total", part="execute") == 50
    assert value(metrics, "rank_time_seconds_total", part="exchange") == 6
    assert value(metrics, "rank_time_seconds_total", part="wait") == 10


def busy_page() -> bytes:
    """Page as after a day: each route of the API with many statuses, and several errors."""
    metrics = EngineMetrics("model")
    http = HttpMetrics(metrics.registry)
    for route in ("/v1/chat/completions", "/v1/completions"):
        for status in _STATUSES:
            http.requests.labels("POST", route, status, "").inc()
    for route in ("/health/live", "/health/ready", "/metrics", "/v1/models"):
        http.requests.labels("GET", route, "200", "").inc()
    for code in _CODES:
        http.count_error(code)
    return generate_latest(metrics.registry)


def test_the_page_has_370_lines_at_most_under_each_name_and_a_scrape_costs_milliseconds() -> None:
    lines = busy_page().splitlines()
    of_vllm = [line for line in lines if b"vllm:" in line]
    assert len(lines) - len(of_vllm) <= MAX_LINES
    assert len(of_vllm) <= MAX_LINES
    metrics = EngineMetrics("model")
    started_s = time.process_time()
    for _ in range(10):
        generate_latest(metrics.registry)
    assert (time.process_time() - started_s) / 10 < 0.010  # measured 0.003; a busy machine may pass


def test_names_help_and_units_are_as_prometheus_wants_them() -> None:
    """The rules of `promtool check metrics`, but for the colon: docs/operations.md, Metrics."""
    for family in text_string_to_metric_families(busy_page().decode()):
        ours = re.fullmatch(r"(?:tokenyard|vllm):([a-z0-9_]+)", family.name)
        if ours is None:
            assert family.name.startswith(("process_", "python_")), family.name
            continue
        name = ours[1]
        assert family.documentation, name
        assert family.type != "unknown", name
        assert not re.search(r"_(?:ms|milliseconds|minutes|kb|mb|gauge|counter|histogram)(?:_|$)", name)
        if family.type != "counter" and name != "iteration_tokens_total":  # vLLM's own name
            assert not name.endswith("_total"), name
        if family.type != "histogram":
            assert not name.endswith(("_count", "_sum", "_bucket")), name


def test_every_cause_of_an_abort_is_there_before_it_happens(metrics) -> None:
    assert [value(metrics, "request_aborts_total", cause=cause) for cause in AbortCause] == [0, 0, 0]
