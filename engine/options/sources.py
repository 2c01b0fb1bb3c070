"""Options from flags, the environment and a YAML file.

Owns: the order of sources (flags over environment over file over default), and the errors for wrong names
and values.
"""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.options.options import BY_KEY, DECLARATIONS, FIELDS, Arity, Group, OptionError, Options
from engine.options.values import Switch, Text

ENVIRONMENT_PREFIX = "TOKENYARD_"

# Kubernetes sets such variables in every pod next to a Service whose name starts with `tokenyard`.
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://.*")
_SERVICE_LINK_NAME = re.compile(
    r"TOKENYARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


_JSON = Text(metavar="JSON")
_SIMILAR = 0.75
"""Share of letters that two names have in common where one may be a slip of the other."""


def add_flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Add a flag for each option, under the heading of its group; `read_options` parses the values.

    Return them by the name of their option.
    """
    flags: dict[str, argparse.Action] = {}
    headings = {group: parser.add_argument_group(group.value) for group in Group}
    headings[Group.MODEL].add_argument(
        "positional_model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="The same as --model."
    )
    for key, name in BY_KEY.items():
        declaration = DECLARATIONS[name]
        text = f"{declaration.help} (default: {_shown_default(name)})".replace("%", "%%")
        heading = headings[declaration.group]
        if isinstance(declaration.kind, Switch):
            flags[name] = heading.add_argument(
                f"--{key}", action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            flags[name] = heading.add_argument(
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
    return flags


def _shown_default(name: str) -> str:
    declaration = DECLARATIONS[name]
    return declaration.open_default or declaration.kind.show(FIELDS[name].default)


class Source(StrEnum):
    """Sources of values; a later one wins."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


def read_options(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Options:
    """Read all sources; `flags` are from the parser of `add_flags`. Raises OptionError."""
    return merge(read_sources(flags, environment))


def read_sources(flags: Mapping[str, Any], environment: Mapping[str, str]) -> dict[Source, dict[str, Any]]:
    """Read the values of each source by name; a later source wins. Raises OptionError."""
    flags = dict(flags)
    config = flags.pop("config", None) or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return {
        Source.FILE: {} if config is None else _from_file(Path(config)),
        Source.ENVIRONMENT: _from_environment(environment),
        Source.COMMAND_LINE: _from_flags(flags),
    }


def merge(sources: Mapping[Source, Mapping[str, Any]]) -> Options:
    values: dict[str, Any] = {}
    for said in sources.values():
        values.update(said)
    return Options(**values)


def source_of(name: str, sources: Mapping[Source, Mapping[str, Any]]) -> Source:
    found = [source for source, said in sources.items() if name in said]
    return found[-1] if found else Source.DEFAULT


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
    content = read_yaml(path, "--config")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(
            f"--config {path}", "not a list of `option: value` lines", "write one option a line"
        )
    return values_of(content, BY_KEY, where=str(path))


def read_yaml(path: Path, flag: str) -> Any:
    """Read the file that a flag names. Raises OptionError."""
    # Not at the top: most starts have no file, and --help must not wait for a YAML parser.
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"{flag} {path}", why.lower(), "name a readable YAML file") from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise OptionError(f"{flag} {path}", f"not valid YAML ({why})", "correct it") from error


def values_of(content: Mapping[Any, Any], known: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """Parse lines of YAML to values by name; `known` are names by key. Raises OptionError."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        normal = str(key).replace("_", "-")
        if normal not in known:
            raise OptionError(f"{key} in {where}", "there is no such option", closest(normal, known))
        name = known[normal]
        if name in values:
            raise OptionError(f"{normal} in {where}", "it is there twice", "remove one")
        if value is not None:
            values[name] = _parse(name, value, source=f"{normal} in {where}")
    return values


def _parse(name: str, value: Any, *, source: str) -> Any:
    """Parse a value, which is a text or was parsed by YAML."""
    if DECLARATIONS[name].arity is Arity.MANY:
        items = value if isinstance(value, list) else [value]
        return tuple(_parse_one(name, item, source=source) for item in items)
    return _parse_one(name, value, source=source)


def _parse_one(name: str, value: Any, *, source: str) -> object:
    declaration = DECLARATIONS[name]
    fix = f"correct it, or leave it out for the default ({_shown_default(name)})"
    shown = "" if declaration.is_secret else f" {str(value)[:200]!r}"
    is_object = isinstance(value, dict) and declaration.kind == _JSON
    if not is_object and not isinstance(value, str | int | float):
        raise OptionError(f"{source}{shown}", "it must be a single value", fix)
    try:
        return declaration.kind.parse(_json(value) if is_object else str(value))
    except ValueError as error:
        raise OptionError(f"{source}{shown}", f"it must {error}", fix) from error


def _json(value: Any) -> str:
    """Write an object of YAML. Raises ValueError for one that JSON cannot hold."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("be an object of JSON") from error


def closest(name: str, known: Iterable[str], *, spelled: Callable[[str], str] = str) -> str:
    """Make the advice for an unknown name: the most similar one, or where all are listed."""
    found: Sequence[str] = difflib.get_close_matches(name, list(known), n=1, cutoff=_SIMILAR)
    return f"did you mean {spelled(found[0])}?" if found else "`tokenyard serve --help=all` lists all options"


def _key(name: str) -> str:
    return name.replace("_", "-")
