"""A key may be allowed fewer waiting prompt tokens than the queue holds."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import TenantOverloaded
from engine.frontend.active_requests import ActiveRequests
from engine.frontend.metrics import EngineMetrics
from engine.frontend.queue_limits import QueueLimits
from engine.options.engine_config import resolve
from engine.options.options import Options
from engine.text.tokenizer import Tokenizer
from engine.types import GenerationRequest, PoolingParams, PoolingRequest, PoolingTask, ServiceTerms
from scheduler.messages import SamplingParams, SequenceOutput, SequenceStart

LIMIT = 10


class Queue:
    """ActiveRequests, asked by several tenants with the same limit."""

    def __init__(self, folder: Path) -> None:
        config, _ = resolve(replace(Options(), model=str(folder)), environment={})
        self.metrics = EngineMetrics("tiny")
        self.in_flight = ActiveRequests(
            config, Tokenizer.load(folder), self.metrics, lambda engine, message: None
        )
        self.num_requests = 0

    def ask(self, tenant: str, *lengths: int, n: int = 1, limit: int | None = LIMIT):
        """One call with prompts of so many tokens. Raises TenantOverloaded."""
        requests = [
            GenerationRequest(
                request_id=self._new_id(),
                prompt_token_ids=(5,) * length,
                params=SamplingParams(max_tokens=5),
                n=n,
                terms=ServiceTerms(tenant=tenant),
                max_tenant_tokens=limit,
            )
            for length in lengths
        ]
        return self.in_flight.admit(requests, asyncio.Event())

    def ask_for_vector(self, tenant: str, length: int):
        request = PoolingRequest(
            request_id=self._new_id(),
            prompt_token_ids=(5,) * length,
            params=PoolingParams(task=PoolingTask.EMBED),
            terms=ServiceTerms(tenant=tenant),
            max_tenant_tokens=LIMIT,
        )
        return self.in_flight.admit_pooling([request], asyncio.Event())

    def begin(self, live, place: int = 0) -> None:
        """The engine process has begun with one of its sequences."""
        start = SequenceStart(queue_s=0.0, num_cached_tokens=0)
        output = SequenceOutput(tuple(live.choices)[place], (7,), None, start=start)
        self.in_flight.take_outputs([output], (), 0.0)

    def num_refused(self) -> float | None:
        labels = {"reason": "key_tokens"}
        return self.metrics.registry.get_sample_value("tokenyard:admission_rejections_total", labels)

    def _new_id(self) -> str:
        self.num_requests += 1
        return str(self.num_requests)


@pytest.fixture
def queue(tiny_model: Path) -> Queue:
    return Queue(tiny_model)


async def test_a_key_with_too_much_waiting_is_told_so_and_others_are_not(queue: Queue) -> None:
    queue.ask("a", 6)
    queue.ask("a", 4)
    with pytest.raises(TenantOverloaded, match="10 prompt tokens waiting, and may have 10") as caught:
        queue.ask("a", 1)
    assert caught.value.retry_after_s >= 1
    assert queue.num_refused() == 1
    queue.ask("b", 10)


async def test_what_has_room_asks_for_no_forecast_of_the_queue(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(QueueLimits, "retry_after_s", lambda _, *, now_s: asked.append(now_s) or 1.0)
    queue.ask("a", 6)
    queue.ask("a", 4)
    assert not asked
    with pytest.raises(TenantOverloaded):
        queue.ask("a", 1)
    assert len(asked) == 1


async def test_what_comes_together_is_taken_together_or_not_at_all(queue: Queue) -> None:
    queue.ask("a", 2)
    with pytest.raises(TenantOverloaded):
        queue.ask("a", 4, 5)
    queue.ask("a", 4, 4)


async def test_a_request_larger_than_the_limit_may_be_the_only_one(queue: Queue) -> None:
    queue.ask("a", 50)
    with pytest.raises(TenantOverloaded):
        queue.ask("a", 1)


@pytest.mark.parametrize("end", ["it begins", "its reader leaves"])
async def test_room_comes_back_when_a_request_begins_or_leaves_and_only_once(queue: Queue, end: str) -> None:
    (first,) = queue.ask("a", 8, n=2)
    if end == "it begins":
        queue.begin(first)
        queue.begin(first, 1)
    queue.in_flight.leave(first)
    queue.ask("a", 8)
    with pytest.raises(TenantOverloaded):
        queue.ask("a", 3)


async def test_a_limit_that_comes_later_finds_what_waits_already(queue: Queue) -> None:
    queue.ask("a", 50, limit=None)
    with pytest.raises(TenantOverloaded):
        queue.ask("a", 1)


async def test_prompts_of_models_that_make_vectors_count_as_well(queue: Queue) -> None:
    queue.ask_for_vector("a", 8)
    with pytest.raises(TenantOverloaded):
        queue.ask_for_vector("a", 3)


async def test_tenants_without_anything_waiting_are_forgotten(queue: Queue) -> None:
    for number in range(100):
        (live,) = queue.ask(f"tenant {number}", 5)
        queue.in_flight.leave(live)
    assert not queue.in_flight._desk.tenant_tokens._num_queued
