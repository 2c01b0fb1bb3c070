"""Every family that transformers has computes what it computes by itself, or is refused with the reason."""

import re
from pathlib import Path

import pytest
import transformers

from scripts.write_families_page import (
    ALL_FORMATS,
    ASKED,
    ASKED_BEGIN,
    ASKED_END,
    BEGIN,
    END,
    GGUF,
    PAGE,
    PICTURES,
    render_row,
)
from tests.families import MATRIX, Family
from tests.worker.family_formats import FORMATS, formats_of, gguf_names
from tests.worker.family_trial import UnknownFamily, try_family
from tests.worker.pictures.seeing import FAMILIES as SEEING_FAMILIES

pytestmark = pytest.mark.night

# In float32. Wrong computation gives about 1.
TOLERANCE = 2e-5


def table() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def version_of_table() -> list[str]:
    """Its first two numbers: what a release refuses or renames, another may not."""
    found = re.search(r"With transformers (\d+)\.(\d+)", table())
    assert found is not None
    return list(found.groups())


# Older releases of transformers script a function of gpt_bigcode, which newer ones of torch find old.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", MATRIX, ids=lambda family: family.name)
def test_a_family_in_a_mixed_batch_computes_what_it_computes_alone(family: Family) -> None:
    """Two sequences, in chunks and decodes, through the paged cache and the CPU's kernels."""
    try:
        found = try_family(family)
    except UnknownFamily as unknown:
        pytest.skip(str(unknown))
    assert found.error <= TOLERANCE
    has_verdict = found.refused is not None or found.replacement is not None
    if has_verdict and transformers.__version__.split(".")[:2] == version_of_table():
        row = next(line for line in table().splitlines() if line.startswith(f"| `{family.name}` |"))
        assert row == render_row(found), "run: python scripts/write_families_page.py"


def test_the_table_of_families_has_a_row_for_each() -> None:
    assert re.findall(r"^\| `([^`]*)` \|", table(), flags=re.MULTILINE) == [each.name for each in MATRIX]


def asked_cells(name: str) -> list[str]:
    asked = PAGE.read_text(encoding="utf-8").partition(ASKED_BEGIN)[2].partition(ASKED_END)[0]
    row = next(line for line in asked.splitlines() if f"| `{name}` |" in line)
    return [each.strip() for each in row.strip("|").split("|")]


@pytest.mark.parametrize("name", ASKED)
def test_a_family_that_is_asked_for_has_the_formats_of_its_row(name: str, tmp_path: Path) -> None:
    """One format of each family: the script that writes the rows has tried all."""
    tried = asked_cells(name)[4].split(", ")
    chosen = list(FORMATS)[list(ASKED).index(name) % len(FORMATS)]
    [family] = [each for each in MATRIX if each.name == name]
    is_said = ALL_FORMATS in tried or FORMATS[chosen] in tried
    assert bool(formats_of(family, tmp_path, [chosen])) == is_said, chosen


def test_families_whose_gguf_files_and_pictures_are_tried_are_those_that_rows_name() -> None:
    assert {name for name in ASKED if asked_cells(name)[4].endswith(GGUF)} == {*filter(gguf_names, ASKED)}
    assert {name for name in ASKED if asked_cells(name)[3] == PICTURES} == ASKED.keys() & SEEING_FAMILIES


def test_both_tables_say_the_same_of_how_a_family_is_computed() -> None:
    ways = {
        row.split(" | ")[0].strip("| `"): row.split(" | ")[1] for row in table().splitlines() if " | " in row
    }
    assert {name: asked_cells(name)[2] for name in ASKED} == {name: ways[name] for name in ASKED}
