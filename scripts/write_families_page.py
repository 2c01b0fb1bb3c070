"""Write the table of families into docs/models.md, from what comes of each when it is tried.

    python scripts/write_families_page.py

Owns: the lines between the two marks of that page. tests/worker/startup/test_family_matrix.py tries the
same families and fails where a row is stale.
Never: a word about a family that was not found by trying it.
"""

import re
from collections import Counter
from pathlib import Path

import transformers

from tests.families import MATRIX
from tests.worker.family_trial import Found, UnknownFamily, try_family

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = (
    "| Family | Computed by | What its tiny model has | Why not by kernels, or not at all |",
    "|---|---|---|---|",
)
KERNELS, LAYERS, ALONE, REFUSED = "kernels", "own layers", "alone", "refused"
KERNELS_BUT_FOR_MLPS = "kernels but for MLPs"
_MEASURED = re.compile(r" \(error [^)]*\)")
# What is the same for every family stands above the table.
_SAID_ABOVE = re.compile(r", which this worker .*| that a paged KV cache cannot be put under")


def render(found: list[Found]) -> str:
    rows = [render_row(each) for each in found]
    num = Counter(_computed_by(each).partition(",")[0] for each in found)
    num_fused, num_but_for_mlps = (
        sum(_computed_by(each) == said for each in found) for said in (KERNELS, KERNELS_BUT_FOR_MLPS)
    )
    num_other = len(found) - num_fused - num_but_for_mlps - num[ALONE] - num[REFUSED]
    summary = (
        f"With transformers {transformers.__version__}, of {len(found)} tried: {num_fused} by kernels, "
        f"{num_but_for_mlps} by kernels but for MLPs, {num_other} by their own layers, wholly or in part, "
        f"{num[ALONE]} alone, {num[REFUSED]} refused."
    )
    return "\n".join([summary, "", *HEADER, *rows])


def render_row(found: Found) -> str:
    cells = (found.family.name, _computed_by(found), ", ".join(found.traits), _reasons(found))
    return "| " + " | ".join((f"`{cells[0]}`", *cells[1:])) + " |"


def insert(page: str, table: str) -> str:
    """The page with `table` between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _computed_by(found: Found) -> str:
    if found.way is not None:
        return f"{ALONE}, {found.way.value}"
    if found.refused is not None:
        return REFUSED
    assert found.replacement is not None, "without kernels there is no telling what they could compute"
    num_fused, num_layers = found.replacement.num_fused, found.replacement.num_layers
    if not num_fused:
        return LAYERS
    said = KERNELS_BUT_FOR_MLPS if found.replacement.num_kept_mlps else KERNELS
    return said if num_fused == num_layers else f"{said}, {num_fused} of {num_layers} layers"


def _reasons(found: Found) -> str:
    if found.refused is not None:
        reason = found.refused.removeprefix(f"{found.family.model_type} ")
        return _SAID_ABOVE.sub("", _MEASURED.sub("", reason))
    assert found.replacement is not None
    return "; ".join(dict.fromkeys(_MEASURED.sub("", reason) for reason in found.replacement.reasons))


def _try_all() -> list[Found]:
    found = []
    for family in MATRIX:
        try:
            found.append(try_family(family))
        except UnknownFamily as unknown:
            raise SystemExit(f"{unknown}: install a newer one") from unknown
    return found


if __name__ == "__main__":
    PAGE.write_text(insert(PAGE.read_text(encoding="utf-8"), render(_try_all())), encoding="utf-8")
