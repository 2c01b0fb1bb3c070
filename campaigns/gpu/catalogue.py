"""The parts, in their order: what is wanted most is first. Those behind `kernels` have what time is left.

Owns: names, limits of time, and what each part cannot do without.
"""

from dataclasses import dataclass, field

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
    has_own_context: bool = False
    """With the longest context of the shape, as a server has it that is told nothing else."""
    least_s: float = 1.0
    """With less time left it is not begun."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of the worker, as its configuration names them."""
    batches: tuple[int, ...] = ()
    """Sequences of each measured step, where they are others than usual."""


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
    Part(
        name="steps-qwen3-0.6b",
        title="Steps of Qwen3-0.6B's shape",
        module="campaigns.gpu.steps",
        limit_s=90,
        needs=_WORKER,
        shape="qwen3-0.6b",
    ),
    Part(
        name="throughput-qwen3-0.6b",
        title="Requests of Qwen3-0.6B's shape, served without HTTP",
        module="campaigns.gpu.served.part",
        limit_s=70,
        needs=(*_WORKER, "tokenizers"),
        shape="qwen3-0.6b",
    ),
    Part(
        name="steps-llama-3.1-8b",
        title="Steps of Llama-3.1-8B's shape",
        module="campaigns.gpu.steps",
        limit_s=145,
        needs=_WORKER,
        shape="llama-3.1-8b",
    ),
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
    Part(
        name="steps-qwen3.5-4b",
        title="Steps of Qwen3.5-4B's shape, three of four layers recurrent",
        module="campaigns.gpu.steps",
        limit_s=145,
        least_s=60,
        needs=_WORKER,
        shape="qwen3.5-4b",
    ),
    Part(
        name="throughput-llama-3.1-8b",
        title="Requests of Llama-3.1-8B's shape, served without HTTP",
        module="campaigns.gpu.served.part",
        limit_s=110,
        least_s=60,
        needs=(*_WORKER, "tokenizers"),
        shape="llama-3.1-8b",
    ),
    Part(
        name="serving",
        title="Served by HTTP",
        module="campaigns.gpu.serving",
        limit_s=90,
        least_s=40,
        needs=_SERVER,
        shape="qwen3-0.6b",
    ),
    Part(
        name="serving-llama-3.1-8b",
        title="Llama-3.1-8B's shape served by HTTP",
        module="campaigns.gpu.serving",
        limit_s=200,
        least_s=90,
        needs=_SERVER,
        shape="llama-3.1-8b",
    ),
    *(
        Part(
            name=f"peer-{shape}{suffix}",
            title=f"{shape}{suffix} by vLLM and by us, over HTTP",
            module="campaigns.gpu.serving:run_peer",
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
    Part(
        name="ranks",
        title="Ranks on GPUs",
        module="campaigns.gpu.ranks",
        limit_s=230,
        least_s=60,
        needs=_SERVER,
    ),
    Part(
        name="anchors",
        title="Our kernels beside NVIDIA's",
        module="campaigns.gpu.tune.anchors",
        limit_s=150,
        least_s=30,
        needs=_WORKER,
    ),
    Part(
        name="codes",
        title="Products by codes beside cuBLAS",
        module="campaigns.gpu.tune.codes",
        limit_s=90,
        least_s=20,
        needs=_WORKER,
    ),
    Part(
        name="tokens-quantized",
        title="The same tokens by quantized weights and caches",
        module="campaigns.gpu.tokens_quantized",
        limit_s=120,
        least_s=20,
        needs=_WORKER,
    ),
    Part(
        name="steps-llama-3.1-8b-int4",
        title="Steps of Llama-3.1-8B's shape in 4 bits",
        module="campaigns.gpu.steps",
        limit_s=145,
        least_s=60,
        needs=_WORKER,
        shape="llama-3.1-8b",
        options={"quantization": "int4"},
    ),
    Part(
        name="steps-llama-3.1-8b-fp8",
        title="Steps of Llama-3.1-8B's shape in FP8, keys and values too",
        module="campaigns.gpu.steps",
        limit_s=145,
        least_s=60,
        needs=_WORKER,
        shape="llama-3.1-8b",
        options=_FP8,
    ),
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
    Part(
        name="steps-llama-3.1-8b-fp8-many",
        title="Steps of 512 and 1,024 sequences of Llama-3.1-8B's shape in FP8",
        module="campaigns.gpu.steps",
        limit_s=120,
        least_s=60,
        needs=_WORKER,
        shape="llama-3.1-8b",
        options=_FP8,
        batches=(512, 1024),
    ),
    Part(
        name="pool",
        title="Decodes over a pool of 100 GiB",
        module="campaigns.gpu.tune.pool",
        limit_s=40,
        least_s=15,
        needs=_WORKER,
    ),
    Part(
        name="steps-qwen3-0.6b-full",
        title="Steps of Qwen3-0.6B's shape with its longest context",
        module="campaigns.gpu.steps",
        limit_s=120,
        least_s=40,
        needs=_WORKER,
        shape="qwen3-0.6b",
        has_own_context=True,
    ),
    Part(
        name="steps-llama-3.1-8b-full",
        title="Steps of Llama-3.1-8B's shape with its longest context",
        module="campaigns.gpu.steps",
        limit_s=200,
        least_s=90,
        needs=_WORKER,
        shape="llama-3.1-8b",
        has_own_context=True,
    ),
    Part(
        name="tune",
        title="Sizes of the kernels, measured beside others",
        module="campaigns.gpu.tune.part",
        limit_s=240,
        least_s=90,
        needs=_WORKER,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
QUARTERS = {
    "first": (
        *("device", "exchange", "stream", "chain", "libraries", "tiles"),
        *("steps-qwen3-0.6b", "steps-llama-3.1-8b-fp8"),
    ),
    "second": ("tokens", "tokens-quantized", "steps-llama-3.1-8b-int4", "steps-llama-3.1-8b-fp8-many"),
}
"""Parts by name, for a quarter of an hour on a lent GPU each."""
