"""Sizes of the KV cache and of the host's pool in blocks, and the longest sequence."""

from bisect import bisect_right
from dataclasses import dataclass

from scheduler.cache_groups import CacheGroup, most_blocks
from worker.worker_errors import StartupError

CPU_SHARE_OF_AVAILABLE = 0.25
"""Other processes, activations and the page cache of the weights need room too."""
CPU_MOST_BYTES = 4 << 30
"""A CPU rarely computes fast enough to fill more; kv_cache_bytes asks for more."""
_BYTES_OF_A_GRAPH = 16 << 20
"""Estimate for some hundred kernels with arguments; the driver takes memory in pieces of 2 MiB."""
_MOST_USEFUL_FILLS = 2
"""Twice every sequence at full length: once for the sequences, once for cached prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """Options that size the cache, and the needs of the model."""

    block_bytes: int
    block_size: int
    budget_bytes: int
    num_blocks: int | None
    """The option, which overrides the budget."""
    max_model_len: int | None
    """The option, which must fit."""
    checkpoint_len: int
    """The model's own context window, the longest that can be right."""
    max_num_seqs: int
    num_step_tokens: int
    """Most tokens of a step."""
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)

    def most_blocks(self, num_tokens: int) -> int:
        """Count the most blocks that a sequence of `num_tokens` ever holds at once."""
        return most_blocks(
            self.groups, num_tokens, block_size=self.block_size, num_step_tokens=self.num_step_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Memory of a checkpoint's weights."""

    total: int
    """Bytes once loaded, in the dtype that was asked for."""
    converted: int
    """Bytes among them that are converted from the files' dtype, on the host for every device."""
    codes: int = 0
    """Bytes among them that are codes of quantized modules, with their scales."""

    def on_one_of(self, num_devices: int, num_hosts: int) -> "WeightBytes":
        """Return the bytes that loading takes on one of as many equal devices, and on one of their hosts.

        Codes are whole on each until they are cut, and a process for each device converts all.
        """
        plain = self.total - self.codes
        return WeightBytes(
            total=self.codes + plain // num_devices,
            converted=self.converted * max(1, num_devices // num_hosts),
            codes=self.codes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """Size of a KV cache."""

    num_blocks: int
    """Number of blocks without the padding block."""
    max_model_len: int


def cpu_budget_bytes(available_bytes: int, *, asked_bytes: int | None, swap_bytes: int) -> int:
    """Size the KV cache on CPU. Raises StartupError if more is asked for than there is.

    The swap space is taken from the same memory first, since it was asked for.
    """
    check_host_memory(available_bytes, cache_bytes=asked_bytes or 0, swap_bytes=swap_bytes)
    if asked_bytes is None:
        return min(int((available_bytes - swap_bytes) * CPU_SHARE_OF_AVAILABLE), CPU_MOST_BYTES)
    return asked_bytes


def check_weights_fit(num_bytes: int, *, available_bytes: int, where: str) -> int:
    """Refuse weights that do not fit, with StartupError; returns the bytes that they leave."""
    if num_bytes > available_bytes:
        raise StartupError(
            f"the weights take {format_size(num_bytes)}, "
            f"but {where} has {format_size(available_bytes)} available",
            fix="free some, ask for --dtype bfloat16 if they are loaded as float32, or take a smaller model",
        )
    return available_bytes - num_bytes


def check_host_memory(available_bytes: int, *, cache_bytes: int, swap_bytes: int) -> None:
    """Refuse a cache and a swap space that do not fit, with StartupError. For a GPU `cache_bytes` is 0."""
    if cache_bytes + swap_bytes <= available_bytes:
        return
    wanted = {"KV cache": cache_bytes, "swap space": swap_bytes}
    fixes = {
        "KV cache": "ask for less with --kv-cache-memory",
        "swap space": "ask for less with --swap-space",
    }
    asked = [name for name, num_bytes in wanted.items() if num_bytes]
    named = " and ".join(f"a {name} of {format_size(wanted[name])}" for name in asked)
    verb = "does not fit" if len(asked) == 1 else "do not fit together"
    raise StartupError(
        f"{named} {verb} into the {format_size(available_bytes)} of memory that are available",
        fix=fixes[asked[0]] if len(asked) == 1 else "ask for less with --swap-space, or for a smaller cache",
    )


def num_host_blocks(*, swap_bytes: int, block_bytes: int) -> int:
    """Count the blocks of the swap space. Raises StartupError if it is too small for one."""
    if 0 < swap_bytes < block_bytes:
        raise StartupError(
            f"a swap space of {swap_bytes} bytes holds no KV block of {block_bytes} bytes",
            fix=f"ask for --swap-space {block_bytes} or more, or for none",
        )
    return swap_bytes // block_bytes


def graph_bytes(num_graphs: int, *, activation_bytes: int) -> int:
    """Estimate the memory of captured steps, which are captured after the cache is allocated.

    All graphs share one set of a step's tensors, apart from that of steps that are not captured; the driver
    keeps some memory for each graph.
    """
    return (activation_bytes + num_graphs * _BYTES_OF_A_GRAPH) if num_graphs else 0


def cuda_budget_bytes(
    *, total_bytes: int, free_bytes: int, activation_bytes: int, reserved_bytes: int = 0, utilization: float
) -> int:
    """Size the KV cache on a GPU, once the weights are on it.

    `utilization` is the share of the device that this process and its neighbours may fill;
    `activation_bytes` is the measured peak of a step above the weights; `reserved_bytes` will be allocated
    after the cache.
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
        useful = _MOST_USEFUL_FILLS * request.max_num_seqs * request.most_blocks(longest)
        num_blocks = min(num_blocks, useful)
    least = request.most_blocks(1)
    if num_blocks < least:
        if request.num_blocks is not None:
            raise StartupError(
                f"a KV cache of {num_blocks} blocks was asked for: {least} are needed, "
                "for a place of each group of layers",
                fix=f"ask for --num-gpu-blocks-override {least} or more, or leave it out",
            )
        needed = "two blocks" if least == 1 else f"{least + 1} blocks, for a place of each group of layers,"
        raise StartupError(
            f"the memory left for the KV cache ({format_size(request.budget_bytes)}) holds no {needed} "
            f"of {request.block_bytes} bytes",
            fix=f"give it at least {(least + 1) * request.block_bytes} bytes (--kv-cache-memory on CPU, "
            "--gpu-memory-utilization on CUDA), or take a smaller --block-size",
        )
    cache_len = _cache_len(request, num_blocks)
    if asked_len is not None and asked_len > cache_len:
        needed_bytes = (request.most_blocks(asked_len) + 1) * request.block_bytes
        raise StartupError(
            f"the KV cache of {num_blocks} blocks holds {cache_len} tokens, "
            f"but one sequence of max_model_len {asked_len} needs {format_size(needed_bytes)} of it",
            fix=f"ask for --max-model-len {cache_len} or less, or give the cache {needed_bytes} bytes",
        )
    return CacheSize(num_blocks=num_blocks, max_model_len=asked_len or min(request.checkpoint_len, cache_len))


def _cache_len(request: CacheRequest, num_blocks: int) -> int:
    """Return the longest sequence that the cache can serve, alone, up to the model's own window."""
    most_places = bisect_right(
        range(1, -(-request.checkpoint_len // request.block_size) + 1),
        num_blocks,
        key=lambda num_places: request.most_blocks(num_places * request.block_size),
    )
    return most_places * request.block_size


def format_size(num_bytes: int) -> str:
    """Write a size for a person: `1.25 GiB`; below one GiB `7.82 MiB`."""
    if abs(num_bytes) < 1 << 30:
        return f"{num_bytes / (1 << 20):.2f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
