"""Write the table of options into docs/configuration.md, from their declarations.

    python scripts/write_options_page.py

Owns: the lines between the two marks of that page. tests/deploy/test_docs.py fails when they are stale.
Never: a word about an option that engine/options/options.py does not say.
"""

from dataclasses import fields
from pathlib import Path

from engine.options.options import DECLARATIONS, Arity, Group, Options
from engine.options.values import Switch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"


def render() -> str:
    """All groups, each with its table."""
    return "\n\n".join(_render_group(group) for group in Group)


def insert(page: str, tables: str) -> str:
    """The page with `tables` between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{begin}\n\n{tables}\n\n{end}{after}"


def _render_group(group: Group) -> str:
    rows = [_render_row(name) for name, declaration in DECLARATIONS.items() if declaration.group is group]
    header = ["| Flag and variable | Default | What it does |", "|---|---|---|"]
    return "\n".join([f"### {group.value}", "", *header, *rows])


def _render_row(name: str) -> str:
    declaration = DECLARATIONS[name]
    flag = f"--{name.replace('_', '-')}"
    if isinstance(declaration.kind, Switch):
        flag = f"{flag}`, `--no-{flag.removeprefix('--')}"
    else:
        flag = f"{flag} {declaration.kind.metavar}"
    times = " (may be repeated)" if declaration.arity is Arity.MANY else ""
    cells = [f"`{flag}`{times}<br>`TOKENYARD_{name.upper()}`", _shown_default(name), declaration.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown_default(name: str) -> str:
    default = next(field.default for field in fields(Options) if field.name == name)
    declaration = DECLARATIONS[name]
    return declaration.open_default or f"`{declaration.kind.show(default)}`"


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
