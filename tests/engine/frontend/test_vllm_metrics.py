"""The page under vLLM's names: equal to ours where it means the same, and complete for vLLM's own boards."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from engine.frontend.metrics import EngineMetrics
from scheduler.messages import FinishReason, SequenceOutput, SequenceStart
from tests.engine.frontend.test_giving_way import Door

LABELS = {"model_name": "tiny", "engine": "0"}
# Read by the example board, the performance and the query statistics of vLLM, and by its recipes for
# KEDA, the Kubernetes gateway and the production stack.
BOARDS = (
    "e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum "
    "e2e_request_latency_seconds_count time_to_first_token_seconds_bucket "
    "time_to_first_token_seconds_sum time_to_first_token_seconds_count "
    "inter_token_latency_seconds_bucket inter_token_latency_seconds_sum "
    "inter_token_latency_seconds_count request_time_per_output_token_seconds_bucket "
    "prompt_tokens_total generation_tokens_total num_requests_running num_requests_waiting "
    "kv_cache_usage_perc request_prompt_tokens_bucket request_generation_tokens_bucket "
    "request_success_total request_queue_time_seconds_sum request_prefill_time_seconds_sum "
    "request_decode_time_seconds_sum request_inference_time_seconds_bucket "
    "request_max_num_generation_tokens_sum prefix_cache_hits_total prefix_cache_queries_total "
    "num_preemptions_total request_params_n_bucket request_params_max_tokens_bucket "
)


@pytest.fixture
def door(tiny_model: Path) -> Door:
    return Door(tiny_model)


def theirs(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"vllm:{name}", {**LABELS, **labels})
    assert found is not None, name
    return found


@pytest.mark.parametrize("name", BOARDS.split())
def test_what_the_boards_of_vllm_read_is_there_before_the_first_request(name: str) -> None:
    samples = [
        sample
        for family in EngineMetrics("tiny").registry.collect()
        for sample in family.samples
        if sample.name == f"vllm:{name}"
    ]
    assert samples
    assert all(LABELS.items() <= sample.labels.items() for sample in samples)


async def test_a_request_is_counted_alike_under_both_names_and_its_phases_add_up(door: Door) -> None:
    (live,) = door.ask("a", 0, n=2)
    first, second = live.choices
    start = SequenceStart(queue_s=2.0, num_cached_tokens=1)
    arrived_s = live.arrived_s
    take = door.in_flight.take_outputs
    take([SequenceOutput(first, (7,), None, start=start)], (), arrived_s + 3)
    take([SequenceOutput(second, (7,), None, start=start)], (), arrived_s + 4)
    take([SequenceOutput(first, (8, 9), None)], (), arrived_s + 7)
    take([SequenceOutput(id_, (), FinishReason.LENGTH) for id_ in (first, second)], (), arrived_s + 8)
    door.in_flight.leave(live)
    registry = door.metrics.registry
    for name in ("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum", "prompt_tokens_total"):
        assert theirs(registry, name) == registry.get_sample_value(f"tokenyard:{name}")
    assert theirs(registry, "generation_tokens_total") == 4
    assert theirs(registry, "request_success_total", finished_reason="length") == 2
    sums = {
        name: theirs(registry, f"request_{name}_sum")
        for name in (
            *("prefill_time_seconds", "decode_time_seconds", "inference_time_seconds"),
            *("time_per_output_token_seconds", "max_num_generation_tokens", "prefill_kv_computed_tokens"),
            *("params_n", "params_max_tokens"),
        )
    }
    assert list(sums.values()) == pytest.approx([1, 4, 5, 2, 3, 2, 2, 5])


async def test_a_request_that_generated_nothing_has_no_phases(door: Door) -> None:
    (live,) = door.ask("a", 0)
    door.in_flight.leave(live)
    assert theirs(door.metrics.registry, "request_prefill_time_seconds_count") == 0
    assert theirs(door.metrics.registry, "e2e_request_latency_seconds_count") == 1


def test_generated_tokens_are_counted_for_each_engine() -> None:
    metrics = EngineMetrics("m", num_engines=2)
    metrics.tokens_of_engine(0, 3)
    metrics.tokens_of_engine(1, 4)
    values = [
        metrics.registry.get_sample_value(
            "vllm:generation_tokens_total", {"model_name": "m", "engine": engine}
        )
        for engine in ("0", "1", "all")
    ]
    assert values == [3, 4, None]
