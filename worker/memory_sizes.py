"""Bytes to blocks: how large the KV cache and the host's pool are, and how long a sequence may grow.

Owns: the arithmetic, and the refusals with their numbers; of the weights too. Testable without a device.
Never: measures (machine.py, device.py) or allocates (startup.py, host_pool.py).
"""

from dataclasses import dataclass

from worker.worker_errors import StartupError

CPU_SHARE_OF_AVAILABLE = 0.25
"""Other processes live here too, and activations and the page cache of the weights need room."""
CPU_MOST_BYTES = 4 << 30
"""More is rarely reached before compute runs out on a CPU; kv_cache_bytes asks for it."""
_BYTES_OF_A_GRAPH = 16 << 20
"""Some hundred kernels with their arguments; the driver takes memory in pieces of 2 MiB. An estimate."""
_MOST_USEFUL_FILLS = 2
"""Once for every sequence at full length, and as much again for cached prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """What was asked, and what the model needs."""

    block_bytes: int
    block_size: int
    budget_bytes: int
    num_blocks: int | None
    """Asked for; overrides the budget."""
    max_model_len: int | None
    """Asked for; must fit."""
    checkpoint_len: int
    """The model's own context window, the longest that can be right."""
    max_num_seqs: int
    most_read_tokens: int | None = None
    """With a window in every layer: how many tokens a sequence reads and writes in a step at most. None: all
    of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    total: int
    """Once loaded, in the dtype that was asked for."""
    converted: int
    """Of these, what is not in the files' dtype: made on the host, whatever the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    num_blocks: int
    """Without the padding block."""
    max_model_len: int


def cpu_budget_bytes(available_bytes: int, *, asked_bytes: int | None, swap_bytes: int) -> int:
    """Memory for the KV cache on CPU. Asking for more than there is raises StartupError.

    The swap space comes out of the same memory, and comes first: it was asked for.
    """
    check_host_memory(available_bytes, cache_bytes=asked_bytes or 0, swap_bytes=swap_bytes)
    if asked_bytes is None:
        return min(int((available_bytes - swap_bytes) * CPU_SHARE_OF_AVAILABLE), CPU_MOST_BYTES)
    return asked_bytes


def check_weights_fit(num_bytes: int, *, available_bytes: int, where: str) -> int:
    """Refuse, with StartupError, weights that would not fit; returns the bytes that they leave."""
    if num_bytes > available_bytes:
        raise StartupError(
            f"the weights take {_gib(num_bytes)}, but {where} has {_gib(available_bytes)} available",
            fix="free some, ask for --dtype bfloat16 if they are loaded as float32, or take a smaller model",
        )
    return available_bytes - num_bytes


def check_host_memory(available_bytes: int, *, cache_bytes: int, swap_bytes: int) -> None:
    """Refuse, with StartupError, what this machine cannot hold. `cache_bytes` is 0 for a cache on a GPU."""
    if cache_bytes + swap_bytes <= available_bytes:
        return
    wanted = {"KV cache": cache_bytes, "swap space": swap_bytes}
    fixes = {
        "KV cache": "ask for less with --kv-cache-memory",
        "swap space": "ask for less with --swap-space",
    }
    asked = [name for name, num_bytes in wanted.items() if num_bytes]
    named = " and ".join(f"a {name} of {_gib(wanted[name])}" for name in asked)
    verb = "does not fit" if len(asked) == 1 else "do not fit together"
    raise StartupError(
        f"{named} {verb} into the {_gib(available_bytes)} of memory that are available",
        fix=fixes[asked[0]] if len(asked) == 1 else "ask for less with --swap-space, or for a smaller cache",
    )


def num_host_blocks(*, swap_bytes: int, block_bytes: int) -> int:
    """Blocks that the swap space holds. Raises StartupError for one that is too small for any."""
    if 0 < swap_bytes < block_bytes:
        raise StartupError(
            f"a swap space of {swap_bytes} bytes holds no KV block of {block_bytes} bytes",
            fix=f"ask for --swap-space {block_bytes} or more, or for none",
        )
    return swap_bytes // block_bytes


def graph_bytes(num_graphs: int, *, activation_bytes: int) -> int:
    """What so many captured steps will take, by estimate: the cache must be there before they can be.

    One set of a step's own tensors for all of them, apart from that of steps that are not captured, and
    what the driver keeps of each graph.
    """
    return (activation_bytes + num_graphs * _BYTES_OF_A_GRAPH) if num_graphs else 0


def cuda_budget_bytes(
    *, total_bytes: int, free_bytes: int, activation_bytes: int, reserved_bytes: int = 0, utilization: float
) -> int:
    """Memory for the KV cache on a GPU, once the weights are on it.

    `utilization` is the share of the whole device that all of this process and its neighbours on the
    device may fill; `activation_bytes` is the peak of a step above the weights, measured; `reserved_bytes`
    is what will be allocated after the cache.
    """
    used_bytes = total_bytes - free_bytes
    return max(0, int(total_bytes * utilization) - used_bytes - activation_bytes - reserved_bytes)


def size_cache(request: CacheRequest) -> CacheSize:
    """Choose the number of blocks and the longest sequence. Raises StartupError with what would fit."""
    asked_len = request.max_model_len
    if asked_len is not None and asked_len > request.checkpoint_len:
        raise StartupError(
            f"max_model_len {asked_len} exceeds the model's own context window "
            f"of {request.checkpoint_len} tokens",
            fix=f"ask for --max-model-len {request.checkpoint_len} or less",
        )
    num_blocks = request.num_blocks
    if num_blocks is None:
        # One block of the budget is the padding block.
        num_blocks = request.budget_bytes // request.block_bytes - 1
        longest = asked_len or request.checkpoint_len
        useful = _MOST_USEFUL_FILLS * request.max_num_seqs * _ceil_div(longest, request.block_size)
        num_blocks = min(num_blocks, useful)
    if num_blocks < 1:
        raise StartupError(
            f"the memory left for the KV cache ({_gib(request.budget_bytes)}) holds no two blocks "
            f"of {request.block_bytes} bytes",
            fix=f"give it at least {2 * request.block_bytes} bytes (--kv-cache-memory on CPU, "
            "--gpu-memory-utilization on CUDA), or take a smaller --block-size",
        )
    cache_len = _cache_len(request, num_blocks)
    if asked_len is not None and asked_len > cache_len:
        needed_bytes = (_ceil_div(asked_len, request.block_size) + 1) * request.block_bytes
        raise StartupError(
            f"the KV cache of {num_blocks} blocks holds {cache_len} tokens, "
            f"but one sequence of max_model_len {asked_len} needs {_gib(needed_bytes)} of it",
            fix=f"ask for --max-model-len {cache_len} or less, or give the cache {needed_bytes} bytes",
        )
    return CacheSize(num_blocks=num_blocks, max_model_len=asked_len or min(request.checkpoint_len, cache_len))


def _cache_len(request: CacheRequest, num_blocks: int) -> int:
    """The longest sequence that the cache can serve, alone."""
    if request.most_read_tokens is not None:
        # So many tokens in a row touch one block more than they fill.
        most_blocks = _ceil_div(request.most_read_tokens, request.block_size) + 1
        if num_blocks >= most_blocks:
            return request.checkpoint_len
    return num_blocks * request.block_size


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
