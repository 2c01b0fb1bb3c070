"""Write the table of errors into docs/errors.md, from the catalogue.

    python scripts/write_errors_page.py

Owns: the lines between the two marks of that page. tests/deploy/test_docs.py fails when they are stale.
Never: a word about an error that server/edge/error_catalogue.py does not say.
"""

from pathlib import Path

from server.edge.error_catalogue import CATALOGUE, Entry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"


def render() -> str:
    rows = sorted(CATALOGUE.items(), key=lambda row: row[1].status)
    header = ["| Status | Code | Type | When | Try again? |", "|---|---|---|---|---|"]
    return "\n".join([*header, *(_render_row(code, entry) for code, entry in rows)])


def insert(page: str, table: str) -> str:
    """The page with `table` between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _render_row(code: str, entry: Entry) -> str:
    retry = "" if entry.status == 499 else entry.retry.value
    return f"| {entry.status} | `{code}` | `{entry.type}` | {entry.meaning} | {retry} |"


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), render()), encoding="utf-8")
