"""The kernels from logits to tokens, each once, and those that edit logits.

Owns: small rows, and what worker/sampling/draw.py and plain torch make of them.

Shapes: N rows, V vocabulary, E edited lines.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from campaigns.gpu.first.trial import Build, Place, Trial, agreement
from worker.gpu.sampling.draw_fields import LINE, MIN_P, NUM_FIELDS, PLACE, TEMPERATURE, TOP_K, TOP_P, UNIFORM
from worker.gpu.sampling_kernels.bitmask import copy_masked
from worker.gpu.sampling_kernels.penalties import Penalties, count_tokens, penalize
from worker.gpu.sampling_kernels.token_draw import SPAN, LogitRows, Workspace, draw, pick_best
from worker.sampling.draw import BLOCK, Draw
from worker.sampling.draw import draw as draw_by_definition

_VOCAB_SIZE = 9001
_UNIFORMS = (0.03, 0.5, 0.97)


def sampling_trials(place: Place) -> list[Build]:
    peaked, flat = 4.0, 0.05
    # No list of candidates is long enough for a flat row: all of it is searched.
    flat_name = "a draw by top-k and top-p from a flat row"
    return [
        partial(_best, place),
        partial(_draws, place, "a draw from all tokens", peaked, temperature=0.8),
        partial(_draws, place, "a draw by min-p", peaked, min_p=0.02),
        partial(_draws, place, "a draw by top-k", peaked, top_k=40),
        partial(_draws, place, "a draw by top-p", peaked, top_p=0.9),
        partial(_draws, place, flat_name, flat, top_k=6000, top_p=0.7),
        *(partial(build, place) for build in (_masks, _penalties, _counts)),
    ]


def _best(place: Place) -> Trial:
    logits_NV = place.random(3, _VOCAB_SIZE)
    rows_NF = _rows(place, [Draw(uniform=0.0, temperature=1.0, min_p=0.0, top_k=1, top_p=1.0)] * 3)

    def compute() -> list[Tensor]:
        outcome_2N = torch.full((2, 3), -1, dtype=torch.int64, device=place.device)
        pick_best(LogitRows(logits_NV, rows_NF), outcome_2N, _workspace(place, 3))
        return [outcome_2N]

    def define() -> list[Tensor]:
        best_N = logits_NV.float().argmax(dim=-1)
        return [torch.stack([best_N, torch.zeros_like(best_N)])]

    return agreement("the best token", {"logits": logits_NV, "rows": rows_NF}, compute, define)(0.0)


def _draws(place: Place, name: str, spread: float, **limits: float) -> Trial:
    asked = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | limits
    draws = [Draw(uniform=uniform, **asked) for uniform in _UNIFORMS]  # type: ignore[arg-type]
    logits_NV = place.random(len(draws), _VOCAB_SIZE, scale=spread)
    rows_NF = _rows(place, draws)

    def compute() -> list[Tensor]:
        outcome_2N = torch.full((2, len(draws)), -1, dtype=torch.int64, device=place.device)
        draw(LogitRows(logits_NV, rows_NF), outcome_2N, _workspace(place, len(draws)))
        return [outcome_2N]

    def define() -> list[Tensor]:
        logits_NW = pad(logits_NV.cpu().float(), (0, -_VOCAB_SIZE % BLOCK), value=-torch.inf)
        tokens_N = torch.tensor(draw_by_definition(logits_NW, logits_NW.amax(-1), draws))
        return [torch.stack([tokens_N, torch.zeros_like(tokens_N)])]

    return agreement(name, {"logits": logits_NV, "rows": rows_NF}, compute, define)(0.0)


def _rows(place: Place, draws: list[Draw]) -> Tensor:
    rows_NF = torch.zeros((len(draws), NUM_FIELDS), dtype=torch.float64)
    for number, each in enumerate(draws):
        rows_NF[number, [LINE, PLACE]] = float(number)
        rows_NF[number, [TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORM]] = torch.tensor(
            [each.temperature, each.min_p, each.top_k, each.top_p, each.uniform], dtype=torch.float64
        )
    return rows_NF.to(place.device)


def _workspace(place: Place, num_rows: int) -> Workspace:
    return Workspace.allocate(num_rows, _VOCAB_SIZE, place.device)


def _masks(place: Place) -> Trial:
    logits_NV = place.random(2, _VOCAB_SIZE)
    num_words = -(-_VOCAB_SIZE // 32)
    masks_GK = place.integers(torch.arange(num_words)[None] * 40_503 % 65_537)
    lines_E2 = place.integers([[1, 0], [0, -1]])

    def compute() -> list[Tensor]:
        edited_EV = torch.zeros((2, _VOCAB_SIZE), device=place.device)
        faults_ES = torch.zeros((2, -(-_VOCAB_SIZE // SPAN)), device=place.device)
        copy_masked(logits_NV, lines_E2, masks_GK, edited_EV, faults_ES)
        return [edited_EV, faults_ES]

    def define() -> list[Tensor]:
        ids = torch.arange(_VOCAB_SIZE, device=place.device)
        is_allowed = (masks_GK[0, ids // 32] >> (ids % 32)) & 1 == 1
        edited_EV = logits_NV.float()[[1, 0]]
        edited_EV[0].masked_fill_(~is_allowed, -torch.inf)
        return [edited_EV, torch.full((2, -(-_VOCAB_SIZE // SPAN)), -torch.inf)]

    inputs = {"logits": logits_NV, "masks": masks_GK, "lines": lines_E2}
    return agreement("logits copied and masked", inputs, compute, define)(0.0)


def _penalties(place: Place) -> Trial:
    """Logits in float32, whatever the model's format is: they are edited in it. The second line has none."""
    logits_EV = place.random(2, _VOCAB_SIZE).float()
    amounts = (1.3, 0.25, 0.5)
    ids_V = torch.arange(_VOCAB_SIZE)
    is_in_prompt_V, generated_V = ids_V % 7 == 0, (ids_V % 11 == 0) * (ids_V % 4)
    counts_CV = torch.stack([torch.zeros(_VOCAB_SIZE), is_in_prompt_V + 2 * generated_V])
    penalties = Penalties(
        rows_E=place.integers([1, -1]),
        amounts_E3=torch.tensor([amounts, amounts], dtype=torch.float64, device=place.device),
        counts_CV=place.integers(counts_CV),
    )
    repetition, frequency, presence = amounts
    x_V = logits_EV[0].cpu()
    penalized_V = torch.where(x_V > 0, x_V / repetition, x_V * repetition)
    penalized_V = penalized_V - (frequency * generated_V + presence * (generated_V > 0))
    expected_EV = torch.stack([torch.where(counts_CV[1] > 0, penalized_V, x_V), logits_EV[1].cpu()])

    def compute() -> list[Tensor]:
        penalize(logits_EV, penalties)
        return [logits_EV]

    inputs = {"logits": logits_EV, "counts": penalties.counts_CV}
    return agreement("penalties", inputs, compute, lambda: [expected_EV])(1e-5)


def _counts(place: Place) -> Trial:
    """The third line's draw has failed, and the second is nobody's."""
    counts_CV, rows_E, places_E = (
        place.integers([[0] * 50] * 3),
        place.integers([2, -1, 0]),
        place.integers([1, 2, 0]),
    )
    outcome_2N = place.integers([[7, 9, 5], [1, 0, 0]], torch.int64)
    expected_CV = torch.zeros(3, 50)
    expected_CV[2, 9] = 2

    def compute() -> list[Tensor]:
        count_tokens(counts_CV, rows_E, places_E, outcome_2N)
        return [counts_CV]

    inputs = {"counts": counts_CV, "rows": rows_E, "outcome": outcome_2N}
    return agreement("drawn tokens counted", inputs, compute, lambda: [expected_CV])(0.0)
