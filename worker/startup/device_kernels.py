"""The kernels of a device: memory that they need, steps and sampler that run on them, the doctor's finding.

Owns: the choice between worker/cpu and worker/gpu, in one place for generation and survey.
Never: imports worker/gpu for a CPU; compiles kernels.
"""

from typing import NamedTuple

import torch

from worker.cpu.cpu_kernel_choice import foresee_kernels as foresee_cpu_kernels
from worker.devices.device import NO_RESERVE, Device, Reserve
from worker.doctor_findings import Finding
from worker.progress import LoadStage
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import RowSampler
from worker.sampling.sampler import Sampler
from worker.startup.loader import LoadedModel
from worker.startup.ready_model import ReadyModel
from worker.steps.model_runner import EagerSteps, ModelRunner, StepRunner
from worker.worker_config import WorkerConfig


class StepParts(NamedTuple):
    """The runner and the sampler of the steps of one model."""

    steps: StepRunner
    sampler: RowSampler
    runs_ahead: bool
    """The host can launch a step before the result of the step before is known."""


def reserved_memory(config: WorkerConfig, device: Device, loaded: LoadedModel) -> Reserve:
    """Size the memory that the device's kernels will hold beside weights and KV cache."""
    if not device.is_gpu:
        return NO_RESERVE
    from worker.gpu.gpu_kernel_choice import reserve

    return reserve(config, loaded)


def open_step_parts(
    config: WorkerConfig,
    ready: ReadyModel[ModelRunner],
    device: Device,
    stage: LoadStage,
    grammars: Grammars,
) -> StepParts:
    """Choose the runner and the sampler of a model that is ready. Raises StartupError."""
    if device.is_gpu and ready.surgery is not None:
        from worker.gpu.gpu_kernel_choice import open_steps

        steps, sampler = open_steps(config, ready, device, stage, grammars)
        return StepParts(steps, sampler, runs_ahead=True)
    return StepParts(
        EagerSteps(ready.runner, ready.backend, device),
        Sampler(vocab_size=ready.facts.vocab_size, device=device, grammars=grammars),
        runs_ahead=False,
    )


def foresee_kernels(config: WorkerConfig, device: Device, dtype: torch.dtype) -> Finding:
    """Report which kernels will be used, without compiling any. Raises StartupError for what is refused."""
    if not device.is_gpu:
        return foresee_cpu_kernels(config, device, dtype)
    from worker.gpu.gpu_kernel_choice import foresee_kernels as foresee_gpu_kernels

    return foresee_gpu_kernels(config)
