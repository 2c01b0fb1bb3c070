"""Write the table of families into docs/models.md, from what comes of each when it is tried.

    python scripts/write_families_page.py

Owns: the lines between the marks of that page: of the families that are asked for, with the formats that were
tried, and of all. tests/worker/startup/test_family_matrix.py tries the same, and fails where a row is stale.
Never: a word about a family that was not found by trying it.
"""

import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import transformers

from tests.families import MATRIX
from tests.worker.family_formats import FORMATS, formats_of, reads_gguf, reads_pictures
from tests.worker.family_trial import Found, UnknownFamily, try_family

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
ASKED_BEGIN, ASKED_END = "<!-- asked for: begin -->", "<!-- asked for: end -->"
ASKED_HEADER = (
    "| Models | Family | Computed by | Sees | Quantized, tried |",
    "|---|---|---|---|---|",
)
ALL_FORMATS, GGUF = "all", "GGUF"
PICTURES, TEXT_ALONE = "text and pictures", "text, no pictures yet"
ASKED = {
    "qwen3_5": "Qwen 3.5, 3.6",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 with experts",
    "qwen3_vl": "Qwen3-VL",
    "qwen2": "Qwen 2.5",
    "qwen2_5_vl": "Qwen2.5-VL",
    "gemma4": "Gemma 4",
    "gemma3": "Gemma 3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "GLM-4.5 to 4.7",
    "glm4v_moe": "GLM-4.5V, 4.6V",
    "glm_moe_dsa": "GLM-5",
    "deepseek_v3": "DeepSeek R1, V3, V3.1; Kimi K2",
    "deepseek_v32": "DeepSeek V3.2",
    "kimi_k25": "Kimi K2.5, K2.6",
    "kimi_linear": "Kimi Linear",
    "minimax_m2": "MiniMax M2",
    "minimax_m3_vl": "MiniMax M3",
    "mistral3": "Mistral Small 3, Ministral 3, Devstral 2",
    "mistral": "Mistral 7B",
    "mixtral": "Mixtral",
    "llama": "Llama 2, 3",
    "llama4": "Llama 4",
    "phi3": "Phi 3, 4",
    "granitemoehybrid": "Granite 4",
    "granite": "Granite 3",
    "lfm2": "LFM2",
    "nemotron_h": "Nemotron 3",
    "smollm3": "SmolLM 3",
    "smolvlm": "SmolVLM",
    "internvl": "InternVL 3",
    "hunyuan_v1_dense": "Hunyuan",
    "ernie4_5_moe": "ERNIE 4.5",
    "exaone4": "EXAONE 4",
    "olmo3": "OLMo 3",
}
"""Families that most threads of 2026 ask for, and the names of their models."""
HEADER = (
    "| Family | Computed by | What its tiny model has | Why not by kernels, or not at all |",
    "|---|---|---|---|",
)
KERNELS, LAYERS, ALONE, REFUSED = "kernels", "own layers", "alone", "refused"
KERNELS_BUT_FOR_MLPS = "kernels but for MLPs"
_MEASURED = re.compile(r" \(error [^)]*\)")
# What is the same for every family stands above the table.
_SAID_ABOVE = re.compile(r", which this worker .*| that a paged KV cache cannot be put under")


class Tried(NamedTuple):
    """Result of a family's whole checkpoints."""

    formats: list[str]
    """Names of FORMATS."""
    reads_gguf: bool
    reads_pictures: bool


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


def render_asked(found: list[Found], tried: dict[str, Tried]) -> str:
    by_name = {each.family.name: each for each in found}
    rows = [asked_row(by_name[name], tried[name]) for name in ASKED]
    return "\n".join([*ASKED_HEADER, *rows])


def asked_row(found: Found, tried: Tried) -> str:
    """A row for a reader in haste. Every model that knows pictures reads the text around them."""
    name = found.family.name
    is_all = len(tried.formats) == len(FORMATS)
    formats = [ALL_FORMATS] if is_all else [FORMATS[each] for each in tried.formats]
    if tried.reads_gguf:
        formats.append(GGUF)
    sees = TEXT_ALONE if found.family.text_part else "text"
    sees = PICTURES if tried.reads_pictures else sees
    cells = (ASKED[name], f"`{name}`", _computed_by(found), sees, ", ".join(formats))
    return "| " + " | ".join(cells) + " |"


def render_row(found: Found) -> str:
    cells = (found.family.name, _computed_by(found), ", ".join(found.traits), _reasons(found))
    return "| " + " | ".join((f"`{cells[0]}`", *cells[1:])) + " |"


def insert(page: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with `table` between its marks. Raises ValueError if a mark is missing."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{PAGE.name} lacks {begin} or {end}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def _computed_by(found: Found) -> str:
    if found.way is not None:
        return f"{ALONE}, {found.way}"
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


def _try_checkpoints() -> dict[str, Tried]:
    families = {each.name: each for each in MATRIX}
    found = {}
    for name in ASKED:
        with TemporaryDirectory() as formats, TemporaryDirectory() as gguf, TemporaryDirectory() as seeing:
            found[name] = Tried(
                formats_of(families[name], Path(formats), list(FORMATS)),
                reads_gguf(name, Path(gguf)),
                reads_pictures(name, Path(seeing)),
            )
    return found


if __name__ == "__main__":
    families = _try_all()
    text = insert(PAGE.read_text(encoding="utf-8"), render(families))
    asked = render_asked(families, _try_checkpoints())
    PAGE.write_text(insert(text, asked, ASKED_BEGIN, ASKED_END), encoding="utf-8")
