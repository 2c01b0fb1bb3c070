"""Cost of a step for the host, by phase: the engine's loop with a worker whose model computes nothing.

Owns: the pieces that serve, from the plan to the encoded message, put together without a model; the host's
processor time, and what the device was asked for.
Never: waits for anything but the loop. Without a GPU the device does nothing (null_device.py): that is the
host's own part. On a GPU launches and copies are real, and the model is not.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from campaigns.gpu.driving import scheduler_config
from campaigns.gpu.null_device import Asked, CountedOperations, NullGpu, NullGraph, no_kernels
from campaigns.gpu.results import Record
from engine.core.loop import EngineLoop
from engine.core.worker_steps import CheckedWorker
from engine.process_messages import ToClient, ToEngine, encode
from scheduler.messages import SamplingParams, SchedulerOutput, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.device import Device, open_device
from worker.gpu.graphs import GraphSizes
from worker.gpu.runner import GpuSteps
from worker.gpu.sampling import gpu_sampler as sampler
from worker.gpu.sampling.gpu_sampler import GpuSampler
from worker.gpu.step_buffers import Limits, StepBuffers
from worker.steps import generation_step
from worker.steps.generation_step import GenerationSteps
from worker.steps.host_pool import HostPool
from worker.steps.row_table import RowTable
from worker.steps.tokens import StepOutcome, StepTokens
from worker.worker_config import ModelFacts, WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_CONTEXT = 1024
_NUM_STEPS = 200
_MOST_TOKENS = 8192
_NUM_WARM = 20
_VOCAB_SIZE = 151_936
_NUM_COUNTED = 4
"""Steps whose operations are counted: torch carries them out meanwhile."""
_LAUNCH_US = (5, 10)
"""Estimate of what a launch takes besides, with Triton's own launcher, for machines without a GPU."""
_GPU = WorkerConfig(model_path="", device="cuda")
_PHASES = ("schedule", "build", "fill", "replay", "sample", "launch", "collect", "update", "encode", "loop")
"""Each without those within it: `launch` is the rest of the worker's launch, `loop` the rest of a turn."""
_COUNTED = ("kernels", "copies_up", "copies_down", "events", "pinned")

WAYS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, num_logprobs=5),
}


class _NoModel:
    """A ModelRunner whose logits are zeros."""

    eyes = None  # it reads no pictures

    def __init__(self, logits_NV: Tensor) -> None:
        self._logits_NV = logits_NV

    @contextmanager
    def logits_into(self, target_NV: Tensor) -> Iterator[None]:
        """Answer with the target meanwhile: a graph has no copy of logits."""
        zeros_NV, self._logits_NV = self._logits_NV, target_NV
        yield
        self._logits_NV = zeros_NV

    def note_rows(self, _rows_T: Tensor) -> None:
        """Take no notice: there are no adapters."""

    def note_hidden(self, _hidden: Any, _slots_ST: Tensor) -> None:
        """Take no notice: there is no head."""

    def forward_placed(self, tokens: StepTokens, _placed: Any, _executor: Any) -> StepOutcome:
        return StepOutcome(self._logits_NV[: len(tokens.logits_indices_N)])


class _NoAttention:
    """A BatchAttention that nobody asks."""

    def begin_batch(self, batch: Any) -> None:
        """Its kernels are in the graph."""


class _Encoder:
    """A Mailbox that encodes what it is given, and sends it to nobody."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def receive(self, *, wait_s: float) -> list[ToEngine]:  # noqa: ARG002 - nobody writes
        return []

    def send(self, message: ToClient) -> None:
        self.num_bytes += len(encode(message))


class HostCost(NamedTuple):
    """Figures of one step."""

    total_s: float
    phases_s: list[float]


class Step(NamedTuple):
    """Parts of the host's time that are measured."""

    params: SamplingParams
    num_sequences: int
    context: int
    num_steps: int


