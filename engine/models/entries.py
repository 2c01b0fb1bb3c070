"""The models of one server, as the command line and the file of --models name them.

Owns: the options that a model may have for itself, and the checks of all models together.
Never: resolves one model (engine/options/engine_config.py), or measures memory (memory_shares.py).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.table import twice
from engine.options.engine_config import EngineConfig, ServerConfig, resolve
from engine.options.options import BY_KEY, DECLARATIONS, Group, OptionError, Options, refuse_given
from engine.options.sources import read_yaml, values_of
from engine.types import ModelNames

_OF_THE_SERVER = frozenset(
    {
        *("models", "scheduling_policy", "priority_aging", "fairness", "tenant_weight"),
        *("kv_events_port", "kv_events_host", "kv_events_topic"),
        *("nnodes", "node_rank", "master_addr", "cluster_port", "cluster_key", "distributed_executor"),
    }
)
"""Options of the groups of a model that several models have in common, or cannot have."""
_OWN = {
    key: name
    for key, name in BY_KEY.items()
    if DECLARATIONS[name].group in (Group.MODEL, Group.KV_CACHE, Group.SCHEDULER)
    and name not in _OF_THE_SERVER
} | {each: each.replace("-", "_") for each in ("tool-call-parser", "reasoning-parser")}
"""Names of the options of one model, by key."""
_OF_ONE = (
    *("served_model_name", "checksums", "chat_template", "lora_modules", "lora_directory"),
    *("num_gpu_blocks_override", "hf_overrides"),
)
"""Options that are right for one model only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the server."""

    engine: EngineConfig
    tool_call_parser: str
    reasoning_parser: str

    @property
    def names(self) -> ModelNames:
        adapters = tuple(each.name for each in self.engine.worker.adapters)
        return ModelNames(self.engine.served_names, self.engine.name_patterns, adapters)


def resolve_models(
    options: Options, more: Sequence[str] = (), *, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[ModelSpec, ...], ServerConfig]:
    """Check and resolve the options of each model, and of the server. Raises OptionError.

    `more` are the models behind the first of the command line.
    """
    entries: list[dict[str, Any]] = [{}]
    if options.models is not None:
        entries = _entries_of(options, more)
    elif more:
        entries = [{"model": each} for each in (options.model, *more)]
    if len(entries) > 1:
        _refuse_what_is_of_one(options)
    resolved = [resolve(replace(options, models=None, **each), environment=environment) for each in entries]
    specs = [
        ModelSpec(
            engine=engine, tool_call_parser=server.tool_call_parser, reasoning_parser=server.reasoning_parser
        )
        for engine, server in resolved
    ]
    if len(specs) > 1:
        _check_names(specs)
        specs = [_with_own_trace(each) for each in specs]
    loads_adapters = any(server.loads_adapters for _, server in resolved)
    return tuple(specs), replace(resolved[0][1], loads_adapters=loads_adapters)


def _entries_of(options: Options, more: Sequence[str]) -> list[dict[str, Any]]:
    """Read the file of --models: the values of each model, by name."""
    path = Path(str(options.models))
    what = f"--models {path}"
    if options.model is not None or more:
        raise OptionError(f"{what} with MODEL", "both say what is served", "put all models into the file")
    content = read_yaml(path, "--models")
    form = "write `models:` and under it a list, each with `model: FOLDER` and options of its own"
    if not isinstance(content, dict) or not isinstance(content.get("models"), list) or not content["models"]:
        raise OptionError(what, "it has no list of models", form)
    others = content.keys() - {"models", "defaults"}
    defaults = content.get("defaults") or {}
    entries = content["models"]
    if others or not all(isinstance(each, dict) for each in (defaults, *entries)):
        wrong = (
            f"the key {min(map(str, others))!r} is not known" if others else "an entry is not `option: value`"
        )
        raise OptionError(what, wrong, form)
    shared = values_of(defaults, _OWN, where=f"defaults of {path}")
    return [
        {**shared, **values_of(each, _OWN, where=f"entry {number} of {path}")}
        for number, each in enumerate(entries, 1)
    ]


def _refuse_what_is_of_one(options: Options) -> None:
    def flags(names: Sequence[str]) -> dict[str, object]:
        return {f"--{name.replace('_', '-')}": getattr(options, name) or None for name in names}

    fix = "put it into the model's entry in the file of --models"
    refuse_given(flags(_OF_ONE), "with several models it is not clear which it is for", fix)
    alone = flags(("kv_events_port", "nnodes", "node_rank", "master_addr"))
    if options.distributed_executor != "processes":
        alone["--distributed-executor"] = options.distributed_executor
    refuse_given(alone, "it is for one model alone", "serve this model by a server of its own")


def _check_names(specs: Sequence[ModelSpec]) -> None:
    found = twice([each.names for each in specs])
    if found is not None:
        name, first, second = found
        folders = f"{specs[first].engine.model_path} and {specs[second].engine.model_path}"
        raise OptionError(
            f"the name {name}", f"{folders} both have it", "give one of them another served_model_name"
        )


def _with_own_trace(spec: ModelSpec) -> ModelSpec:
    """Return the model with a trace file of its own, if there is one."""
    if spec.engine.trace_file is None:
        return spec
    path = Path(spec.engine.trace_file)
    name = spec.names.served[0].replace("/", "-")
    trace = str(path.with_name(f"{path.stem}-{name}{path.suffix}"))
    return replace(spec, engine=replace(spec.engine, trace_file=trace))
