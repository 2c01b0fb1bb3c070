"""Random requests under the real scheduler on an interpreted GPU: each draws what it draws alone on a CPU."""

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.messages import (
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    SchedulerOutput,
    SequenceId,
    SequenceInputs,
    SequenceOutput,
    ServiceTerms,
)
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.invariants import check_invariants
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.test_gpu_worker import load_gpu
from worker.gpu import graphs
from worker.steps.generation_step import GenerationSteps
from worker.steps.protocol import LaunchedStep
from worker.worker import Worker
from worker.worker_config import ModelFacts
from worker.worker_errors import StepOutOfMemory

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(HAS_GPU, reason="near-equal logits are no equal logits there"),
]

VOCAB = 335
EOS = 334
MOST_TURNS = 400
SWAP_BYTES = 1 << 18
NUM_BLOCKS = (9, 12, 15)


class Workers(NamedTuple):
    gpu: Worker
    gpu_facts: ModelFacts
    cpu: Worker
    cpu_facts: ModelFacts


@pytest.fixture(scope="module")
def workers(checkpoints: MakeCheckpoint) -> Workers:
    """Graphs for decodes and for mixed steps of up to 16 tokens; there are larger ones."""
    folder: Path = checkpoints("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_MIXED", (16,))
        options = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_blocks": max(NUM_BLOCKS) + 1}
        gpu = load_gpu(folder, swap_space_bytes=SWAP_BYTES, **options)
    return Workers(*gpu, *load_worker(folder, swap_space_bytes=SWAP_BYTES))


def draw_params(source: random.Random) -> SamplingParams:
    params: dict[str, Any] = {"temperature": 0.0}
    if source.random() < 0.5:
        params = {"temperature": source.choice([0.5, 1.7]), "seed": source.choice([0, 2**64 - 1])}
        params |= {"top_p": source.choice([1.0, 0.9]), "top_k": source.choice([0, 1, 40])}
    optional: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
        {"presence_penalty": -1.0},
        {"logit_bias": ((source.randrange(VOCAB), 6.0), (VOCAB + 3, 1.0))},
        {"bad_words": tuple((source.randrange(VOCAB), source.randrange(VOCAB)) for _ in range(40))},
        {"min_tokens": 4, "stop_token_ids": tuple(source.sample(range(VOCAB), 60))},
        {"num_logprobs": 2},
        {"num_prompt_logprobs": 1},
    ]
    for each in optional:
        if source.random() < 0.2:
            params |= each
    if source.random() < 0.2:
        begins_after = source.choice([None, source.randrange(VOCAB)])
        grammar = Grammar(kind=GrammarKind.REGEX, text="[a-m]{4,20}", begins_after=begins_after)
        params |= {"grammar": grammar, "stop_token_ids": (EOS,)}
    return SamplingParams(max_tokens=source.randrange(3, 9), **params)


def make_request(number: int, source: random.Random) -> Sequence:
    """Some prompts begin alike."""
    prompt = [(7 * index + 3) % 300 for index in range(source.randrange(12))]
    prompt += [source.randrange(VOCAB) for _ in range(source.randrange(1, 14))]
    params = draw_params(source)
    return Sequence(SequenceId(number), tuple(prompt), params, ServiceTerms(), inputs=SequenceInputs())


def make_scheduler(facts: ModelFacts, **options: Any) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=6,
            max_num_batched_tokens=24,
            max_model_len=facts.max_model_len,
            watermark=0.0,
            num_host_blocks=facts.num_host_blocks,
            **options,
        )
    )


class Run:
    """Serves requests as the engine's loop does, and keeps what it is told of them."""

    def __init__(self, worker: Worker, scheduler: Scheduler) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishReason] = {}
        self._worker, self._scheduler = worker, scheduler
        self._under_way: deque[tuple[SchedulerOutput, LaunchedStep | None]] = deque()

    def serve(self, requests: list[Sequence], disturb: Callable[[Scheduler], None] | None = None) -> "Run":
        for request in requests:
            self.tokens[request.sequence_id] = []
            self._scheduler.add_request(request, now_s=0.0)
        for _ in range(MOST_TURNS):
            if not self._scheduler.has_unfinished_requests:
                self._worker.execute(SchedulerOutput(0, tuple(map(SequenceId, self.tokens)), (), {}, (), 0))
                return self
            self._launch()
            if disturb is not None:
                disturb(self._scheduler)
            self._collect()
            check_invariants(self._scheduler)
        raise AssertionError("it never ends")

    def _launch(self) -> None:
        while self._scheduler.can_schedule and not (plan := self._scheduler.schedule(now_s=0.0)).is_empty:
            try:
                self._under_way.append((plan, self._worker.launch(plan)))
            except StepOutOfMemory:
                self._under_way.append((plan, None))
                return

    def _collect(self) -> None:
        """One result; all of them where the last step could not be launched."""
        is_last_launched = bool(self._under_way) and self._under_way[-1][1] is not None
        while self._under_way:
            plan, launched = self._under_way.popleft()
            if launched is None:
                self._take(self._scheduler.roll_back("too little memory"))
                return
            self._take(self._scheduler.update_from_output(plan, launched.result()))
            if is_last_launched:
                return
        self._take(self._scheduler.take_outputs())

    def _take(self, outputs: dict[int, list[SequenceOutput]]) -> None:
        for output in outputs.get(0, []):
            self.tokens[output.sequence_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.sequence_id] = output.finish_reason


def let_memory_run_out(worker: Worker, source: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Now and then, before or after a part of a step."""
    assert isinstance(worker._steps, GenerationSteps)
    steps: Any = worker._steps
    parts = {
        steps._steps: ("_begin", "remember"),
        steps._sampler: ("_begin_counting", "_choose", "_measure", "_download_outcome"),
        steps._sampler._editor: ("edit", "count"),
    }

    def failing(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if source.random() < 0.02:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            result = part(*args)
            if source.random() < 0.02:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

        return run

    for owner, names in parts.items():
        for name in names:
            patch.setattr(owner, name, failing(getattr(owner, name)))


@pytest.mark.parametrize("seed", [0, 1])
def test_whoever_is_preempted_or_taken_back_beside_whomever_draws_what_it_draws_alone(
    workers: Workers, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of edit, some clients that leave, and at odd seeds a memory that runs out."""
    source = random.Random(seed)
    state = source.getstate()
    num_requests = 5
    expected = Run(workers.cpu, make_scheduler(workers.cpu_facts, num_blocks=40))
    for number in range(num_requests):
        expected.serve([make_request(number, source)])
    source.setstate(state)
    requests = [make_request(number, source) for number in range(num_requests)]
    if seed % 2:
        let_memory_run_out(workers.gpu, source, monkeypatch)
    scheduler = make_scheduler(
        workers.gpu_facts,
        num_blocks=source.choice(NUM_BLOCKS),
        preemption_mode=source.choice(list(PreemptionMode)),
        max_plans_in_flight=source.choice([2, 3]),
    )
    leaving = set()

    def leave(scheduler: Scheduler) -> None:
        if source.random() < 0.03:
            leaving.add(number := SequenceId(source.randrange(num_requests)))
            scheduler.finish_requests([number], FinishReason.ABORTED)

    found = Run(workers.gpu, scheduler).serve(requests, leave)
    for number, tokens in expected.tokens.items():
        if number in leaving or found.ends[number] is FinishReason.FAILED:
            assert found.tokens[number] == tokens[: len(found.tokens[number])]
        else:
            assert (found.tokens[number], found.ends[number]) == (tokens, expected.ends[number])
