"""The choice between Triton's kernels and torch on a GPU.

Owns: the reasons against kernels, the line of the log that gives one, the forecast for `tokenyard doctor`,
and the sizes of the memory that steps and graphs take in addition to the KV cache.
Never: imports Triton before it is known to be there and wanted.
"""

import importlib.util
import inspect
import logging
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from worker.devices.device import NO_RESERVE, Device, Reserve
from worker.doctor_findings import Finding, Verdict
from worker.gpu.graphs import GraphSizes
from worker.gpu.step_buffers import Limits, StepBuffers
from worker.model.quantization import (
    FLOAT8_ROWS,
    INT8_ROWS,
    refuse_quantization,
    refuse_rows,
    rounding_of,
)
from worker.model.quantized_layers import QuantizedLinear
from worker.model.toolkit import Toolkit
from worker.progress import LoadStage
from worker.worker_config import WorkerConfig

log = logging.getLogger(__name__)

_TOPIC = "GPU kernels"
_SMALLEST_BLOCK = 8
_LANGUAGE = {
    *("abs", "arange", "atomic_add", "bfloat16", "cast", "cdiv", "clamp", "constexpr", "cumsum"),
    *("debug_barrier", "div_rn", "dot", "dtype", "exp", "exp2", "float16", "float32", "float64"),
    *("float8e4nv", "full", "inline_asm_elementwise", "int16", "int32", "int64", "int8", "join", "load"),
    *("max", "maximum", "min", "minimum", "multiple_of", "num_programs", "program_id", "range", "reshape"),
    *("rsqrt", "split", "static_range", "store", "sum", "tensor", "trans", "tuple", "uint8", "where"),
    "zeros",
}
"""Triton's language, as far as our kernels are written in it; 3.6 and 3.9 have it."""
_PARAMETERS = {
    "dot": "input_precision",
    "load": "cache_modifier",
    "atomic_add": "sem",
    "inline_asm_elementwise": "pack",
}
_SAMPLER_BYTES = 160 << 20
"""The most memory that sampling takes, with its copies of some rows of logits in float32. An estimate."""


def obstacle(config: WorkerConfig) -> str:
    """Say why a GPU is left to torch; empty if it is not."""
    if config.gpu_kernels == "off":
        return "--gpu-kernels is off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    lacking = _lacking_in_triton()
    if lacking:
        return lacking
    if "CC" not in os.environ and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler, with which Triton builds what launches its kernels"
    if not Path(str(sysconfig.get_config_var("INCLUDEPY")), "Python.h").is_file():
        return "the headers of Python are not installed, with which Triton builds what launches its kernels"
    return ""


def _lacking_in_triton() -> str:
    """Say what this release of Triton lacks that the kernels are written in; empty if nothing."""
    try:
        import triton
        from triton import language
    except (ImportError, OSError) as error:
        return f"triton cannot be loaded ({error})"
    lacking = sorted(name for name in _LANGUAGE if not hasattr(language, name))
    lacking += [
        f"{name}({parameter}=)"
        for name, parameter in _PARAMETERS.items()
        if name not in lacking and parameter not in inspect.signature(getattr(language, name)).parameters
    ]
    lacking += [] if hasattr(triton, "knobs") else ["knobs"]
    if not lacking:
        return ""
    return f"triton {triton.__version__} has no {', '.join(lacking)}: the kernels need 3.6 or later"


def open_toolkit(
    config: WorkerConfig, device: Device, dtype: torch.dtype, _stage: LoadStage
) -> Toolkit | None:
    """Open the kernels, which are compiled at their first use; None without any.

    Raises StartupError for weights that are to be quantized without them.
    """
    _refuse_quantization(config)
    reason = obstacle(config)
    if reason:
        log.warning("no Triton kernels, torch computes one step at a time: %s", reason)
        return None
    from worker.gpu.toolkit import GpuToolkit

    _keep_compiled_kernels()
    return GpuToolkit(
        device,
        config.attention_backend,
        dtype=dtype,
        rounding=rounding_of(config),
        max_adapters=config.adapter_limits.max_in_step,
    )


