"""Sampling from edited logits, one token a row: the maximum, or a draw by inverse CDF.

Never: state; each function is pure but for scratch memory, and one row never sees another.
Source: inverse transform sampling, L. Devroye, "Non-Uniform Random Variate Generation", 1986, II.2;
nucleus (top-p), arXiv:1904.09751; min-p, arXiv:2407.01082.

Tokens are truncated heaviest first and equals by id. The rest is always drawn in the order of ids, so that a
token does not depend on the way by which the others were cut.

A row takes one uniform number instead of noise for the whole vocabulary: at 150,000 tokens the noise alone
costs several times as much as all of this module.

    weights   |#......|.##....|...#...|......#|     W = num_blocks * BLOCK, padding has weight 0
    sums      |   s0  |   s1  |   s2  |   s3  |     cumulated: which block, then which token in it

Shapes: N rows, W logits of a row, B blocks of BLOCK (b) logits, K candidates, H buckets of a histogram, E
tokens in one of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from scheduler.messages import SamplingParams

BLOCK = 512
"""Logits of a row come in a multiple of this; small against a row, large against a vector register."""

_NUM_CANDIDATES = 128
"""Most likely tokens that are sorted: nearly every nucleus fits. A larger one is cut by histogram, at about
three times the cost."""

_BUCKET_SHIFT = 16
_NUM_BUCKETS = (0x3F80_0000 >> _BUCKET_SHIFT) + 1
"""Weights are float32 from 0 to 1, whose bits are 0 to 0x3F800000; a bucket spans a 128th of an octave."""

_LEAST_TEMPERATURE = 1e-30
"""Keeps 0 / temperature from being NaN in float32; everything below the maximum has weight 0 here."""

LEAST_TOP_P = 1e-9
"""Keeps the heaviest token alone, as 0 means to: its share of a row is larger than this."""

_LOW_32 = (1 << 32) - 1


class Draw(NamedTuple):
    """Parameters of one row, and its random number."""

    params: SamplingParams
    uniform: float
    """Random number in [0, 1)."""

    @property
    def is_truncated(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0


def pick_best(logits_NW: torch.Tensor) -> list[int]:
    """Return the most likely token of each row; of equals, the lowest id."""
    # Maxima of blocks are vector work and argmax is not: 5 times faster at 150,000 logits on CPU.
    logits_NBb = logits_NW.view(logits_NW.shape[0], -1, BLOCK)
    block_N1 = logits_NBb.amax(-1).argmax(-1, keepdim=True)
    block_Nb = _take_blocks(logits_NBb, block_N1)
    best: list[int] = (block_N1.squeeze(1) * BLOCK + block_Nb.argmax(-1)).tolist()
    return best


def draw(logits_NW: torch.Tensor, peak_N: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token a row, with its probability after temperature, min-p, top-k and top-p, in this order.

    logits_NW is float32 and contiguous, W a multiple of BLOCK, and is overwritten. peak_N, the maximum
    of each row, is finite.
    """
    weights_NW = logits_NW.sub_(peak_N.unsqueeze(1))
    if any(each.params.temperature != 1.0 for each in draws):
        temperatures = [max(each.params.temperature, _LEAST_TEMPERATURE) for each in draws]
        weights_NW.div_(_column(temperatures, like=weights_NW))
    weights_NW.exp_()
    if any(each.params.min_p > 0.0 for each in draws):
        # The most likely token has weight 1, so min_p is the bound on weights as it stands.
        weights_NW.mul_(weights_NW >= _column([each.params.min_p for each in draws], like=weights_NW))
    sums_NB = _sum_blocks(weights_NW)
    whole = [n for n, each in enumerate(draws) if not each.is_truncated]
    if len(whole) == len(draws):
        return _draw_whole(weights_NW, sums_NB, draws)
    tokens = [0] * len(draws)
    if whole:
        index = torch.tensor(whole, device=weights_NW.device)
        drawn = _draw_whole(weights_NW[index], sums_NB[index], [draws[n] for n in whole])
        for n, token_id in zip(whole, drawn, strict=True):
            tokens[n] = token_id
    for n, token_id in _draw_truncated(weights_NW, draws, sums_NB.sum(-1)).items():
        tokens[n] = token_id
    return tokens


