"""The models of one server, as the command line and the file of --models name them.

Owns: the options that a model may have for itself, and the checks of all models together.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from engine.models.placement import Reservation
from engine.models.table import twice
from engine.models.yard import KeepRule
from engine.options.engine_config import EngineConfig, ServerConfig, resolve
from engine.options.found_model import DEMO_MODEL, GGUF_SUFFIX, find_model
from engine.options.options import (
    BY_KEY,
    DECLARATIONS,
    Group,
    OptionError,
    Options,
    checked_values,
    refuse_given,
)
from engine.options.sources import read_yaml, values_of
from engine.options.values import Choice, Duration, Switch, ValueKind
from engine.types import ModelNames, Profile
from worker.checkpoint.gguf.file import PART as GGUF_PART
from worker.checkpoint.overrides import generation_overrides, template_kwargs

log = logging.getLogger(__name__)

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
_PROFILE = {
    each.replace("_", "-"): each
    for each in ("served_model_name", "override_generation_config", "default_chat_template_kwargs")
}
"""Options of a profile, by key."""
_RULE_KEYS = ("load", "pin", "keep-alive")
"""Lines of an entry about when its model is loaded."""
_OF_ONE = (
    *("served_model_name", "checksums", "chat_template", "lora_modules", "lora_directory"),
    *("num_gpu_blocks_override", "hf_overrides"),
)
"""Options that are right for one model only."""
_MAX_NAME_CHARS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the server."""

    engine: EngineConfig
    tool_call_parser: str
    reasoning_parser: str
    keep: KeepRule = field(default_factory=KeepRule)
    room: Reservation | None = None
    """Its part of the memory, once that is shared out."""
    fault: str = ""
    """Reason why it cannot be loaded, though the others can be served; empty if none was found."""

    @property
    def names(self) -> ModelNames:
        profiles = tuple(each.name for each in self.engine.profiles)
        adapters = tuple(each.name for each in self.engine.worker.adapters)
        return ModelNames(self.engine.served_names, self.engine.name_patterns, profiles + adapters)

    def failed(self, what: str, fix: str) -> "ModelSpec":
        """Return the model as one that is never loaded, with texts of the built-in one: none is read."""
        log.critical("%s cannot be loaded: %s; %s", self.names.served[0], what, fix)
        files = {"model_path": str(DEMO_MODEL), "checksums_file": None, "chat_template_file": None}
        worker = replace(self.engine.worker, **files)  # type: ignore[arg-type]
        return replace(self, fault=f"{what}; {fix}", engine=replace(self.engine, worker=worker))


def resolve_models(
    options: Options, more: Sequence[str] = (), *, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[ModelSpec, ...], ServerConfig]:
    """Check and resolve the options of each model, and of the server. Raises OptionError.

    `more` are the models behind the first of the command line.
    """
    entries = [(each, KeepRule()) for each in _models_of(options, more)]
    profiles: dict[str, tuple[str, Profile]] = {}
    if options.models is not None:
        entries, profiles = _entries_of(options, more)
    if len(entries) > 1 or options.models is not None:
        _refuse_what_is_of_one(options)
    resolved = [
        _resolved(replace(options, models=None, **values), rule, environment) for values, rule in entries
    ]
    specs = [spec for spec, _ in resolved]
    if len(specs) > 1:
        _check_names(specs)
        specs = [_with_own_trace(each) for each in specs]
    for where, (base, profile) in profiles.items():
        specs = _with_profile(specs, base, profile, where)
    loads_adapters = any(server.loads_adapters for _, server in resolved)
    return tuple(specs), replace(resolved[0][1], loads_adapters=loads_adapters)


def _resolved(
    options: Options, rule: KeepRule, environment: Mapping[str, str]
) -> tuple[ModelSpec, ServerConfig]:
    """Resolve the options of one model, which must be right if it is loaded at the start.

    Raises OptionError.
    """
    why, fix = "", ""
    try:
        find_model(options.model, environment)
        engine, server = resolve(options, environment=environment)
    except OptionError as error:
        can_be_a_name = len(str(options.model)) <= _MAX_NAME_CHARS and "\0" not in str(options.model)
        if rule.at_start or not can_be_a_name:
            raise
        path = Path(str(options.model))  # or a name on a hub, of two parts
        names = options.served_model_name or (str(path) if len(path.parts) == 2 else path.name,)
        plain = {name: getattr(Options(), name) for name in _OWN.values()}
        why, fix = f"{error.what}: {error.why}", error.fix
        options = replace(options, **{**plain, "served_model_name": names})
        engine, server = resolve(options, environment=environment)
    spec = ModelSpec(
        engine=engine,
        tool_call_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        keep=rule,
    )
    return spec.failed(why, fix) if why else spec, server


def _models_of(options: Options, more: Sequence[str]) -> list[dict[str, Any]]:
    return [{"model": each} for each in (options.model, *more)] if more else [{}]


