"""Whether this worker computes with Triton kernels on its GPU, and why not; and what they work in.

Owns: the one line of the log that says so, what `tokenyard doctor` says before, and the sizes of the memory
that steps and graphs take beside the KV cache.
Never: imports Triton before it is known to be there and wanted.
"""

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from worker.devices.device import NO_RESERVE, Device, Reserve
from worker.doctor_findings import Finding, Verdict
from worker.gpu.graphs import GraphSizes
from worker.gpu.step_buffers import Limits, StepBuffers
from worker.model.surgery import Toolkit
from worker.progress import LoadPhase, LoadStage
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import RowSampler
from worker.startup.loader import LoadedModel
from worker.startup.ready_model import ReadyModel
from worker.steps.model_runner import ModelRunner, StepRunner
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_TOPIC = "GPU kernels"
_SMALLEST_BLOCK = 8
_SAMPLER_BYTES = 160 << 20
"""What drawing takes at most, with what it takes for a moment: copies of some rows of logits in float32. An
estimate."""


def obstacle(config: WorkerConfig) -> str:
    """Why a GPU is left to torch; empty if it is not."""
    if config.gpu_kernels == "off":
        return "--gpu-kernels is off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, with which Triton builds what launches its kernels"
    if not Path(str(sysconfig.get_config_var("INCLUDEPY")), "Python.h").is_file():
        return "the headers of Python are not installed, with which Triton builds what launches its kernels"
    return ""


def open_toolkit(config: WorkerConfig, device: Device) -> Toolkit | None:
    """The kernels, which are compiled when they are first used; None where there are none.

    Raises StartupError for weights that are to be quantized, which only the CPU's kernels can.
    """
    _refuse_quantization(config)
    reason = obstacle(config)
    if reason:
        log.warning("no Triton kernels, torch computes one step at a time: %s", reason)
        return None
    from worker.gpu.gpu_toolkit import GpuToolkit

    return GpuToolkit(device)


@contextmanager
def refusing_kernels() -> Iterator[None]:
    """Turn a kernel that this GPU cannot be given into a StartupError."""
    from triton import TritonError

    try:
        yield
    except TritonError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(
            f"Triton refuses a kernel on this GPU: {reason}",
            fix="start with --gpu-kernels off, and report it",
        ) from error


def foresee_kernels(config: WorkerConfig) -> Finding:
    """What `open_toolkit` would come to; compiles nothing. Raises StartupError where it would."""
    _refuse_quantization(config)
    reason = obstacle(config)
    if not reason:
        return Finding(topic=_TOPIC, verdict=Verdict.OK, what="compiled by Triton while the model is tried")
    if config.gpu_kernels == "off":
        return Finding(topic=_TOPIC, verdict=Verdict.OK, what="none, as asked for: torch computes")
    return Finding(
        topic=_TOPIC,
        verdict=Verdict.WARNING,
        what=f"none: {reason}; torch computes, several times more slowly",
        fix="install gcc, Python's headers, and triton in the version that torch names",
    )


def reserve(config: WorkerConfig, loaded: LoadedModel) -> Reserve:
    """What steps will hold beside weights and KV cache."""
    if obstacle(config):
        return NO_RESERVE
    longest = config.max_model_len or loaded.checkpoint_len
    limits = _limits(config, longest, config.block_size or _SMALLEST_BLOCK)
    num_graphs = 0 if config.enforce_eager else len(GraphSizes(limits, longest))
    logits_bytes = _num_graph_logits(config, loaded.vocab_size) * loaded.dtype.itemsize
    count_bytes = limits.num_sequences * loaded.vocab_size * torch.int32.itemsize  # for penalties
    return Reserve(num_graphs, StepBuffers.num_bytes(limits) + logits_bytes + count_bytes + _SAMPLER_BYTES)


def open_steps(
    config: WorkerConfig,
    ready: ReadyModel[ModelRunner],
    device: Device,
    stage: LoadStage,
    grammars: Grammars,
) -> tuple[StepRunner, RowSampler]:
    """Who computes steps, with graphs unless they are not wanted, and who draws. Raises StartupError."""
    from worker.gpu.gpu_runner import GpuSteps
    from worker.gpu.kernels.copies import WORD_BYTES, copy_blocks
    from worker.gpu.sampling.gpu_sampler import GpuSampler
    from worker.gpu.triton_attention import TritonAttention

    facts = ready.facts
    limits = _limits(config, facts.max_model_len, facts.block_size)
    dtype: torch.dtype = getattr(torch, facts.dtype)
    assert isinstance(ready.backend, TritonAttention)
    try:
        logits = device.zeros(_num_graph_logits(config, facts.vocab_size), dtype)
        buffers = StepBuffers(device, limits)
        sampler = GpuSampler(
            vocab_size=facts.vocab_size, max_num_seqs=limits.num_sequences, device=device, grammars=grammars
        )
        with refusing_kernels():
            sampler.warm_up(dtype)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            "memory ran out beside the KV cache", fix="lower --gpu-memory-utilization or --max-num-seqs"
        ) from error
    if ready.host_pool.block_bytes % WORD_BYTES == 0:
        ready.host_pool.copy_with(copy_blocks)
    logits_NV = logits.view(-1, facts.vocab_size)
    with refusing_kernels():
        steps = GpuSteps(ready.runner, ready.backend, device, buffers, sampler, logits_NV)
    if not config.enforce_eager:
        stage.enter(LoadPhase.CAPTURING)
        steps.capture(GraphSizes(limits, facts.max_model_len))
    return steps, sampler


def _refuse_quantization(config: WorkerConfig) -> None:
    if config.quantization != "none":
        raise StartupError(
            f"--quantization {config.quantization} needs the CPU kernels, and the model runs on a GPU",
            fix="leave it out, or ask for --device cpu",
        )


def _num_graph_logits(config: WorkerConfig, vocab_size: int) -> int:
    """What graphs leave behind them, in one place for all."""
    return 0 if config.enforce_eager else config.max_num_seqs * vocab_size


def _limits(config: WorkerConfig, max_model_len: int, block_size: int) -> Limits:
    return Limits(
        num_tokens=config.max_num_batched_tokens,
        num_sequences=config.max_num_seqs,
        num_blocks=-(-(max_model_len + 1) // block_size),
        block_size=block_size,
    )
