"""Devices, ranks and engines: the checks of how work is divided, and what several engines change in each."""

import importlib.util
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.options.declaration import OptionError, refuse_given
from engine.options.options import Options
from scheduler.prefix_keys import JournalContent
from worker.machine import available_memory_bytes, visible_gpus
from worker.memory_sizes import check_host_memory
from worker.worker_errors import StartupError

_LOOPBACK = "127.0.0.1"
_PLACEMENT_TIMEOUT_S = 1800.0
"""Longest wait for Ray to find free processors: machines are added and images are pulled meanwhile."""
_LEAST_KEY_CHARS = 32
_MAX_CONFIG_BYTES = 4 * 2**20
# Number of nodes, number of this one, address of the first.
_LWS = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
_TORCHRUN = ("WORLD_SIZE", "RANK", "MASTER_ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The two sockets on which events of the prefix caches are published."""

    host: str
    port: int
    """Port of the events; old ones are asked for at the next."""
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The machines that compute one model, as one of them sees them."""

    num_nodes: int
    node: int
    """Number of this one; 0 listens for requests, and for the others."""
    host: str
    """Address of the first."""
    port: int
    key: str = field(repr=False)
    """Secret that all share."""

    @property
    def address(self) -> str:
        """The address of the first, for ZeroMQ."""
        return f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The request to Ray for machines that compute one model."""

    num_nodes: int | None
    """Number of machines; None: as few as hold all ranks."""
    host: str | None
    """Address of this machine for the others; None: the one that Ray has for it."""
    port: int
    key: str = field(repr=False)
    timeout_s: float


def check_device(options: Options) -> None:
    """An option that the chosen device has no use for is a mistake. auto is decided by the worker."""
    if options.device == "cpu":
        unused = {
            "--gpu-memory-utilization": options.gpu_memory_utilization,
            "--gpu-kernels": None if options.gpu_kernels == "auto" else options.gpu_kernels,
            "--attention-backend": None if options.attention_backend == "triton" else True,
            "--enforce-eager": options.enforce_eager or None,
        }
        instead = "use --kv-cache-memory for the size of the KV cache"
    elif options.device.startswith("cuda"):
        unused = {"--kv-cache-memory": options.kv_cache_memory, "--num-threads": options.num_threads}
        instead = "use --gpu-memory-utilization for the size of the KV cache"
    else:
        return
    unused = {f"{flag} with --device {options.device}": value for flag, value in unused.items()}
    refuse_given(unused, "it has no effect there", instead)


def check_ranks(options: Options, cluster: ClusterConfig | None) -> None:
    """Refuse combinations that no worker can compute; the worker refuses models that cannot be divided."""
    if num_ranks_of(options) == 1:
        return
    asked = _describe_ranks(options)
    _check_gpus_of_ranks(options, asked, cluster)
    if options.tensor_parallel_size == 1 and device_of(options) == "cpu":
        return
    if options.tensor_parallel_size > 1 and (rounds := _rounding_of_inputs(options)) is not None:
        raise OptionError(
            f"{asked} with {rounds}",
            "it rounds inputs by the largest of a row, of which each rank has a part",
            "leave one of them out; --quantization int4 rounds weights alone",
        )
    kind, kernels = ("cpu", options.cpu_kernels)
    if device_of(options) != "cpu":
        kind, kernels = ("gpu", options.gpu_kernels)
    if kernels == "off":
        raise OptionError(
            f"{asked} with --{kind}-kernels off",
            f"only layers of the {kind.upper()} kernels are divided",
            "drop one",
        )


def _check_gpus_of_ranks(options: Options, asked: str, cluster: ClusterConfig | None) -> None:
    """Count the GPUs of this machine. Ray counts by itself, and the first node for all others."""
    if device_of(options) != "cuda" or options.distributed_executor == "ray":
        return
    num_nodes, node = (1, 0) if cluster is None else (cluster.num_nodes, cluster.node)
    num_ranks, num_gpus = num_ranks_of(options) // num_nodes, len(visible_gpus())
    if node == 0 and num_ranks > num_gpus:
        here = "" if num_nodes == 1 else f", {num_ranks} on each node"
        raise OptionError(
            asked,
            f"each rank takes a GPU{here}, and there are {num_gpus}",
            "lower it, use --device cpu, or try ranks that share one GPU, with --device cuda:0",
        )


def _rounding_of_inputs(options: Options) -> str | None:
    """Name the option by which inputs of products are rounded, each row by one scale; None without one."""
    if options.activations != "none":
        return f"--activations {options.activations}"
    if options.quantization == "int8" and device_of(options) == "cpu":
        return "--quantization int8 on a CPU"
    return None


def check_engines(options: Options) -> None:
    """Refuse more engines than there are devices; each rank takes one GPU, in the order of their numbers."""
    asked = f"--data-parallel-size {options.data_parallel_size}"
    if options.data_parallel_size == 1:
        return
    if options.device.startswith("cuda:"):
        raise OptionError(
            f"{asked} with --device {options.device}",
            "each engine has a GPU of its own",
            "use --device cuda, and CUDA_VISIBLE_DEVICES to choose which GPUs",
        )
    num_gpus = len(visible_gpus())
    num_ranks = num_ranks_of(options)
    gpus = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs"
    if device_of(options) == "cuda" and options.data_parallel_size * num_ranks > num_gpus:
        raise OptionError(
            asked,
            f"each engine takes {gpus}, and there are {num_gpus}",
            "lower it, or use --device cpu, where engines share the cores",
        )


def num_ranks_of(options: Options) -> int:
    """Count the ranks of all stages of an engine."""
    return options.pipeline_parallel_size * options.tensor_parallel_size


def _describe_ranks(options: Options) -> str:
    """Name the options that divide the model."""
    numbers = {
        "--pipeline-parallel-size": options.pipeline_parallel_size,
        "--tensor-parallel-size": options.tensor_parallel_size,
    }
    return " and ".join(f"{flag} {number}" for flag, number in numbers.items() if number > 1)


def device_of(options: Options) -> str:
    """Name the device. Several engines or ranks must not choose one each: the last would find no GPU left."""
    if options.device == "auto" and options.data_parallel_size * num_ranks_of(options) > 1:
        return "cuda" if visible_gpus() else "cpu"
    return options.device


def share_gpu(options: Options) -> bool:
    """Tell whether all ranks are on one GPU: they exchange through the host, which no graph records."""
    return num_ranks_of(options) > 1 and options.device.startswith("cuda:")


def prefix_journal(options: Options) -> JournalContent | None:
    """Reports that the choice between engines and outside routers need."""
    if not options.enable_prefix_caching:
        return None
    if options.kv_events_port is not None:
        return JournalContent.TOKENS
    return JournalContent.KEYS if options.data_parallel_size > 1 else None


def kv_events_config(options: Options, served_name: str) -> KVEventsConfig | None:
    """Check and resolve the options of events; None: none are published. Raises OptionError."""
    if options.kv_events_port is None:
        unused = {"--kv-events-host": options.kv_events_host, "--kv-events-topic": options.kv_events_topic}
        refuse_given(unused, "no events are published", "give --kv-events-port 5557, say")
        return None
    if not options.enable_prefix_caching:
        raise OptionError(
            f"--kv-events-port {options.kv_events_port}",
            "--no-enable-prefix-caching leaves nothing to report",
            "drop one",
        )
    return KVEventsConfig(
        host=options.kv_events_host or _LOOPBACK,
        port=options.kv_events_port,
        topic=options.kv_events_topic or f"kv@{socket.gethostname()}@{served_name}",
    )


def cluster_config(options: Options, environment: Mapping[str, str]) -> ClusterConfig | None:
    """Check and resolve the options of nodes; None: this machine is alone. Raises OptionError."""
    if options.distributed_executor == "ray":
        return None
    where = _where(options, environment)
    if where is None:
        return None
    num_nodes, node, host = where
    asked = f"--nnodes {num_nodes}"
    if node >= num_nodes:
        raise OptionError(
            f"{asked} with --node-rank {node}", "nodes count from 0", f"give {num_nodes - 1} at most"
        )
    _check_several(options, asked, num_nodes)
    _check_host(host)
    if len(options.cluster_key or "") < _LEAST_KEY_CHARS:
        raise OptionError(
            asked,
            f"nodes share a secret of {_LEAST_KEY_CHARS} characters or more, TOKENYARD_CLUSTER_KEY",
            "make one with `openssl rand -hex 32`, and set it on all",
        )
    return ClusterConfig(
        num_nodes=num_nodes, node=node, host=host, port=options.cluster_port, key=str(options.cluster_key)
    )


def ray_config(options: Options) -> RayConfig | None:
    """Check and resolve the options of Ray; None: it is not asked. Raises OptionError."""
    asked = f"--distributed-executor {options.distributed_executor}"
    if options.distributed_executor != "ray":
        return None
    if num_ranks_of(options) == 1:
        raise OptionError(asked, "there is one rank", "give --pipeline-parallel-size 2, say, or leave it out")
    if options.node_rank is not None:
        raise OptionError(f"{asked} with --node-rank", "Ray starts all nodes but this one", "leave it out")
    if options.device.startswith("cuda:") and options.device != "cuda:0":
        raise OptionError(
            f"{asked} with --device {options.device}",
            "Ray chooses the GPUs, and a node sees no others",
            "use --device cuda; or cuda:0, where ranks of a node share one",
        )
    _check_several(options, asked, options.nnodes or 1)
    _check_host(options.master_addr or "")
    key = options.cluster_key or secrets.token_hex(_LEAST_KEY_CHARS)
    if len(key) < _LEAST_KEY_CHARS:
        raise OptionError(
            "--cluster-key",
            f"it has fewer than {_LEAST_KEY_CHARS} characters",
            "leave it out: one is made at each start",
        )
    if importlib.util.find_spec("ray") is None:
        raise OptionError(
            asked, "the package ray is not installed", "pip install 'tokenyard[ray]', on all nodes"
        )
    return RayConfig(
        num_nodes=options.nnodes,
        host=options.master_addr,
        port=options.cluster_port,
        key=key,
        timeout_s=_PLACEMENT_TIMEOUT_S,
    )


def _check_host(host: str) -> None:
    if ":" in host:
        raise OptionError(f"--master-addr {host}", "nodes meet over IPv4", "give an IPv4 address or a name")


def fits_nodes(num_stages: int, num_shards: int, num_nodes: int) -> bool:
    """Tell whether each node has as many whole stages, or each stage as many whole nodes."""
    return num_stages % num_nodes == 0 or (
        num_nodes % num_stages == 0 and num_shards % (num_nodes // num_stages) == 0
    )


def _check_several(options: Options, asked: str, num_nodes: int) -> None:
    """Refuse combinations that several machines cannot compute."""
    num_stages, num_ranks = options.pipeline_parallel_size, options.tensor_parallel_size
    if not fits_nodes(num_stages, num_ranks, num_nodes):
        raise OptionError(
            f"{asked} with --pipeline-parallel-size {num_stages} and --tensor-parallel-size {num_ranks}",
            "each node computes as many stages, or as large a part of one",
            f"give --pipeline-parallel-size {num_nodes} or a multiple of it; or one stage, and as many ranks",
        )
    if options.data_parallel_size > 1:
        raise OptionError(
            f"{asked} with --data-parallel-size {options.data_parallel_size}",
            "one engine has all nodes",
            "start a group of nodes for each, behind a router (docs/deploy.md)",
        )


def _where(options: Options, environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Find number of nodes, number of this one and address of the first; flags win over the environment."""
    is_lws = any(name in environment for name in _LWS)
    names = _LWS if is_lws else _TORCHRUN
    # All three or none: RANK alone stands in many environments.
    given = [environment.get(name) for name in names]
    num_nodes, node, host = given if all(given) else [None, None, None]
    if any(given) and not all(given):
        _check_variables(options, environment, names)
    if options.nnodes is None and num_nodes is not None and not is_lws:
        _check_torchrun(environment)
    found = {
        "--nnodes": _count(names[0], num_nodes) if options.nnodes is None else options.nnodes,
        "--node-rank": _count(names[1], node) if options.node_rank is None else options.node_rank,
        "--master-addr": host if options.master_addr is None else options.master_addr,
    }
    if found["--nnodes"] in (None, 1):
        _check_alone(options)
        return None
    for flag, value in found.items():
        if value is None:
            raise OptionError(
                f"--nnodes {options.nnodes}", f"{flag} is not known", f"give {flag}, on each node"
            )
    return int(str(found["--nnodes"])), int(str(found["--node-rank"])), str(found["--master-addr"])


def _check_alone(options: Options) -> None:
    """Refuse options that are for several nodes."""
    has_port = options.cluster_port != Options().cluster_port
    unused = {
        "--node-rank": options.node_rank,
        "--master-addr": options.master_addr,
        "--cluster-key": options.cluster_key,
        f"--cluster-port {options.cluster_port}": has_port or None,
    }
    refuse_given(unused, "there is one node", "give --nnodes too, or leave it out")


def _check_variables(options: Options, environment: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Refuse a part of the variables where nodes are meant; elsewhere they are of another program."""
    flags = (options.nnodes, options.node_rank, options.master_addr)
    if options.cluster_key is None or None not in flags:
        return
    missing = next(name for name in names if not environment.get(name))
    present = " and ".join(name for name in names if environment.get(name))
    raise OptionError(
        f"{present} without {missing}",
        f"the place of a node is known by {', '.join(names)} together",
        f"set {missing} too, or give --nnodes, --node-rank and --master-addr",
    )


def _count(name: str, text: str | None) -> int | None:
    if text is not None and not text.isdecimal():
        raise OptionError(
            f"{name}={text[:40]}", "it is no number", "set it as torchrun and LeaderWorkerSet do"
        )
    return None if text is None else int(text)


def _check_torchrun(environment: Mapping[str, str]) -> None:
    """Refuse several processes on a machine: those of a machine are started by its node."""
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if local != "1":
        raise OptionError(
            f"LOCAL_WORLD_SIZE={local}",
            "a node starts its processes itself",
            "run torchrun with --nproc-per-node 1; --tensor-parallel-size is for the cores of a node",
        )


def check_early(options: Options, folder: Path) -> None:
    """Refuse a cache that does not fit, and ranks that cannot share the heads. Raises OptionError."""
    _check_memory(options)
    num_ranks, num_heads = options.tensor_parallel_size, _num_heads(folder)
    if num_heads and num_heads % num_ranks:
        raise OptionError(
            f"--tensor-parallel-size {num_ranks}",
            f"the {num_heads} query heads of this model cannot be divided by {num_ranks}",
            "ask for a number that divides its heads, or leave it out (docs/models.md)",
        )


def _check_memory(options: Options) -> None:
    device = device_of(options)
    if not (device == "cpu" or (device == "auto" and not visible_gpus())):
        return
    try:
        check_host_memory(
            available_memory_bytes(),
            cache_bytes=options.kv_cache_memory or 0,
            swap_bytes=options.swap_space or 0,
        )
    except StartupError as error:
        given = {"--kv-cache-memory": options.kv_cache_memory, "--swap-space": options.swap_space}
        named = " and ".join(name for name, num_bytes in given.items() if num_bytes)
        raise OptionError(named, error.what, error.fix) from error


def _num_heads(folder: Path) -> int | None:
    """Read the number of query heads; None where config.json has none, or cannot be read."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        text = content.get("text_config") or content
        num_heads = text.get("num_attention_heads")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return num_heads if type(num_heads) is int and num_heads > 0 else None
