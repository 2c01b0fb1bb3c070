"""Write today's figures into docs/structure.md, from the tree.

    python scripts/write_structure_page.py

Owns: the lines between the two marks of that page. tests/deploy/test_docs.py fails when they are 2 % off.
Never: a budget, which a person sets on the page itself.
"""

from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
PACKAGES = ("server", "engine", "scheduler", "worker")
OTHERS = {
    "C++ of `worker`": ("worker", ("*.cpp", "*.h")),
    "the web page": ("server", ("*.js", "*.css", "*.html")),
    "`bench`": ("bench", ("*.py",)),
    "`campaigns`": ("campaigns", ("*.py",)),
    "`tests`": ("tests", ("*.py",)),
    "documentation": ("docs", ("*.md",)),
}


def figures() -> dict[str, tuple[int, ...]]:
    """Folders, modules, modules of the largest folder and lines of each package; lines alone of all else."""
    found: dict[str, tuple[int, ...]] = {}
    for package in PACKAGES:
        modules = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
        folders = [path.parent for path in modules]
        largest = max(folders.count(folder) for folder in folders)
        lines = lines_of((ROOT / package).rglob("*.py"))
        found[f"`{package}`"] = (len(set(folders)), len(modules), largest, lines)
    folders, modules, largests, lines = zip(*found.values(), strict=True)
    found["the four"] = (sum(folders), sum(modules), max(largests), sum(lines))
    for name, (folder, kinds) in OTHERS.items():
        found[name] = (lines_of(path for kind in kinds for path in (ROOT / folder).rglob(kind)),)
    return found


def lines_of(paths: Iterable[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in paths)


def render() -> str:
    rows = ["| | Folders | Modules | Modules of the largest folder | Lines |", "|---|---|---|---|---|"]
    for name, numbers in figures().items():
        cells = [""] * (4 - len(numbers)) + [f"{number:,}" for number in numbers]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def insert(page: str, table: str) -> str:
    """The page with `table` between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
