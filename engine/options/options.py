"""The options of the server, each declared once.

Owns: names, defaults, bounds and descriptions. One field of Options is at once `--max-num-seqs`,
TOKENYARD_MAX_NUM_SEQS and `max-num-seqs:` in the file of --config.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from engine.options.adapter_options import AdapterOptions
from engine.options.declaration import Arity as Arity
from engine.options.declaration import Declaration, declared
from engine.options.declaration import Group as Group
from engine.options.declaration import OptionError as OptionError
from engine.options.declaration import checked_values as checked_values
from engine.options.declaration import refuse_given as refuse_given
from engine.options.edge_config import EdgeOptions
from engine.options.media_options import MediaOptions
from engine.options.model_options import (
    REASONING_HELP,
    REASONING_PARSERS,
    TOOL_CALL_HELP,
    TOOL_CALL_PARSERS,
)
from engine.options.speculation_option import SpeculationOptions
from engine.options.values import Bytes, Choice, Count, Duration, Fraction, Switch, Text
from scheduler.config import SchedulingPolicy

_kv_cache = partial(declared, Group.KV_CACHE)
_scheduler = partial(declared, Group.SCHEDULER)
_logs = partial(declared, Group.LOGS)
_replies = partial(declared, Group.REPLIES)
_requests = partial(declared, Group.REQUESTS)
_life = partial(declared, Group.LIFE)


@dataclass(frozen=True, kw_only=True)
class Options(AdapterOptions, SpeculationOptions, EdgeOptions, MediaOptions):
    """The operator's options. None leaves the decision to the server."""

    block_size: int | None = _kv_cache(
        Count(low=1, high=1024, metavar="TOKENS"),
        "Tokens in a KV cache block. Larger wastes the tail of each sequence and shares shorter prefixes "
        "less; smaller makes longer block tables.",
        open_default="16 on GPUs, 32 on CPUs",
    )
    num_gpu_blocks_override: int | None = _kv_cache(
        Count(low=1, high=2**31 - 2, metavar="BLOCKS"),
        "Number of KV cache blocks on the device (on a CPU too) instead of measuring free memory.",
        open_default="as many as fit",
    )
    gpu_memory_utilization: float | None = _kv_cache(
        Fraction(low=0.01, high=1.0),
        "Share of the GPU's memory for weights, KV cache and activations together. Less leaves room for "
        "other programs, more for longer and more requests.",
        open_default="0.9",
    )
    kv_cache_dtype: str = _kv_cache(
        Choice(words=("auto", "fp8")),
        "auto keeps keys and values as the model computes them. fp8 keeps them as 8-bit floats, with two "
        "scales for each layer, which the checkpoint brings or which are measured at load: twice the tokens "
        "in the same memory, at some loss of accuracy. On GPUs that know 8-bit floats; on CPUs only with "
        "--cpu-kernels off.",
        default="auto",
    )
    kv_cache_memory: int | None = _kv_cache(
        Bytes(low=2**20, high=2**50),
        "Memory for the KV cache when the model runs on a CPU.",
        open_default="a share of what is free",
    )
    enable_prefix_caching: bool = _kv_cache(
        Switch(),
        "Keep the KV cache of finished requests and reuse it for prompts that begin alike. Costs a hash "
        "for each block.",
        default=True,
    )

    swap_space: int | None = _kv_cache(
        Bytes(low=0, high=2**50),
        "Host memory for the KV cache of preempted requests, and for cached prompts that the device has no "
        "room for. More lets more of both return without being computed again.",
        open_default="none",
    )

    kv_events_port: int | None = _kv_cache(
        Count(low=1, high=65534, metavar="PORT"),
        "Publish which prompts the prefix cache has got and lost, in the form of vLLM's KV events (ZeroMQ), "
        "for routers that choose a server by its cache. Old events can be asked for at the next port. They "
        "hold the tokens of all prompts and answers but those of private keys, and no key is asked for.",
        open_default="no events",
    )
    kv_events_host: str | None = _kv_cache(
        Text(metavar="ADDRESS"),
        "Address of both KV event ports; 0.0.0.0 is every IPv4 address of this machine.",
        open_default="127.0.0.1",
    )
    kv_events_topic: str | None = _kv_cache(
        Text(metavar="TOPIC"),
        "Topic of KV events, as kv@SERVER@MODEL. Routers that do not connect to each server themselves know "
        "it by this name, such as 10.0.0.11:8000.",
        open_default="kv@, this machine's name, @ and the model's first name",
    )

    max_num_seqs: int | None = _scheduler(
        Count(low=1, high=65536),
        "Sequences in one step at most. More raises throughput and the time between two tokens.",
        open_default="1024 on GPUs of 70 GiB or more, otherwise 256; no more than tokens of a step",
    )
    max_num_batched_tokens: int | None = _scheduler(
        Count(low=1, high=2**20, metavar="TOKENS"),
        "Tokens computed in one step at most. More brings long prompts to their first token sooner, and "
        "makes running requests stutter.",
        open_default="8192 on GPUs of 70 GiB or more, otherwise 2048; no less than sequences of a step",
    )
    max_prefill_tokens: int | None = _scheduler(
        Count(low=0, high=2**20, metavar="TOKENS"),
        "Most tokens of a step that go to prefill. Fewer bring the first of many prompts to its first token "
        "sooner and make running requests stutter less; too few leave the device idle. 0 is no limit.",
        open_default="256 on CPUs, except for mixtures of experts; otherwise no limit",
    )
    scheduling_policy: str = _scheduler(
        Choice(words=tuple(each.value for each in SchedulingPolicy)),
        "fcfs serves in order of arrival; priority serves lower `priority` values first and may preempt.",
        default="fcfs",
    )
    priority_aging: float | None = _scheduler(
        Duration(low=0.0, high=1e6),
        "Waiting time that makes up for one level of priority, so that no request waits for ever. Shorter is "
        "fairer to less urgent requests, longer is stricter; 0 is strict priority.",
        open_default="30s under the priority policy",
    )
    fairness: str = _scheduler(
        Choice(words=("none", "tenant")),
        "tenant gives equal service to tenants that wait at the same time, within each priority. A tenant is "
        "an API key; without keys the header x-tokenyard-tenant, or else the field `user`.",
        default="none",
    )
    tenant_weight: tuple[str, ...] = _scheduler(
        Text(metavar="NAME=WEIGHT"),
        "Weight of a tenant, if it is not 1. Repeat it for several. Keys are named key-1, key-2 and so on.",
        arity=Arity.MANY,
        open_default="all tenants alike",
    )
    target_itl: float | None = _scheduler(
        Duration(low=0.0, high=3600.0),
        "Target for the time between two tokens of a running request; prefill gets the rest of each step. "
        "Shorter makes streams smoother and first tokens later. 0 is no target.",
        open_default="70ms on a CPU for models without experts, there 500ms while fewer than seven sequences "
        "run and wait; else 200ms; half of each step to prefill, and up to 85% while more than eight run and "
        "wait, where decodes alone take two thirds of it, or after a wait of 4s",
    )
    batching: str = _scheduler(
        Choice(words=("mixed", "separate")),
        "mixed lets decodes and chunks of prefill share a step; separate makes each step one or the other, "
        "prefill first, and lets running requests stutter.",
        default="mixed",
    )
    prefill_delay_factor: float | None = _scheduler(
        Fraction(low=0.0, high=1000.0),
        "With --batching separate: prompts interrupt decoding only after they have waited this many times "
        "the duration of the latest prefill step. More gathers larger batches of prompts.",
        open_default="at once",
    )
    trace_steps: str | None = _logs(
        Text(metavar="FILE"),
        "Write each step as a line of JSON: the tokens of each request, preemptions with their causes, and "
        "the reason of waiting. For `tokenyard trace`.",
        open_default="no trace",
    )
    preemption_mode: str = _scheduler(
        Choice(words=("auto", "recompute", "swap")),
        "How a preempted request gets its KV cache back: computed again, copied out and in, or whichever is "
        "expected to take less time.",
        default="auto",
    )
    watermark: float = _scheduler(
        Fraction(low=0.0, high=0.5),
        "Share of the KV cache kept free when a new request is admitted. More means fewer preemptions and "
        "fewer requests at once.",
        default=0.01,
    )

    tool_call_parser: str = _replies(TOOL_CALL_PARSERS, TOOL_CALL_HELP, default="auto")
    reasoning_parser: str = _replies(REASONING_PARSERS, REASONING_HELP, default="auto")
    max_queued_requests: int = _requests(
        Count(low=1, high=2**20),
        "Sequences (a request with n=3 has three) that may wait for their first token; more are refused "
        "with 429 and a time to come back.",
        default=1024,
    )
    max_queued_tokens: int = _requests(
        Count(low=1, high=2**40, metavar="TOKENS"),
        "Prompt tokens that may wait at once; more are refused with 429. They are held in memory.",
        default=4 * 2**20,
    )
    queue_timeout: float | None = _requests(
        Duration(low=0.001, high=1e6),
        "How long a request may wait for its first step; then it is answered with 504. Requests may ask "
        "for less.",
        open_default="no limit",
    )
    first_token_timeout: float | None = _requests(
        Duration(low=0.001, high=1e6),
        "How long a request may take to its first token; then it is answered with 504.",
        open_default="no limit",
    )
    target_first_token: float | None = _requests(
        Duration(low=0.001, high=1e6),
        "Time in which first tokens are to come, for autoscalers, which compare the foreseen times with it: "
        "the metric tokenyard:first_token_target_seconds. No request is refused for it.",
        open_default="none is published",
    )
    request_timeout: float = _requests(
        Duration(low=0.0, high=1e6),
        "How long a request may take in all, from its admission; then it ends with what it has. Requests may "
        "ask for less. 0 is no limit.",
        default=600.0,
    )
    max_body_size: int = _requests(
        Bytes(low=1024, high=2**30),
        "Largest request body. Larger ones are refused with 413 before they are read.",
        default=4 * 2**20,
    )
    responses_store_memory: int = _replies(
        Bytes(low=0, high=2**40),
        "Memory for the responses of /v1/responses that are kept for GET and previous_response_id, with "
        "their conversations: 1000 at most, for a day. The one unused for longest goes first. 0 stores none.",
        default=64 * 2**20,
    )
    grammar_compile_timeout: float = _requests(
        Duration(low=0.1, high=60.0),
        "How long the grammar or schema of a request may take to compile; then the request is refused with "
        "400. Longer lets one such request hold up others that bring a new grammar.",
        default=5.0,
    )
    strict_fields: bool = _requests(
        Switch(),
        "Refuse requests with fields that this server does not know, by name. Without it they are counted "
        "and ignored, as clients of other servers expect.",
        default=False,
    )
    stream_keep_alive: float = _replies(
        Duration(low=0.0, high=3600.0),
        "Silence in a stream after which a comment is sent, so that no proxy takes it for dead. Shorter than "
        "the proxies' own limit, which is often 60 seconds; some clients cannot read comments. 0 sends none.",
        default=45.0,
    )
    shutdown_timeout: float = _life(
        Duration(low=0.0, high=86400.0),
        "Time for running requests to finish after SIGTERM; then they are aborted.",
        default=30.0,
    )
    drain_delay: float = _life(
        Duration(low=0.0, high=3600.0),
        "After SIGTERM, /health/ready fails at once, but new requests are accepted for this long, until "
        "every load balancer has noticed.",
        default=0.0,
    )
    heartbeat_timeout: float = _life(
        Duration(low=2.0, high=3600.0),
        "An engine that makes no progress for this long, not even within a step, is reported by "
        "/health/live, killed and replaced.",
        default=60.0,
    )
    log_level: str = _logs(
        Choice(words=("debug", "info", "warning", "error")),
        "How much is logged.",
        default="info",
    )
    log_format: str = _logs(
        Choice(words=("auto", "text", "json")),
        "Lines for people, or one JSON object each; auto writes text to a terminal and JSON elsewhere.",
        default="auto",
    )
    otlp_traces_endpoint: str | None = _logs(
        Text(metavar="URL"),
        "Send a span of each request to this OpenTelemetry collector, by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces. Needs the extra `otel`.",
        open_default="no spans",
    )


FIELDS = {item.name: item for item in dataclasses.fields(Options)}
DECLARATIONS: Mapping[str, Declaration] = {name: item.metadata["option"] for name, item in FIELDS.items()}
_GROUPS = list(Group)
BY_KEY = {
    name.replace("_", "-"): name
    for name in sorted(FIELDS, key=lambda n: _GROUPS.index(DECLARATIONS[n].group))
}
"""Names by their flags, in the order of the groups."""
COMMON = (
    *("model", "served_model_name", "max_model_len", "dtype", "quantization"),
    *("kv_cache_memory", "gpu_memory_utilization", "max_num_seqs", "scheduling_policy"),
    *("host", "port", "api_key", "log_level"),
)
"""The options that `--help` shows by itself."""
