"""The parts, in their order: what is wanted most is first. Those behind `kernels` have what time is left.

Owns: names, limits of time, and what each part cannot do without.
"""

from dataclasses import dataclass, field
from typing import Any

_TORCH = ("torch", "numpy")
_WORKER = (*_TORCH, "transformers", "triton", "safetensors", "msgspec")
_SERVER = (
    *_WORKER,
    *("fastapi", "starlette", "uvicorn", "pydantic", "msgspec", "zmq", "orjson", "jinja2", "tokenizers"),
    *("prometheus_client", "llguidance"),
)


_FP8 = {"quantization": "fp8", "activations": "fp8", "kv_cache_dtype": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process."""

    name: str
    title: str
    module: str
    """Has a function `run(record, settings)`, or of the name behind a colon."""
    limit_s: float
    needs: tuple[str, ...]
    """Packages; without one of them the part is skipped."""
    shape: str = ""
    least_s: float = 1.0
    """With less time left it is not begun."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of the worker, as its configuration names them."""
    batches: tuple[int, ...] = ()
    """Sequences of each measured step, where they are others than usual."""


def _steps(name: str, title: str, limit_s: float, **others: Any) -> Part:
    """Make a part of the steps of the shape that its name begins with."""
    shape = next(each for each in ("qwen3-0.6b", "qwen3.5-4b", "llama-3.1-8b") if name.startswith(each))
    return Part(
        name=f"steps-{name}",
        title=f"Steps of {title}",
        module="campaigns.gpu.steps",
        limit_s=limit_s,
        least_s=60,
        needs=_WORKER,
        shape=shape,
        **others,
    )


PARTS = (
    Part(
        name="device",
        title="The device, and what it can do at most",
        module="campaigns.gpu.device_facts",
        limit_s=45,
        needs=_TORCH,
    ),
    Part(
        name="tokens",
        title="The same tokens, whichever way they are computed",
        module="campaigns.gpu.tokens",
        limit_s=100,
        needs=_WORKER,
    ),
    _steps("qwen3-0.6b", "Qwen3-0.6B's shape", 90),
    _steps("llama-3.1-8b", "Llama-3.1-8B's shape", 145),
    Part(
        name="kernels",
        title="Every kernel against its definition",
        module="campaigns.gpu.kernels",
        limit_s=110,
        needs=(*_WORKER, "pytest", "hypothesis"),
    ),
    Part(
        name="host",
        title="What a step costs the host",
        module="campaigns.gpu.host_step",
        limit_s=100,
        least_s=20,
        needs=(*_WORKER, "msgspec", "orjson"),
    ),
    _steps("qwen3.5-4b", "Qwen3.5-4B's shape, three of four layers recurrent", 145),
    Part(
        name="exchange",
        title="Waiting for all blocks in one kernel",
        module="campaigns.gpu.one_kernel.probe:run_exchange",
        limit_s=30,
        needs=_TORCH,
    ),
    Part(
        name="stream",
        title="A stream of weights in one kernel",
        module="campaigns.gpu.one_kernel.probe:run_stream",
        limit_s=40,
        needs=_TORCH,
    ),
    Part(
        name="chain",
        title="The products of a step in one kernel",
        module="campaigns.gpu.one_kernel.chain",
        limit_s=60,
        needs=_WORKER,
    ),
    Part(
        name="libraries",
        title="FlashAttention 3 and vLLM, where they are there",
        module="campaigns.gpu.tune.libraries",
        limit_s=75,
        needs=_WORKER,
    ),
    Part(
        name="tiles",
        title="Products by codes of 16 to 256 rows, by other tiles",
        module="campaigns.gpu.tune.tiles",
        limit_s=80,
        least_s=20,
        needs=_WORKER,
    ),
    *(
        Part(
            name=f"peer-{shape}{suffix}",
            title=f"{shape}{suffix} by vLLM and by us, over HTTP",
            module="campaigns.gpu.serving",
            limit_s=limit_s,
            least_s=120,
            needs=_SERVER,
            shape=shape,
            options=options,
        )
        for shape, suffix, limit_s, options in (
            ("llama-3.1-8b", "", 480, {}),
            ("qwen3-0.6b", "", 360, {}),
            ("llama-3.1-8b", "-fp8", 480, _FP8),
        )
    ),
    _steps(
        "llama-3.1-8b-fp8-many",
        "512 and 1,024 sequences of Llama-3.1-8B's shape in FP8",
        120,
        options=_FP8,
        batches=(512, 1024),
    ),
    Part(
        name="tokens-quantized",
        title="The same tokens by quantized weights and caches",
        module="campaigns.gpu.tokens_quantized",
        limit_s=120,
        least_s=20,
        needs=_WORKER,
    ),
    _steps("llama-3.1-8b-int4", "Llama-3.1-8B's shape in 4 bits", 145, options={"quantization": "int4"}),
    _steps("llama-3.1-8b-fp8", "Llama-3.1-8B's shape in FP8, keys and values too", 145, options=_FP8),
    Part(
        name="ranks",
        title="Ranks on GPUs",
        module="campaigns.gpu.ranks",
        limit_s=230,
        least_s=60,
        needs=_SERVER,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
QUARTERS = {
    "first": (
        *("device", "exchange", "stream", "chain", "libraries", "tiles"),
        *("steps-qwen3-0.6b", "steps-llama-3.1-8b-fp8"),
    ),
    "second": (
        "device",
        "tokens",
        "tokens-quantized",
        "steps-llama-3.1-8b-int4",
        "steps-llama-3.1-8b-fp8-many",
    ),
}
"""Parts by name, for a quarter of an hour on a lent GPU each: steps need the rates of `device`."""
