"""The start of steps on a GPU, once the model and its cache are there.

Owns: the memory that steps and graphs hold, allocated here, and the capture of graphs.
Never: runs on a machine without Triton.
"""

from typing import cast

import torch
from torch import Tensor

from worker.adapters.targets import AdapterWay
from worker.devices.device import Device
from worker.gpu.attention import PagedAttention
from worker.gpu.graphs import GraphSizes
from worker.gpu.kernel_choice import num_graph_logits, step_limits
from worker.gpu.kernels.copies import WORD_BYTES, copy_blocks
from worker.gpu.runner import GpuSteps
from worker.gpu.sampling.gpu_sampler import GpuSampler
from worker.gpu.step_buffers import StepBuffers
from worker.gpu.triton_adapters import AdaptedGpuLinear, GpuStepAdapters
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import Ranks, samples
from worker.sampling.grammar_rows import Grammars
from worker.sampling.rank_samplers import FollowingSampler
from worker.sampling.row_sampler import RowSampler
from worker.startup.ready_model import ReadyModel
from worker.steps.model_runner import ModelRunner, StepRunner, no_logits
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import StartupError


def adapters_by_triton(
    config: WorkerConfig, runner: ModelRunner, device: Device, *, dtype: torch.dtype
) -> AdapterWay:
    """Let layers compute updates by kernels, from the rows of each step's tokens on."""
    max_rank = config.adapter_limits.max_rank
    step = GpuStepAdapters(device, dtype=dtype, max_num_seqs=config.max_num_seqs, max_rank=max_rank)
    runner.rows_listener = step.take_rows
    return AdapterWay(step, AdaptedGpuLinear)


def open_steps(
    config: WorkerConfig,
    ready: ReadyModel[ModelRunner],
    device: Device,
    stage: LoadStage,
    grammars: Grammars,
    ranks: Ranks,
) -> tuple[StepRunner, RowSampler]:
    """Make the runner of steps, with graphs unless they are off, and the sampler. Raises StartupError."""
    facts, toolkit = ready.facts, ready.toolkit
    assert toolkit is not None
    limits = step_limits(config, facts.max_model_len, facts.block_size)
    sizes = GraphSizes(limits, facts.max_model_len)
    dtype: torch.dtype = getattr(torch, facts.dtype)
    try:
        logits_NV = _open_logits(num_graph_logits(config, sizes, facts.vocab_size), facts, device, ranks)
        buffers = StepBuffers(device, limits)
        sampler = _open_sampler(facts.vocab_size, limits.num_sequences, device, grammars, ranks)
        with toolkit.refusing_kernels():
            sampler.warm_up(dtype)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            "memory ran out beside the KV cache", fix="lower --gpu-memory-utilization or --max-num-seqs"
        ) from error
    if ready.host_pool.block_bytes % WORD_BYTES == 0:
        ready.host_pool.copy_with(copy_blocks)
    # The toolkit of a GPU made it.
    backend = cast("PagedAttention", ready.backend)
    with toolkit.refusing_kernels():
        steps = GpuSteps(ready.runner, backend, device, buffers, sampler, ranks)
    if not config.enforce_eager:
        stage.enter(LoadPhase.CAPTURING)
        steps.capture(sizes, logits_NV)
    return steps, sampler


def _open_logits(num_logits: int, facts: ModelFacts, device: Device, ranks: Ranks) -> Tensor:
    """Allocate the memory [N, V] for the logits of graphs, where this stage computes some."""
    if not ranks.stage.is_last:
        return no_logits(num_logits // facts.vocab_size, facts.vocab_size, device.torch_device)
    return device.zeros(num_logits, getattr(torch, facts.dtype)).view(-1, facts.vocab_size)


def _open_sampler(
    vocab_size: int, max_num_seqs: int, device: Device, grammars: Grammars, ranks: Ranks
) -> GpuSampler | FollowingSampler:
    if not samples(ranks):
        return FollowingSampler(vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, ranks=ranks)
    return GpuSampler(
        vocab_size=vocab_size, max_num_seqs=max_num_seqs, device=device, grammars=grammars, ranks=ranks
    )
