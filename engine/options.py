"""The options of the server: each declared once, read from flags, environment, a YAML file, or left open.

Owns: names, defaults, bounds and descriptions; which source wins; what to say about a name or value that
is wrong. One field of Options is at once `--max-num-seqs`, TOKENYARD_MAX_NUM_SEQS and `max-num-seqs:` in
the file of --config. Flags win over the environment, that over the file, that over the default.
Never: touches a file but that one, or decides what None stands for (config.py).
"""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from engine.option_values import Bytes, Choice, Count, Duration, Kind, Pattern, Share, Switch, Text

ENVIRONMENT_PREFIX = "TOKENYARD_"

# A cluster puts such variables into every pod that runs beside a Service whose name starts with `tokenyard`.
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE_LINK_NAME = re.compile(
    r"TOKENYARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


class OptionError(Exception):
    """One line for the operator: what is wrong, why, and what to do. Ends the command with code 2."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}: {why}; {fix}")
        self.what = what
        self.why = why
        self.fix = fix


class Group(StrEnum):
    """A heading of --help."""

    MODEL = "Model"
    KV_CACHE = "KV cache"
    SCHEDULER = "Scheduler"
    SERVER = "Server"


class Arity(Enum):
    """How many values an option takes."""

    ONE = 1
    MANY = 2  # repeated flags, a YAML list, commas in the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What Options says about one field, beside its type and default."""

    group: Group
    kind: Kind
    help: str
    open_default: str = ""
    """What None comes to, for --help; empty where the default is a value."""
    arity: Arity = Arity.ONE
    is_secret: bool = False
    """Its value is never shown, not even in an error."""


def _option(group: Group, kind: Kind, text: str, *, default: Any, **rest: Any) -> Any:
    return field(default=default, metadata={"option": Declaration(group=group, kind=kind, help=text, **rest)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the operator asked for. None means: decide for me."""

    model: str | None = _option(
        Group.MODEL,
        Text(metavar="MODEL"),
        "Checkpoint folder, or the hub name (org/name) of one that is in the local hub cache already. "
        "Nothing is downloaded.",
        open_default="a tiny built-in model, for trying the server out",
        default=None,
    )
    served_model_name: tuple[str, ...] = _option(
        Group.MODEL,
        Text(metavar="NAME"),
        "Name that requests use. Repeat it for several; replies report the first.",
        arity=Arity.MANY,
        open_default="the hub name, or the folder's name",
        default=(),
    )
    dtype: str = _option(
        Group.MODEL,
        Choice(words=("auto", "float32", "bfloat16", "float16")),
        "Number format of weights and KV cache. auto takes the checkpoint's own; 16 bits halve the memory, "
        "and on CPUs without support for them cost speed.",
        default="auto",
    )
    device: str = _option(
        Group.MODEL,
        Pattern(pattern=r"auto|cpu|cuda(:\d{1,3})?", form="auto, cpu, cuda or cuda:1", metavar="DEVICE"),
        "Where the model runs. auto takes the first GPU if there is one.",
        default="auto",
    )
    max_model_len: int | None = _option(
        Group.MODEL,
        Count(low=1, high=2**24, metavar="TOKENS"),
        "Longest prompt and answer together, in tokens. Longer needs more KV cache for one request.",
        open_default="the model's own context window, as far as it fits the KV cache",
        default=None,
    )
    num_threads: int | None = _option(
        Group.MODEL,
        Count(low=1, high=1024),
        "Compute threads, on CPU only. More than there are cores makes every step slower.",
        open_default="one for each physical core this process may use",
        default=None,
    )

    block_size: int | None = _option(
        Group.KV_CACHE,
        Count(low=1, high=1024, metavar="TOKENS"),
        "Tokens in a KV cache block. Larger wastes the tail of each sequence and shares shorter prefixes "
        "less; smaller makes longer block tables.",
        open_default="16 on GPUs, 32 on CPUs",
        default=None,
    )
    num_gpu_blocks_override: int | None = _option(
        Group.KV_CACHE,
        Count(low=1, high=2**31 - 2, metavar="BLOCKS"),
        "Number of KV cache blocks on the device (on a CPU too) instead of measuring free memory.",
        open_default="as many as fit",
        default=None,
    )
    gpu_memory_utilization: float | None = _option(
        Group.KV_CACHE,
        Share(low=0.01, high=1.0),
        "Share of the GPU's memory for weights, KV cache and activations together. Less leaves room for "
        "other programs, more for longer and more requests.",
        open_default="0.9",
        default=None,
    )
    kv_cache_memory: int | None = _option(
        Group.KV_CACHE,
        Bytes(low=2**20, high=2**50),
        "Memory for the KV cache when the model runs on a CPU.",
        open_default="a share of what is free",
        default=None,
    )
    enable_prefix_caching: bool = _option(
        Group.KV_CACHE,
        Switch(),
        "Keep the KV cache of finished requests and reuse it for prompts that begin alike. Costs a hash "
        "for each block.",
        default=True,
    )

    swap_space: int | None = _option(
        Group.KV_CACHE,
        Bytes(low=0, high=2**50),
        "Host memory for the KV cache of preempted requests. More lets more of them return without being "
        "computed again.",
        open_default="none",
        default=None,
    )

    max_num_seqs: int = _option(
        Group.SCHEDULER,
        Count(low=1, high=65536),
        "Sequences in one step at most. More raises throughput and the time between two tokens.",
        default=256,
    )
    max_num_batched_tokens: int = _option(
        Group.SCHEDULER,
        Count(low=1, high=2**20, metavar="TOKENS"),
        "Tokens computed in one step at most. More brings long prompts to their first token sooner, and "
        "makes running requests stutter.",
        default=2048,
    )
    scheduling_policy: str = _option(
        Group.SCHEDULER,
        Choice(words=("fcfs", "priority")),
        "fcfs serves in order of arrival; priority serves lower `priority` values first and may preempt.",
        default="fcfs",
    )
    priority_aging: float | None = _option(
        Group.SCHEDULER,
        Duration(low=0.001, high=1e6),
        "Waiting that makes up for one level of priority, so that nobody waits for ever. Shorter is fairer "
        "to the less urgent, longer stricter.",
        open_default="priorities are strict",
        default=None,
    )
    enable_displacement: bool = _option(
        Group.SCHEDULER,
        Switch(),
        "Under the priority policy, let a waiting request take the place of less urgent running ones at "
        "once. Those lose time, but nothing else.",
        default=True,
    )
    fairness: str = _option(
        Group.SCHEDULER,
        Choice(words=("none", "tenant")),
        "tenant gives equal service to tenants who wait at the same time, inside each priority. A tenant is "
        "an API key; without keys the header x-tokenyard-tenant, or else the field `user`.",
        default="none",
    )
    tenant_weight: tuple[str, ...] = _option(
        Group.SCHEDULER,
        Text(metavar="NAME=WEIGHT"),
        "A tenant's share, where it is not 1. Repeat it for several. Keys are named key-1, key-2 and so on.",
        arity=Arity.MANY,
        open_default="all tenants alike",
        default=(),
    )
    target_itl: float | None = _option(
        Group.SCHEDULER,
        Duration(low=0.0001, high=3600.0),
        "Time between two tokens of a running request that steps should keep: prefill gets what is left of "
        "it. Shorter makes streams smoother and first tokens later.",
        open_default="steps are as large as --max-num-batched-tokens allows",
        default=None,
    )
    long_prefill_token_threshold: int = _option(
        Group.SCHEDULER,
        Count(low=0, high=2**20, metavar="TOKENS"),
        "Tokens of a step that one prompt gets at most while it is not alone, so that it leaves some to "
        "shorter ones. 0 is no limit.",
        default=0,
    )
    trace_steps: str | None = _option(
        Group.SCHEDULER,
        Text(metavar="FILE"),
        "Write each step as a line of JSON: who got how many tokens, who was preempted for whom, what the "
        "others wait for. For `tokenyard trace`.",
        open_default="no trace",
        default=None,
    )
    preemption_mode: str = _option(
        Group.SCHEDULER,
        Choice(words=("auto", "recompute", "swap")),
        "How a preempted request gets its KV cache back: computed again, copied out and in, or whichever is "
        "expected to take less time.",
        default="auto",
    )
    max_bypasses: int = _option(
        Group.SCHEDULER,
        Count(low=0, high=2**20),
        "Smaller requests that may be admitted before one for which there is not enough KV cache yet; then "
        "it is kept free for that one. 0 keeps the order strictly.",
        default=32,
    )
    watermark: float = _option(
        Group.SCHEDULER,
        Share(low=0.0, high=0.5),
        "Share of the KV cache kept free when a new request is admitted. More means fewer preemptions and "
        "fewer requests at once.",
        default=0.01,
    )

    host: str = _option(
        Group.SERVER,
        Text(metavar="HOST"),
        "Address to listen on; 0.0.0.0 is every IPv4 address of this machine.",
        default="127.0.0.1",
    )
    port: int = _option(
        Group.SERVER,
        Count(low=0, high=65535, metavar="PORT"),
        "Port to listen on; 0 takes any free one.",
        default=8000,
    )
    api_key: tuple[str, ...] = _option(
        Group.SERVER,
        Text(metavar="KEY"),
        "Key that clients must send as a bearer token. Repeat it for several. A flag can be seen by other "
        "users of this machine: prefer TOKENYARD_API_KEY (separated by commas).",
        arity=Arity.MANY,
        is_secret=True,
        open_default="no key needed",
        default=(),
    )
    allow_unauthenticated: bool = _option(
        Group.SERVER,
        Switch(),
        "Listen on addresses that other machines can reach although there is no API key.",
        default=False,
    )
    enable_admin: bool = _option(
        Group.SERVER,
        Switch(),
        "Answer GET /admin/requests, which lists what every live request does or waits for, with the names "
        "of tenants. It needs a key like the rest.",
        default=False,
    )
    max_queued_requests: int = _option(
        Group.SERVER,
        Count(low=1, high=2**20),
        "Requests that may wait at once; more are refused with 429 and a time to come back.",
        default=1024,
    )
    queue_timeout: float | None = _option(
        Group.SERVER,
        Duration(low=0.001, high=1e6),
        "How long a request may wait for its first step; then it is answered with 504. Requests may ask "
        "for less.",
        open_default="no limit",
        default=None,
    )
    first_token_timeout: float | None = _option(
        Group.SERVER,
        Duration(low=0.001, high=1e6),
        "How long a request may take to its first token; then it is answered with 504.",
        open_default="no limit",
        default=None,
    )
    request_timeout: float | None = _option(
        Group.SERVER,
        Duration(low=0.001, high=1e6),
        "How long a request may take in all; then it ends with what it has.",
        open_default="no limit",
        default=None,
    )
    max_body_size: int = _option(
        Group.SERVER,
        Bytes(low=1024, high=2**30),
        "Largest request body. Larger ones are refused with 413 before they are read.",
        default=4 * 2**20,
    )
    shutdown_timeout: float = _option(
        Group.SERVER,
        Duration(low=0.0, high=86400.0),
        "Time for running requests to finish after SIGTERM; then they are aborted.",
        default=30.0,
    )
    heartbeat_timeout: float = _option(
        Group.SERVER,
        Duration(low=2.0, high=3600.0),
        "An engine that finishes no step for so long is reported by /health/live. Must be longer than the "
        "slowest step.",
        default=60.0,
    )
    log_level: str = _option(
        Group.SERVER,
        Choice(words=("debug", "info", "warning", "error")),
        "How much is logged.",
        default="info",
    )


_FIELDS = {item.name: item for item in dataclasses.fields(Options)}
DECLARATIONS: Mapping[str, Declaration] = {name: item.metadata["option"] for name, item in _FIELDS.items()}
_BY_KEY = {name.replace("_", "-"): name for name in _FIELDS}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each option, under the heading of its group; values stay text until `read_options`."""
    headings = {group: parser.add_argument_group(group.value) for group in Group}
    headings[Group.MODEL].add_argument(
        "positional_model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="The same as --model."
    )
    for key, name in _BY_KEY.items():
        declaration = DECLARATIONS[name]
        text = f"{declaration.help} (default: {_shown_default(name)})".replace("%", "%%")
        heading = headings[declaration.group]
        if isinstance(declaration.kind, Switch):
            heading.add_argument(
                f"--{key}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            heading.add_argument(
                f"--{key}",
                dest=name,
                action="append" if declaration.arity is Arity.MANY else "store",
                metavar=declaration.kind.metavar,
                default=argparse.SUPPRESS,
                help=text,
            )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with options by name, such as `max-num-seqs: 64`.",
    )


def _shown_default(name: str) -> str:
    declaration = DECLARATIONS[name]
    return declaration.open_default or declaration.kind.show(_FIELDS[name].default)


def read_options(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Options:
    """`flags` is what the parser of `add_flags` found, by name. Raises OptionError."""
    flags = dict(flags)
    config = flags.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    values: dict[str, Any] = {}
    if config is not None:
        values.update(_from_file(Path(config)))
    values.update(_from_environment(environment))
    values.update(_from_flags(flags))
    return Options(**values)


def _from_flags(flags: dict[str, Any]) -> dict[str, Any]:
    positional = flags.pop("positional_model", None)
    if positional is not None:
        if flags.get("model", positional) != positional:
            raise OptionError(
                f"MODEL {positional!r} and --model {flags['model']!r}",
                "they name two different models",
                "give one of them",
            )
        flags["model"] = positional
    return {name: _parse(name, value, source=f"--{_key(name)}") for name, value in flags.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == f"{ENVIRONMENT_PREFIX}CONFIG":
            continue
        if _SERVICE_LINK_VALUE.match(text) or _SERVICE_LINK_NAME.fullmatch(variable):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name not in DECLARATIONS:
            advice = closest(name, DECLARATIONS, spelled=lambda name: f"{ENVIRONMENT_PREFIX}{name.upper()}")
            raise OptionError(variable, "no option of this server has this variable", advice)
        many = DECLARATIONS[name].arity is Arity.MANY
        value = [part for part in text.split(",") if part.strip()] if many else text
        values[name] = _parse(name, value, source=variable)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    # Not at the top: most starts have no file, and --help must not wait for a YAML parser.
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"--config {path}", why.lower(), "name a readable YAML file") from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise OptionError(f"--config {path}", f"not valid YAML ({why})", "correct it") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(
            f"--config {path}", "not a list of `option: value` lines", "write one option a line"
        )
    values: dict[str, Any] = {}
    for key, value in content.items():
        normal = str(key).replace("_", "-")
        if normal not in _BY_KEY:
            raise OptionError(f"{key} in {path}", "there is no such option", closest(normal, _BY_KEY))
        name = _BY_KEY[normal]
        if name in values:
            raise OptionError(f"{normal} in {path}", "it is there twice", "remove one")
        if value is not None:
            values[name] = _parse(name, value, source=f"{normal} in {path}")
    return values


def _parse(name: str, value: Any, *, source: str) -> Any:
    """`value` is text, or what YAML made of it."""
    if DECLARATIONS[name].arity is Arity.MANY:
        items = value if isinstance(value, list) else [value]
        return tuple(_parse_one(name, item, source=source) for item in items)
    return _parse_one(name, value, source=source)


def _parse_one(name: str, value: Any, *, source: str) -> object:
    declaration = DECLARATIONS[name]
    fix = f"correct it, or leave it out for the default ({_shown_default(name)})"
    shown = "" if declaration.is_secret else f" {str(value)[:200]!r}"
    if not isinstance(value, str | int | float):
        raise OptionError(f"{source}{shown}", "it must be a single value", fix)
    try:
        return declaration.kind.parse(str(value))
    except ValueError as error:
        raise OptionError(f"{source}{shown}", f"it must {error}", fix) from error


def closest(name: str, known: Iterable[str], *, spelled: Callable[[str], str] = str) -> str:
    """Advice about a name that is not known: the one most like it, or where all are listed."""
    found: Sequence[str] = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {spelled(found[0])}?" if found else "`tokenyard serve --help` lists all options"


def _key(name: str) -> str:
    return name.replace("_", "-")
