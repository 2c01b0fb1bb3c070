"""Devices, ranks and engines: the checks of how work is divided, and what several engines change in each.

Owns: the device of each engine, and the reports that the choice between engines and outside routers need.
Never: counts memory (`tokenyard doctor` does, worker/startup/survey.py).
"""

import os
import socket
from dataclasses import dataclass

from engine.options.option_declaration import OptionError
from engine.options.options import Options
from scheduler.prefix_keys import JournalContent
from worker.machine import visible_gpus

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """The two sockets on which events of the prefix caches are published."""

    host: str
    port: int
    """Port of the events; old ones are asked for at the next."""
    topic: str


def check_device(options: Options) -> None:
    """An option that the chosen device has no use for is a mistake. auto is decided by the worker."""
    if options.device == "cpu":
        unused, instead = (
            {
                "--gpu-memory-utilization": options.gpu_memory_utilization,
                "--gpu-kernels": None if options.gpu_kernels == "auto" else options.gpu_kernels,
                "--attention-backend": None if options.attention_backend == "triton" else "fa3",
                "--enforce-eager": options.enforce_eager or None,
            },
            "use --kv-cache-memory for the size of the KV cache",
        )
    elif options.device.startswith("cuda"):
        unused = {"--kv-cache-memory": options.kv_cache_memory, "--num-threads": options.num_threads}
        instead = "use --gpu-memory-utilization for the size of the KV cache"
    else:
        return
    for key, value in unused.items():
        if value is not None:
            raise OptionError(f"{key} with --device {options.device}", "it has no effect there", instead)


def check_ranks(options: Options) -> None:
    """Refuse combinations that no worker can compute; the worker refuses models that cannot be divided."""
    asked = f"--tensor-parallel-size {options.tensor_parallel_size}"
    if options.tensor_parallel_size == 1:
        return
    if options.device.startswith("cuda"):
        raise OptionError(
            f"{asked} with --device {options.device}", "it divides models on CPUs only", "use --device cpu"
        )
    for key, word in (
        ("--quantization", options.quantization),
        ("--quantize-head", options.quantize_head),
        ("--activations", options.activations),
    ):
        if word != "none":
            raise OptionError(
                f"{asked} with {key} {word}",
                "rounded numbers are not divided among ranks",
                "leave one of them out",
            )
    if options.cpu_kernels == "off":
        raise OptionError(
            f"{asked} with --cpu-kernels off", "only layers of the CPU kernels are divided", "drop one"
        )
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise OptionError(asked, "ranks need Linux", "leave it out")


def check_engines(options: Options) -> None:
    """Refuse more engines than there are devices; each takes one GPU, in the order of their numbers."""
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
    if device_of(options) == "cuda" and options.data_parallel_size > num_gpus:
        raise OptionError(
            asked,
            f"each engine takes a GPU, and there are {num_gpus}",
            "lower it, or use --device cpu, where engines share the cores",
        )


def device_of(options: Options) -> str:
    """Name the device. Several engines must not choose one each: the last would find no GPU left."""
    if options.device == "auto" and options.data_parallel_size > 1:
        return "cuda" if visible_gpus() else "cpu"
    return options.device


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
        for flag, value in (
            ("--kv-events-host", options.kv_events_host),
            ("--kv-events-topic", options.kv_events_topic),
        ):
            if value is not None:
                raise OptionError(flag, "no events are published", "give --kv-events-port 5557, say")
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