class Engine:
    """The pieces, for sequences that never end."""

    def __init__(self, device: Device, step: Step, *, vocab_size: int) -> None:
        """Their prompts are computed when this returns."""
        self.device = device
        self._vocab_size = vocab_size
        max_model_len = step.context + _most_tokens(step)
        blocks_each = -(-(max_model_len + 1) // device.default_block_size)
        limits = Limits(_MOST_TOKENS, step.num_sequences, blocks_each, device.default_block_size)
        facts = _facts(step.num_sequences * blocks_each, max_model_len, vocab_size, limits.block_size)
        worker = _worker_of(device, limits, facts)
        config = scheduler_config(facts, max_num_seqs=step.num_sequences, max_num_batched_tokens=_MOST_TOKENS)
        self.scheduler = Scheduler(config)
        self.mailbox = _Encoder()
        self.worker = CheckedWorker(worker, vocab_size=vocab_size)
        self.loop = EngineLoop(self.scheduler, self.worker, self.mailbox, time.monotonic)
        self._begin(step)

    def turn(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.loop.turn()

    def _begin(self, step: Step) -> None:
        numbers = np.random.default_rng(0)
        for n in range(step.num_sequences):
            prompt = tuple(numbers.integers(1, self._vocab_size, step.context).tolist())
            params = replace(step.params, seed=n, max_tokens=_most_tokens(step))
            self.scheduler.add_request(Sequence(SequenceId(n + 1), prompt, params), now_s=time.monotonic())
        num_decoding = 0
        while num_decoding < step.num_sequences:
            self.loop.turn()
            num_decoding = sum(seq.num_output_tokens > 0 for seq in self.scheduler.running_sequences())
        self.turn(_NUM_WARM // 2)


def _most_tokens(step: Step) -> int:
    """Tokens that keep the first running until the last one's prompt is computed and all is measured."""
    return 2 * step.num_steps + _NUM_WARM + step.num_sequences * step.context // _MOST_TOKENS


def _worker_of(device: Device, limits: Limits, facts: ModelFacts) -> GenerationSteps:
    sizes = GraphSizes(limits, facts.max_model_len)
    logits = device.zeros(sizes.most_logits * facts.vocab_size, torch.bfloat16)
    logits_NV = logits.view(-1, facts.vocab_size)
    layout = BlockLayout(layers={0: LayerShape(1, 1, 1)}, block_size=facts.block_size, dtype=torch.bfloat16)
    cache = KVCache(
        layout, facts.num_blocks, device.zeros((facts.num_blocks + 1) * layout.block_numel, layout.dtype)
    )
    model: Any = _NoModel(logits_NV)
    attention: Any = _NoAttention()
    row_sampler = GpuSampler(vocab_size=facts.vocab_size, max_num_seqs=limits.num_sequences, device=device)
    steps = GpuSteps(model, attention, device, StepBuffers(device, limits), row_sampler)
    steps.capture(sizes, logits_NV)
    rows = RowTable(
        max_num_seqs=limits.num_sequences,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
    )
    return GenerationSteps(
        device=device,
        facts=facts,
        rows=rows,
        host_pool=HostPool(0, cache, device),
        steps=steps,
        sampler=row_sampler,
    )


def _facts(num_blocks: int, max_model_len: int, vocab_size: int, block_size: int) -> ModelFacts:
    return ModelFacts(
        model_type="none",
        num_parameters=0,
        weight_bytes=0,
        dtype="bfloat16",
        device="",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        num_host_blocks=0,
        copy_s_per_block=0.0,
        kv_cache_bytes=0,
        runs_ahead=True,
        eos_token_ids=(),
    )


class Phases:
    """Processor time by phase. A phase within another one counts for itself alone."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(_PHASES, 0.0)
        self._within: list[float] = []

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed_work(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            started_s = time.thread_time()
            try:
                return work(*args, **kwargs)
            finally:
                took_s = time.thread_time() - started_s
                self.spent_s[name] += took_s - self._within.pop()
                if self._within:
                    self._within[-1] += took_s

        return timed_work

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """Time what `engine` does meanwhile."""
        graph = NullGraph if isinstance(engine.device, NullGpu) else torch.cuda.CUDAGraph
        launch = self.timed("launch", engine.worker.launch)

        def launch_and_watch(plan: SchedulerOutput) -> Any:
            return SimpleNamespace(result=self.timed("collect", launch(plan).result))

        parts: tuple[tuple[Any, str, str], ...] = (
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "update_from_output", "update"),
            (engine.mailbox, "send", "encode"),
            (engine.loop, "turn", "loop"),
            (generation_step, "build_inputs", "build"),
            (StepBuffers, "fill", "fill"),
            (GpuSampler, "begin", "sample"),
            (graph, "replay", "replay"),
        )
        with ExitStack() as stack, mock.patch.object(engine.worker, "launch", launch_and_watch):
            for owner, attribute, name in parts:
                work = self.timed(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, work))
            yield


def run(record: Record, settings: "Settings") -> None:
    """All batches and ways."""
    is_real = settings.target == "cuda" and torch.cuda.is_available()
    context, num_steps = (16, 4) if settings.is_smoke else (_CONTEXT, _NUM_STEPS)
    where = torch.cuda.get_device_name() if is_real else "a device that does nothing"
    record.note(
        f"The engine's loop over {where}, without a model: {context} tokens of context, a vocabulary of "
        f"{_VOCAB_SIZE}, two plans in flight. Processor time of its thread; all: median of {num_steps} "
        "steps, phases: mean, the clock's own cost included."
    )
    times = record.table("Host time of a decode step in microseconds", "Sequences", "Way", "All", *_PHASES)
    counts = record.table(
        "What a decode step asks of the device beside its graph",
        *("Sequences", "Way", "Kernels", "Copies up", "Copies down", "Events", "Pinned pieces"),
        "Launches, if a GPU's driver took 5 to 10 us for each",
    )
    for batch in (1, 2) if settings.is_smoke else (1, 8, 64, 256):
        for way, params in WAYS.items():
            step = Step(params, batch, context, num_steps)
            cost = _measure_on(open_device(_GPU), step) if is_real else _measure_on_nothing(step)
            asked = _count(step)
            times.add(batch, way, *(f"{spent_s * 1e6:.0f}" for spent_s in (cost.total_s, *cost.phases_s)))
            launches = (f"{each * asked.kernels / _NUM_COUNTED:.0f}" for each in _LAUNCH_US)
            per_step = (f"{getattr(asked, name) / _NUM_COUNTED:.4g}" for name in _COUNTED)
            counts.add(batch, way, *per_step, "included" if is_real else " to ".join(launches) + " us")
            record.figure(f"{way}_{batch}", cost.total_s)


def _measure_on_nothing(step: Step) -> HostCost:
    device = NullGpu()
    # Torch would compute them on the processor that is measured.
    reports = mock.patch.object(sampler, "measure_lines", _no_reports)
    with no_kernels(device), reports:
        return _measure_on(device, step)


def _no_reports(_logits: Tensor, where_I: Tensor, _tokens: Tensor, num_top: int, _given_IG: Tensor) -> Tensor:
    """All alike: the tokens 0, 1, 2 and so on, from the best."""
    return (
        torch.tensor([-1.0, 1.0, *(-1.0 - n for n in range(num_top)), *range(num_top)])
        .double()
        .repeat(len(where_I), 1)
    )


def _measure_on(device: Device, step: Step) -> HostCost:
    engine = Engine(device, step, vocab_size=_VOCAB_SIZE)
    gc.collect()
    gc.freeze()  # as the engine's process does
    totals_s = []
    for _ in range(step.num_steps):
        started_s = time.thread_time()
        engine.loop.turn()
        totals_s.append(time.thread_time() - started_s)
    phases = Phases()
    with phases.watching(engine):
        engine.turn(step.num_steps)
    gc.unfreeze()
    return HostCost(
        statistics.median(totals_s), [spent / step.num_steps for spent in phases.spent_s.values()]
    )


def _count(step: Step) -> Asked:
    """Operations that _NUM_COUNTED steps asked for."""
    device = NullGpu()
    with no_kernels(device):
        engine = Engine(device, step, vocab_size=_VOCAB_SIZE)
        device.asked = Asked()
        with CountedOperations(device):
            engine.turn(_NUM_COUNTED)
    return device.asked