def _entries_of(
    options: Options, more: Sequence[str]
) -> tuple[list[tuple[dict[str, Any], KeepRule]], dict[str, tuple[str, Profile]]]:
    """Read the file of --models.

    Return the values of each model, by name, and when it is loaded; and the profiles, each with the name of
    its model, by where they stand.
    """
    path = Path(str(options.models))
    what = f"--models {path}"
    if options.model is not None or more:
        raise OptionError(f"{what} with MODEL", "both say what is served", "put all models into the file")
    content = _folder(path) if path.is_dir() else read_yaml(path, "--models")
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
    if all("of" in each for each in entries):
        raise OptionError(what, "it has no model but profiles", "add the model that they name")
    shared_rule, shared = _divided(defaults)
    found, profiles = [], {}
    for number, each in enumerate(entries, 1):
        where = f"entry {number} of {path}"
        if "of" in each:
            profiles[where] = str(each["of"]), _profile_of(each, where)
            continue
        values = values_of(shared, _OWN, where=f"defaults of {path}")
        rule, own = _divided(each)
        values |= values_of(own, _OWN, where=where)
        found.append((values, _rule_of(rule, shared_rule, where)))
    return found, profiles


def _folder(path: Path) -> dict[str, Any]:
    """Return as the content of a file the models of a folder, each on demand; links are not followed.

    Raises OptionError if there is none.
    """
    found: dict[str, str] = {}
    try:
        paths = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise OptionError(
            f"--models {path}", f"it cannot be read: {error}", "let the server read it"
        ) from error
    for each in paths:
        try:
            if _is_model(each):
                name = each.stem if each.suffix == GGUF_SUFFIX else each.name
                found[each.name if name in found else name] = str(each)
        except OSError as error:
            log.warning("--models %s: %s is left out: %s", path, each.name, error)
    if not found:
        why = "it has no model, neither a folder with config.json nor a .gguf file"
        raise OptionError(f"--models {path}", why, "name the folder in which those of the models are")
    named = [{"model": model, "served_model_name": name} for name, model in found.items()]
    return {"models": named, "defaults": {"load": "demand"}}


def _is_model(path: Path) -> bool:
    """Tell whether a file or a folder is a model of its own, no part or projector of one. Raises OSError."""
    if path.is_symlink() or "mmproj" in path.name.lower():
        return False
    part = GGUF_PART.fullmatch(path.name)
    is_first = part is None or int(part[2]) == 1
    return (path.suffix == GGUF_SUFFIX and is_first) or (path / "config.json").is_file()


def _profile_of(entry: Mapping[Any, Any], where: str) -> Profile:
    """Parse an entry with `of`. Raises OptionError."""
    values = values_of({key: each for key, each in entry.items() if key != "of"}, _PROFILE, where=where)
    names = values.get("served_model_name", ())
    if len(names) != 1 or "*" in names[0]:
        why = "a profile has one name, without a *"
        raise OptionError(where, why, "write one served_model_name, by which requests ask for it")
    return Profile(
        name=names[0],
        sampling=checked_values(generation_overrides, values.get("override_generation_config")),
        template_kwargs=checked_values(template_kwargs, values.get("default_chat_template_kwargs")),
    )


def _with_profile(specs: Sequence[ModelSpec], base: str, profile: Profile, where: str) -> list[ModelSpec]:
    """Add a profile to the model that is served as `base`. Raises OptionError."""
    names = [each.names for each in specs]
    if any(profile.name in (*each.served, *each.variants) for each in names):
        raise OptionError(f"the name {profile.name}", f"{where} has it again", "choose another")
    if not any(base in each.served for each in names):
        known = ", ".join(name for each in names for name in each.served)
        raise OptionError(f"of: {base} in {where}", "no model has this name", f"name one of {known}")
    place = next(place for place, each in enumerate(specs) if base in each.names.served)
    engine = replace(specs[place].engine, profiles=(*specs[place].engine.profiles, profile))
    return [*specs[:place], replace(specs[place], engine=engine), *specs[place + 1 :]]


def _divided(content: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Divide the lines of an entry into those of its rule, where they have a value, and the options."""
    keys = {key: str(key).replace("_", "-") for key in content}
    rule = {keys[key]: value for key, value in content.items() if keys[key] in _RULE_KEYS}
    options = {key: value for key, value in content.items() if keys[key] not in _RULE_KEYS}
    return {key: value for key, value in rule.items() if value is not None}, options


def _rule_of(own: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> KeepRule:
    """Parse when a model is loaded and leaves. Raises OptionError."""
    lines = {**defaults, **own}

    def parsed(key: str, kind: ValueKind, default: str) -> Any:
        try:
            return kind.parse(str(lines.get(key, default)))
        except ValueError as error:
            shown = f"{key} in {where} {str(lines[key])[:200]!r}"
            raise OptionError(shown, f"it must {error}", "correct it, or leave it out") from error

    is_on_demand = parsed("load", Choice(words=("start", "demand")), "start") == "demand"
    is_pinned = parsed("pin", Switch(), "false")
    keep_alive_s = parsed("keep-alive", Duration(low=0.0, high=1e7), "10m" if is_on_demand else "0")
    if is_pinned and keep_alive_s and "keep-alive" in own:
        raise OptionError(f"keep-alive in {where}", "a pinned model never leaves", "leave one of them out")
    return KeepRule(at_start=not is_on_demand, is_pinned=is_pinned, keep_alive_s=keep_alive_s or inf)


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
