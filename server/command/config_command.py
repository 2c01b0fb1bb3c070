"""`tokenyard config`: the resolved options and the source of each, and the schema of their file.

Never: shows a secret, loads a model, or checks it (`tokenyard doctor` does).
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from engine.options.options import BY_KEY, DECLARATIONS, Arity, OptionError, Options
from engine.options.schema import file_schema
from engine.options.sources import Source, merge, read_sources, source_of
from server.command.command_line import OptionParser

_USAGE = """\
usage: tokenyard config show [MODEL] [options]   the value of every option, and where it comes from
                             [--changed]         of those alone that are not left at their default
                             [--json]            as JSON
       tokenyard config schema                   the JSON schema of the --config file
"""
_MASK = "***"


def main(words: Sequence[str]) -> int:
    command, rest = (words[0], list(words[1:])) if words else ("", [])
    if command == "show":
        return _show(rest)
    if command == "schema" and not rest:
        print(json.dumps(file_schema(), indent=2))
        return 0
    if command in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    raise OptionError(
        f"tokenyard config {command}".strip(), "it takes `show` or `schema`", "see `tokenyard config --help`"
    )


def _show(words: list[str]) -> int:
    parser = OptionParser(
        prog="tokenyard config show", description="Show every option's value and where it comes from."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--changed", action="store_true", help="Show only what was set.")
    flags = parser.read(words)
    as_json, only_changed = flags.pop("json"), flags.pop("changed")
    sources = read_sources(flags, os.environ)
    rows = rows_of(sources)
    if only_changed:
        rows = {key: row for key, row in rows.items() if row["origin"] != Source.DEFAULT.value}
    print(json.dumps({"options": rows}, indent=2) if as_json else _table(rows))
    return 0


def rows_of(sources: Mapping[Source, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return value, words and origin of each option by its key; secrets are masked."""
    options = merge(sources)
    return {key: _row(name, options, source_of(name, sources)) for key, name in BY_KEY.items()}


def _row(name: str, options: Options, source: Source) -> dict[str, Any]:
    """Describe an option: `value` as the file has it, `shown` as a person writes it, and its origin."""
    declaration, value = DECLARATIONS[name], getattr(options, name)
    if source is Source.DEFAULT and declaration.open_default:
        return {"value": None, "shown": declaration.open_default, "origin": source.value}
    values = list(value) if declaration.arity is Arity.MANY else [value]
    if declaration.is_secret:
        values = [_MASK] * len(values)
    return {
        "value": values if declaration.arity is Arity.MANY else values[0],
        "shown": ", ".join(declaration.kind.show(item) for item in values),
        "origin": source.value,
    }


def _table(rows: dict[str, dict[str, Any]]) -> str:
    """Lines of option, origin, value: the value last, since it may be long. Groups have a heading."""
    if not rows:
        return "every option is left at its default"
    key_width = max(map(len, rows)) + 2
    origin_width = max(len(source.value) for source in Source) + 2
    lines: list[str] = []
    heading = ""
    for key, row in rows.items():
        group = DECLARATIONS[BY_KEY[key]].group.value
        if group != heading:
            lines += ["", f"{group}:"] if lines else [f"{group}:"]
            heading = group
        lines.append(f"  {key:<{key_width}}{row['origin']:<{origin_width}}{row['shown']}")
    return "\n".join(lines)
