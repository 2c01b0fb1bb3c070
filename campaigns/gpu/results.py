"""Results of a part, written to disk as soon as they are found.

Owns: the file of a part, and the page made of all of them.
Never: measures.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PAGE = "results.md"
LINES = "results.jsonl"


class Table:
    """Rows that are written down as they come."""

    def __init__(self, record: "Record", title: str, columns: Sequence[str]) -> None:
        self._record = record
        self.title, self.columns = title, tuple(columns)
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(tuple(str(cell) for cell in cells))
        self._record.tell(table=self.title, row=dict(zip(self.columns, self.rows[-1], strict=True)))
        self._record.save()

    def replace(self, rows: Iterable[Sequence[object]]) -> None:
        """Parts that sort all of them, where they do not come in their order."""
        self.rows = [tuple(str(cell) for cell in row) for row in rows]
        self._record.save()


class Record:
    """FOLDER/NAME.json, written anew with each thing that is added."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._lines = folder / f"{name}.json", folder / LINES
        self.name = name
        self._tables: list[Table] = []
        self._notes: list[str] = []
        self.figures: dict[str, Any] = {}
        self.save()

    def table(self, title: str, *columns: str) -> Table:
        table = Table(self, title, columns)
        self._tables.append(table)
        self.save()
        return table

    def note(self, text: str) -> None:
        """One line for the reader."""
        self._notes.append(text)
        self.tell(note=text)
        self.save()

    def figure(self, name: str, value: Any) -> None:
        """For programs and for later parts."""
        self.figures[name] = value
        self.tell(figure=name, value=value)
        self.save()

    def tell(self, **what: Any) -> None:
        """Add a line to the file of all parts: what was found, in its order, whatever happens later."""
        with self._lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"part": self.name, **what}) + "\n")

    def save(self) -> None:
        document = {
            "part": self.name,
            "figures": self.figures,
            "notes": self._notes,
            "tables": [
                {"title": each.title, "columns": each.columns, "rows": each.rows} for each in self._tables
            ],
        }
        waiting = self._path.with_suffix(".tmp")
        waiting.write_text(json.dumps(document, indent=1), encoding="utf-8")
        waiting.replace(self._path)


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Results that a part has written so far; empty if there are none."""
    try:
        document: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document


def write_page(folder: Path, ends: Sequence[tuple[str, str, str]]) -> None:
    """Page of all results. `ends` are the name, the title and the end of each part that began."""
    lines = ["# The GPU path, measured", ""]
    for name, title, end in ends:
        lines += [f"## {title}", "", f"{end}.", ""]
        document = read_record(folder, name)
        for note in document.get("notes", ()):
            lines += [note, ""]
        for table in document.get("tables", ()):
            lines += [f"### {table['title']}", "", *_markdown(table["columns"], table["rows"]), ""]
    (folder / PAGE).write_text("\n".join(lines), encoding="utf-8")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
