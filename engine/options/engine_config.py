"""The resolved configuration: frozen, complete, printed once at start. Made from the operator's options.

Owns: the resolution of each open option, and every check that needs no tensor library, so that a mistake is
reported in a tenth of a second and not after the model was loaded.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from engine.logs.lines import LogFormat
from engine.options.adapter_options import AdapterConfig, adapter_config
from engine.options.edge_config import EdgeConfig, check_traces_endpoint, edge_config
from engine.options.engine_split import (
    ClusterConfig,
    KVEventsConfig,
    RayConfig,
    check_device,
    check_early,
    check_engines,
    check_ranks,
    cluster_config,
    device_of,
    kv_events_config,
    prefix_journal,
    ray_config,
    share_gpu,
)
from engine.options.found_model import check_checksums, find_model
from engine.options.media_options import MediaConfig, media_config
from engine.options.options import FIELDS, OptionError, Options, checked_values, refuse_given
from engine.options.speculation_option import speculation_config
from engine.step_limits import EngineStepLimits, step_limits
from engine.types import Profile
from scheduler.config import (
    Batching,
    Fairness,
    PreemptionMode,
    PrefixCaching,
    SchedulerOptions,
    SchedulingPolicy,
)
from scheduler.messages import TimeLimits
from scheduler.prefix_keys import JournalContent
from worker.checkpoint.overrides import config_overrides, generation_overrides, template_kwargs
from worker.worker_config import SpeculationConfig, WorkerConfig

_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# One that the device computes, and one that is ready when it has finished.
_MOST_PLANS_IN_FLIGHT = 2

# Smaller requests that pass one for which there are too few free blocks; then blocks are kept for it.
_MOST_BYPASSES = 32

# Used without --target-itl. Where decodes alone take two thirds of our target, prompts get as much time as
# decodes, or more in a large crowd, so that first tokens are not late; the same after the wait below.
_DEFAULT_PREFILL_SHARE, _LARGE_CROWD_PREFILL_SHARE = 0.5, 0.85
_DEFAULT_PREFILL_PATIENCE_S = 4.0

# Ten levels of priority have grown old within half of the default time limit of a request.
_DEFAULT_PRIORITY_AGING_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's configuration. Sent to its process as msgpack, since JSON has no infinity."""

    model_path: str
    """A checkpoint folder on this machine."""
    served_names: tuple[str, ...]
    """Names that requests may use; replies report the first."""
    name_patterns: tuple[str, ...]
    """Further such names, each with one `*` for any text."""
    scheduler: SchedulerOptions
    time_limits: TimeLimits
    """Upper bounds of the limits that requests ask for."""
    lora_directory: str | None
    """Folder below which adapters may be loaded; None: none are."""
    trace_file: str | None
    """File for the trace of steps; None: no trace."""
    log_format: LogFormat
    """The same in both processes."""
    max_queued_requests: int
    max_queued_tokens: int
    heartbeat_timeout_s: float
    target_first_token_s: float | None
    grammar_compile_timeout_s: float
    worker: WorkerConfig
    media: MediaConfig = field(default_factory=MediaConfig)
    num_engines: int = 1
    """Engine processes behind one API process."""
    engine: int = 0
    """Number of this one, in the configuration that its process gets."""
    default_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that requests may override."""
    profiles: tuple[Profile, ...] = ()
    """Further names of the model, with other defaults of requests."""
    prefix_journal: JournalContent | None = None
    """Content of the reports on cached prefixes; None: nothing reads them."""
    kv_events: KVEventsConfig | None = None
    """Sockets on which these reports are published; None: they are not."""
    cluster: ClusterConfig | None = None
    """Machines that compute the model together; None: this one is alone, or Ray finds the others."""
    ray: RayConfig | None = None
    """Request to Ray for these machines; None: it is not asked, or has placed them."""

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names that no adapter may have."""
        return (*self.served_names, *(each.name for each in self.profiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str
    port: int
    """0 until a free one is taken; the listening socket knows."""
    api_keys: tuple[str, ...] = field(repr=False)
    """Keys of --api-key; the file that `edge` names may hold more."""
    edge: EdgeConfig
    enable_admin: bool
    loads_adapters: bool
    """Adapters can be loaded and unloaded while the server runs."""
    tool_call_parser: str
    reasoning_parser: str
    max_body_bytes: int
    strict_fields: bool
    """Unknown fields of requests are refused instead of ignored."""
    stream_keep_alive_s: float
    """0: no comments are sent."""
    responses_store_bytes: int
    """Memory for responses that can be asked for again; 0 stores none."""
    shutdown_timeout_s: float
    drain_delay_s: float
    """Time for which requests are accepted after probes report the shutdown."""
    health_port: int | None
    """One more port for probes, answered by a thread of its own; None: no such port."""
    log_level: str
    otlp_traces_endpoint: str | None
    """Address of the collector of spans; None: no spans."""
    shown_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Value and origin of each option, without secrets, for the web page; empty outside of `serve`."""


def resolve(
    options: Options, *, environment: Mapping[str, str] = os.environ
) -> tuple[EngineConfig, ServerConfig]:
    """Check and resolve the options. Raises OptionError. `environment` names the hub cache."""
    if options.models is not None:  # engine/models/entries.py takes the file apart
        raise OptionError("--models", "this command takes one model", "name it as MODEL")
    cluster, ray = cluster_config(options, environment), ray_config(options)
    edge = edge_config(options, node=0 if cluster is None else cluster.node)
    _check_limits(options)
    _check_scheduler(options)
    check_traces_endpoint(options.otlp_traces_endpoint)
    check_device(options)
    check_ranks(options, cluster)
    check_engines(options)
    folder, name = find_model(options.model, environment)
    check_checksums(options.checksums, folder)
    if cluster is None and ray is None:
        check_early(options, folder)
    speculation = speculation_config(options, lambda draft: find_model(draft, environment, is_draft=True)[0])
    engine = _engine_config(options, folder, name, speculation)
    if cluster is not None:
        engine = replace(engine, cluster=cluster, worker=replace(engine.worker, num_nodes=cluster.num_nodes))
    if ray is not None:
        engine = replace(engine, ray=ray, worker=replace(engine.worker, num_nodes=ray.num_nodes or 1))
    return engine, ServerConfig(
        host=options.host,
        port=options.port,
        api_keys=options.api_key,
        edge=edge,
        enable_admin=options.enable_admin,
        loads_adapters=options.lora_directory is not None,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        max_body_bytes=options.max_body_size,
        strict_fields=options.strict_fields,
        stream_keep_alive_s=options.stream_keep_alive,
        responses_store_bytes=options.responses_store_memory,
        shutdown_timeout_s=options.shutdown_timeout,
        drain_delay_s=options.drain_delay,
        health_port=options.health_port,
        log_level=options.log_level,
        otlp_traces_endpoint=options.otlp_traces_endpoint,
    )


def _engine_config(options: Options, folder: Path, name: str, speculation: SpeculationConfig) -> EngineConfig:
    limits = _step_limits(options)
    served_names, name_patterns = _served_names(options.served_model_name, name)
    adapters = adapter_config(options, served_names)
    return EngineConfig(
        model_path=str(folder),
        served_names=served_names,
        name_patterns=name_patterns,
        lora_directory=adapters.directory,
        scheduler=replace(_scheduler_options(options, limits), max_adapters=adapters.limits.max_in_step),
        time_limits=TimeLimits(
            queue_s=_or_no_limit(options.queue_timeout),
            first_token_s=_or_no_limit(options.first_token_timeout),
            total_s=options.request_timeout or inf,
        ),
        target_first_token_s=options.target_first_token,
        log_format=LogFormat(options.log_format),
        trace_file=None if options.trace_steps is None else str(Path(options.trace_steps).absolute()),
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        heartbeat_timeout_s=options.heartbeat_timeout,
        grammar_compile_timeout_s=options.grammar_compile_timeout,
        default_template_kwargs=checked_values(template_kwargs, options.default_chat_template_kwargs),
        worker=replace(_worker_config(options, folder, limits, adapters), speculation=speculation),
        media=media_config(options),
        num_engines=options.data_parallel_size,
        prefix_journal=prefix_journal(options),
        kv_events=kv_events_config(options, served_names[0]),
    )


def _served_names(given: tuple[str, ...], own_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide names into plain ones, of which there is one at least, and patterns. Raises OptionError."""
    patterns = tuple(each for each in given if "*" in each)
    for each in patterns:
        if each.count("*") > 1:
            raise OptionError(
                f"--served-model-name {each}", "has more than one *", "write one *, for any text"
            )
    return tuple(each for each in given if "*" not in each) or (own_name,), patterns


def _worker_config(
    options: Options, folder: Path, limits: EngineStepLimits, adapters: AdapterConfig
) -> WorkerConfig:
    """Resolve what the worker decides otherwise; options with the worker's own names pass as they are."""
    decided: dict[str, Any] = {
        "model_path": str(folder),
        "checksums_file": None if options.checksums is None else str(Path(options.checksums).absolute()),
        "chat_template_file": _chat_template(options.chat_template),
        "sampling_overrides": checked_values(generation_overrides, options.override_generation_config),
        "config_overrides": checked_values(config_overrides, options.hf_overrides),
        "device": device_of(options),
        "num_blocks": options.num_gpu_blocks_override,
        "gpu_memory_utilization": options.gpu_memory_utilization or _DEFAULT_GPU_MEMORY_UTILIZATION,
        "kv_cache_bytes": options.kv_cache_memory,
        "swap_space_bytes": options.swap_space or 0,
        "max_num_seqs": limits.num_sequences,
        "max_num_batched_tokens": limits.num_tokens,
        "enforce_eager": options.enforce_eager or share_gpu(options),
        "adapter_limits": adapters.limits,
        "adapters": adapters.at_start,
        "num_ranks": options.tensor_parallel_size,
        "num_engines": options.data_parallel_size,
        "num_stages": options.pipeline_parallel_size,
    }
    same = {each.name for each in fields(WorkerConfig)} & FIELDS.keys() - decided.keys()
    return WorkerConfig(**decided, **{name: getattr(options, name) for name in same})


def _step_limits(options: Options) -> EngineStepLimits:
    return step_limits(options.device, options.max_num_seqs, options.max_num_batched_tokens)


def _chat_template(path: str | None) -> str | None:
    if path is not None and not Path(path).is_file():
        raise OptionError(f"--chat-template {path}", "there is no such file", "name a file of Jinja text")
    return None if path is None else str(Path(path).absolute())


def _scheduler_options(options: Options, limits: EngineStepLimits) -> SchedulerOptions:
    return SchedulerOptions(
        max_num_seqs=limits.num_sequences,
        max_num_batched_tokens=limits.num_tokens,
        policy=SchedulingPolicy(options.scheduling_policy),
        prefix_caching=PrefixCaching.ON if options.enable_prefix_caching else PrefixCaching.OFF,
        watermark=options.watermark,
        priority_aging_s=_priority_aging_s(options),
        fairness=Fairness(options.fairness),
        tenant_weights=_tenant_weights(options.tenant_weight),
        max_bypasses=_MOST_BYPASSES,
        preemption_mode=PreemptionMode(options.preemption_mode),
        batching=Batching(options.batching),
        prefill_delay_factor=options.prefill_delay_factor or 0.0,
        target_itl_s=None if options.target_itl is None else options.target_itl or inf,
        least_prefill_share=_DEFAULT_PREFILL_SHARE if options.target_itl is None else 0.0,
        large_crowd_prefill_share=_LARGE_CROWD_PREFILL_SHARE if options.target_itl is None else 0.0,
        prefill_patience_s=_DEFAULT_PREFILL_PATIENCE_S,
        max_prefill_tokens=options.max_prefill_tokens,
        max_plans_in_flight=_MOST_PLANS_IN_FLIGHT,
    )


def _priority_aging_s(options: Options) -> float:
    if options.priority_aging is not None:
        return options.priority_aging or inf
    return inf if options.scheduling_policy == "fcfs" else _DEFAULT_PRIORITY_AGING_S


def _or_no_limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def _tenant_weights(words: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Each is NAME=WEIGHT; the name may hold `=` itself."""
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < inf:
            raise OptionError(
                f"--tenant-weight {word}", "it is not NAME=WEIGHT with a weight above 0", "write acme=2.5"
            )
        weights[name] = weight
    return tuple(weights.items())


def _check_scheduler(options: Options) -> None:
    """An option that another one makes useless is a mistake."""
    if options.scheduling_policy == "fcfs" and options.priority_aging is not None:
        raise OptionError(
            "--priority-aging",
            "--scheduling-policy fcfs has no priorities",
            "use --scheduling-policy priority",
        )
    if options.batching == "mixed" and options.prefill_delay_factor is not None:
        raise OptionError(
            "--prefill-delay-factor", "mixed steps delay no prefill", "use --batching separate with it"
        )
    if options.fairness == "none" and options.tenant_weight:
        raise OptionError("--tenant-weight", "without --fairness tenant it has no effect", "add the latter")
    _check_swap_space(options)


def _check_swap_space(options: Options) -> None:
    """Refuse swap space without a use: it holds KV of preempted requests and of the prefix cache."""
    is_of_use = options.enable_prefix_caching or options.preemption_mode != "recompute"
    if options.swap_space and not is_of_use:
        raise OptionError(
            "--swap-space",
            "with --preemption-mode recompute nothing is swapped, and no prefix is kept there either",
            "leave it out, or let the prefix cache use it",
        )
    if options.preemption_mode == "swap" and not options.swap_space:
        raise OptionError(
            "--preemption-mode swap", "there is no swap space", "give --swap-space 4GiB, say, or use auto"
        )


def _check_limits(options: Options) -> None:
    limits = _step_limits(options)
    if limits.num_tokens < limits.num_sequences:
        raise OptionError(
            f"--max-num-batched-tokens {limits.num_tokens} with --max-num-seqs {limits.num_sequences}",
            "every running sequence needs one token of each step",
            f"raise the first to {limits.num_sequences} or more, or lower the second",
        )
    if (options.max_prefill_tokens or 0) > limits.num_tokens:
        raise OptionError(
            f"--max-prefill-tokens {options.max_prefill_tokens}",
            f"a step has {limits.num_tokens} tokens at most",
            "raise --max-num-batched-tokens too, or use 0 for no limit",
        )
    if options.num_gpu_blocks_override is not None:
        others = {
            "--num-gpu-blocks-override with --kv-cache-memory": options.kv_cache_memory,
            "--num-gpu-blocks-override with --gpu-memory-utilization": options.gpu_memory_utilization,
        }
        refuse_given(others, "both set the size of the KV cache", "give one of them")
