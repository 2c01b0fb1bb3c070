"""The start of steps on a GPU, once the model and its cache are there."""

from typing import Any

import torch
from torch import Tensor

from worker.devices.device import Device
from worker.gpu.graphs import GraphSizes
from worker.gpu.kernel_choice import num_graph_logits, step_limits
from worker.gpu.kernels.copies import WORD_BYTES, copy_blocks
from worker.gpu.runner import GpuSteps
from worker.gpu.sampling.gpu_sampler import open_gpu_sampler
from worker.gpu.step_buffers import StepBuffers
from worker.progress import LoadPhase, LoadStage
from worker.ranks.ranks import Ranks
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import RowSampler
from worker.startup.ready_model import ReadyModel
from worker.steps.model_runner import ModelRunner, StepRunner, no_logits
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import StartupError


def open_steps(
    config: WorkerConfig,
    ready: ReadyModel[ModelRunner],
    device: Device,
    stage: LoadStage,
    grammars: Grammars,
    ranks: Ranks,
) -> tuple[StepRunner, RowSampler]:
    """Make the runner of steps, with graphs unless they are off, and the sampler. Raises StartupError."""
    facts, toolkit = ready.facts, ready.measured.toolkit
    assert toolkit is not None
    limits = step_limits(config, facts.max_model_len, facts.block_size)._replace(
        num_stripes=max(1, facts.num_tables), num_state_blocks=facts.num_state_blocks
    )
    sizes = GraphSizes(limits, facts.max_model_len)
    dtype: torch.dtype = getattr(torch, facts.dtype)
    try:
        logits_NV = _open_logits(num_graph_logits(config, sizes, facts.vocab_size), facts, device, ranks)
        buffers = StepBuffers(device, limits)
        sampler = open_gpu_sampler(facts.vocab_size, limits.num_sequences, device, grammars, ranks)
        with toolkit.refusing_kernels():
            sampler.warm_up(dtype)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            "no memory is left next to the KV cache", fix="lower --gpu-memory-utilization or --max-num-seqs"
        ) from error
    if ready.pools.host_pool.block_bytes % WORD_BYTES == 0:
        ready.pools.host_pool.copy_with(copy_blocks)
    backend: Any = ready.proven.backend  # PagedAttention: the toolkit of a GPU made it
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