def _keep_compiled_kernels() -> None:
    """Let Triton keep what it compiles where the CPU's kernels are kept, which a volume makes outlive us."""
    import triton

    if "TRITON_CACHE_DIR" in os.environ or "XDG_CACHE_HOME" not in os.environ:
        return  # as asked, or beneath the home
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "tokenyard" / "triton"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled kernels are not kept for the next start: %s", error)
        return
    if not os.access(folder, os.W_OK):
        log.warning("compiled kernels are not kept for the next start: %s cannot be written to", folder)
        return
    triton.knobs.cache.dir = str(folder)


def foresee_kernels(config: WorkerConfig, _device: Device, _dtype: torch.dtype) -> Finding:
    """Foresee the result of `open_toolkit`; compiles nothing. Raises StartupError where it would."""
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


def reserve(
    config: WorkerConfig, model: torch.nn.Module, *, checkpoint_len: int, vocab_size: int, dtype: torch.dtype
) -> Reserve:
    """Measure the memory that steps hold in addition to weights and KV cache."""
    if obstacle(config):
        return NO_RESERVE
    from worker.gpu.attention import ATTENTION_BACKENDS
    from worker.gpu.trials.triton_frame import table_bytes

    longest = config.max_model_len or checkpoint_len
    limits = step_limits(config, longest, config.block_size or _SMALLEST_BLOCK)
    sizes = GraphSizes(limits, longest)
    num_graphs = 0 if config.enforce_eager else len(sizes)
    logits_bytes = num_graph_logits(config, sizes, vocab_size) * dtype.itemsize
    count_bytes = limits.num_sequences * vocab_size * torch.int32.itemsize  # for penalties
    tables_bytes = table_bytes(model, longest, dtype)
    attention = ATTENTION_BACKENDS[config.attention_backend]
    attention_bytes = 0 if attention.find_obstacle() else attention.num_bytes
    buffer_bytes = StepBuffers.num_bytes(limits) + logits_bytes + count_bytes + _SAMPLER_BYTES
    buffer_bytes += tables_bytes + attention_bytes + _numbers_bytes(config, model, dtype)
    return Reserve(num_graphs, buffer_bytes)


def _numbers_bytes(config: WorkerConfig, model: torch.nn.Module, dtype: torch.dtype) -> int:
    """Measure the decoded weights of a product of many rows: once in graphs, once for steps without."""
    if dtype is torch.float32:
        return 0
    sizes = {"layers": 0, "head": 0}
    for name, module in model.named_modules():
        is_head = name.endswith("lm_head")
        option = config.quantize_head if is_head else config.quantization
        if isinstance(module, QuantizedLinear) or (isinstance(module, torch.nn.Linear) and option != "none"):
            place = "head" if is_head else "layers"
            sizes[place] = max(sizes[place], module.in_features * module.out_features)
    # A layer's gates and ups, or queries, keys and values, are one product, of which each rank has a part.
    most = max(2 * sizes["layers"] // config.num_ranks, sizes["head"])
    return most * dtype.itemsize * (1 if config.enforce_eager else 2)


def _refuse_quantization(config: WorkerConfig) -> None:
    refuse_rows(config, INT8_ROWS, device="GPUs", known=FLOAT8_ROWS)
    reason = obstacle(config)
    if reason:
        refuse_quantization(
            config, f" needs the GPU kernels, and {reason}", fix="leave it out, or see --gpu-kernels"
        )


def num_graph_logits(config: WorkerConfig, sizes: GraphSizes, vocab_size: int) -> int:
    """Count the logits that graphs leave, in one place for all."""
    return 0 if config.enforce_eager else sizes.most_logits * vocab_size


def step_limits(config: WorkerConfig, max_model_len: int, block_size: int) -> Limits:
    """Find the largest step, for which buffers are made, of layers in one stripe and without states."""
    return Limits(
        num_tokens=config.max_num_batched_tokens,
        num_sequences=config.max_num_seqs,
        num_blocks=-(-(max_model_len + 1) // block_size),
        block_size=block_size,
        max_drafts=config.speculation.num_speculative_tokens,
    )