def _column(values: Sequence[float], *, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _sum_blocks(weights_NW: torch.Tensor) -> torch.Tensor:
    """Sum up the mass of each block, [N, B] in float64."""
    return weights_NW.view(len(weights_NW), -1, BLOCK).sum(-1, dtype=torch.float64)


def _take_blocks(values_NBb: torch.Tensor, block_N1: torch.Tensor) -> torch.Tensor:
    return values_NBb[torch.arange(len(values_NBb), device=values_NBb.device), block_N1.squeeze(1)]


def _draw_whole(weights_NW: torch.Tensor, sums_NB: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample by inverse CDF in the order of token ids, in two stages."""
    cumulated_NB = sums_NB.cumsum(-1)
    uniform_N1 = _column([each.uniform for each in draws], like=cumulated_NB)
    target_N1 = uniform_N1 * cumulated_NB[:, -1:]
    block_N1 = torch.searchsorted(cumulated_NB, target_N1, right=True).clamp_(max=cumulated_NB.shape[1] - 1)
    before_N1 = pad(cumulated_NB, (1, 0)).gather(1, block_N1)
    inner_Nb = _take_blocks(weights_NW.view(len(draws), -1, BLOCK), block_N1).double().cumsum(-1)
    inner_N1 = torch.searchsorted(inner_Nb, target_N1 - before_N1, right=True)
    # The two sums may differ in their last bit: stay at the last token that has any weight.
    last_N1 = torch.searchsorted(inner_Nb, inner_Nb[:, -1:].contiguous())
    tokens: list[int] = (block_N1 * BLOCK + torch.minimum(inner_N1, last_N1)).squeeze(1).tolist()
    return tokens


def _draw_truncated(weights_NW: torch.Tensor, draws: Sequence[Draw], total_N: torch.Tensor) -> dict[int, int]:
    """Sample the truncated rows among `draws`: from a few candidates, or from the whole row."""
    tokens: dict[int, int] = {}
    short = [n for n, each in enumerate(draws) if each.is_truncated and each.params.top_k < _NUM_CANDIDATES]
    if short:
        index = torch.tensor(short, device=weights_NW.device)
        candidates_NW = weights_NW if len(short) == len(draws) else weights_NW[index]
        drawn, is_exact = _draw_among_heaviest(candidates_NW, [draws[n] for n in short], total_N[index])
        tokens = {n: token for n, token, exact in zip(short, drawn, is_exact, strict=True) if exact}
    for n, each in enumerate(draws):
        if each.is_truncated and n not in tokens:
            # A view of one row: cut in place, then drawn like a row without truncation.
            _truncate(weights_NW[n], each.params)
            tokens[n] = _draw_whole(weights_NW[n : n + 1], _sum_blocks(weights_NW[n : n + 1]), [each])[0]
    return tokens


def _draw_among_heaviest(
    weights_NW: torch.Tensor, draws: Sequence[Draw], total_N: torch.Tensor
) -> tuple[list[int], list[bool]]:
    """Sample by inverse CDF over the heaviest tokens, in the order of their ids.

    Also returns for each row whether all tokens that truncation keeps are among the candidates.
    """
    weights_NK, ids_NK = _heaviest(weights_NW)
    top_k_N1 = torch.tensor([each.params.top_k or _NUM_CANDIDATES for each in draws], device=ids_NK.device)
    within_NK = torch.arange(_NUM_CANDIDATES, device=ids_NK.device) < top_k_N1.unsqueeze(1)
    mass_NK = weights_NK.double() * within_NK
    cumulated_NK = mass_NK.cumsum(-1)
    # top_p is a share of the mass that min-p and top-k leave; 1 keeps all of it, free of rounding.
    has_top_k_N = torch.tensor([each.params.top_k > 0 for each in draws], device=ids_NK.device)
    left_N = torch.where(has_top_k_N, cumulated_NK[:, -1], total_N)
    share_N1 = _column([_share(each.params) for each in draws], like=mass_NK)
    enough_N1 = share_N1 * left_N.unsqueeze(1)
    kept_NK = (cumulated_NK - mass_NK < enough_N1) & (mass_NK > 0)
    last_N1 = kept_NK.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    sorted_ids_NK, order_NK = ids_NK.masked_fill(~kept_NK, _LOW_32).sort(-1)
    by_id_NK = (mass_NK * kept_NK).gather(1, order_NK).cumsum(-1)
    uniform_N1 = _column([each.uniform for each in draws], like=mass_NK)
    place_N1 = torch.searchsorted(by_id_NK, uniform_N1 * by_id_NK[:, -1:], right=True)
    tokens: list[int] = sorted_ids_NK.gather(1, torch.minimum(place_N1, last_N1)).squeeze(1).tolist()
    # An equal of the last kept token may have been cut off in its stead unless a lighter one is here.
    exact: list[bool] = (weights_NK.gather(1, last_N1).squeeze(1) > weights_NK[:, -1]).tolist()
    return tokens, exact


def _share(params: SamplingParams) -> float:
    """Return the share of the mass that top-p keeps; without one, more than there is."""
    return max(params.top_p, LEAST_TOP_P) if params.top_p < 1.0 else torch.inf


def _heaviest(weights_NW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the heaviest tokens of each row, weights and ids, heaviest first, equals by id."""
    weights_NK, ids_NK = weights_NW.topk(_NUM_CANDIDATES, sorted=False)
    # topk leaves the order of equals open. The bits of a non-negative float sort like the float, so
    # weight and id make one integer key, and one sort makes a total order.
    key_NK = (weights_NK.view(torch.int32).long() << 32) | (_LOW_32 - ids_NK)
    key_NK = key_NK.sort(-1, descending=True).values
    return (key_NK >> 32).int().view(torch.float32), _LOW_32 - (key_NK & _LOW_32)


def _truncate(weights_W: torch.Tensor, limits: SamplingParams) -> None:
    """Set the weights that top-k and top-p cut to 0, however many are kept."""
    if limits.top_k > 0:
        _keep_heaviest(weights_W, torch.ones_like(weights_W, dtype=torch.float64), limits.top_k)
    if limits.top_p < 1.0:
        mass_W = weights_W.double()
        _keep_heaviest(weights_W, mass_W, _share(limits) * float(mass_W.sum()))


def _keep_heaviest(weights_W: torch.Tensor, amounts_W: torch.Tensor, enough: float) -> None:
    """Keep tokens, heaviest first and equals by id, until their amounts come to `enough`; 0 for the rest.

    A histogram over the leading bits of the weights finds the bucket where that happens, and only that
    bucket is sorted: sorting a whole row of 150,000 takes twenty times as long.
    """
    bucket_W = weights_W.view(torch.int32) >> _BUCKET_SHIFT
    amount_H = torch.bincount(bucket_W, amounts_W, minlength=_NUM_BUCKETS).flip(0)
    before_H = amount_H.cumsum(0) - amount_H
    edge = max(0, int((before_H < enough).sum()) - 1)
    ids_E = (bucket_W == _NUM_BUCKETS - 1 - edge).nonzero().squeeze(1)
    ids_E = ids_E[weights_W[ids_E].sort(descending=True, stable=True).indices]
    amounts_E = amounts_W[ids_E]
    is_cut_E = before_H[edge] + amounts_E.cumsum(0) - amounts_E >= enough
    weights_W.mul_(bucket_W >= _NUM_BUCKETS - 1 - edge)
    weights_W[ids_E[is_cut_E]] = 0.0
