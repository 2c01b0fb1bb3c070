"""Edits of logits that requests ask for before sampling, and reports of log-probabilities.

Source: repetition penalty, CTRL, arXiv:1909.05858, section 4.1, over prompt and output; presence and
frequency penalty as OpenAI's API reference defines them, over the output.

Shapes: N rows, W logits of a row: the vocabulary, padded with -inf; K likeliest tokens of a row, G tokens of
it that the request names.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from scheduler.messages import SamplingParams, TokenLogprobs
from worker.sampling.state import SamplingRow, TokenIds


def edit_logits(logits_NW: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply bias, ends of thoughts, bans and penalties of `rows` in place; they do not commute.

    logits_NW is float32 and contiguous, one line for each of `rows`.
    """
    flat = logits_NW.view(-1)
    biased = [n for n, row in enumerate(rows) if len(row.bias_ids)]
    if biased:
        where = _flat_index(logits_NW, biased, [rows[n].bias_ids for n in biased])
        values = np.concatenate([rows[n].bias_values for n in biased])
        flat.index_add_(0, where, torch.from_numpy(values).to(flat.device))
    for n, row in enumerate(rows):
        if row.params.allowed_token_ids:
            _keep_only(logits_NW[n], row.allowed_ids)
    for into, out_of in end_moves(list(enumerate(rows)), width=logits_NW.shape[1]):
        move_end(flat, torch.from_numpy(into).to(flat.device), torch.from_numpy(out_of).to(flat.device))
    banned = [(n, ids) for n, row in enumerate(rows) for ids in row.banned_ids()]
    if banned:
        where = _flat_index(logits_NW, [n for n, _ in banned], [ids for _, ids in banned])
        flat.index_fill_(0, where, -torch.inf)
    penalized = [n for n, row in enumerate(rows) if row.counts is not None]
    if penalized:
        _penalize(logits_NW, penalized, [rows[n] for n in penalized])
    for n, row in enumerate(rows):
        if row.thoughts is not None and row.thoughts.must_close:
            logits_NW[n].fill_(-torch.inf)
            logits_NW[n, row.thoughts.closing_id] = 0.0


def end_moves(rows: Sequence[tuple[int, SamplingRow]], *, width: int) -> list[tuple[TokenIds, TokenIds]]:
    """List where the logits of end tokens go in open thoughts, and where they are, of rows by their lines.

    Each pair has a row at most once: the first one its first end token, the second its second.
    """
    thinking = [(line, row.thoughts) for line, row in rows if row.thoughts and row.thoughts.moves_end]
    most = max((len(thoughts.end_ids) for _, thoughts in thinking), default=0)
    moves = []
    for place in range(most):
        some = [(line * width, thoughts) for line, thoughts in thinking if place < len(thoughts.end_ids)]
        into = [begin + thoughts.closing_id for begin, thoughts in some]
        out_of = [begin + thoughts.end_ids[place] for begin, thoughts in some]
        moves.append((np.array(into, np.int64), np.array(out_of, np.int64)))
    return moves


def move_end(flat: torch.Tensor, into: torch.Tensor, out_of: torch.Tensor) -> None:
    """Add the probabilities of some logits to those of others, each once. The former are banned then."""
    flat.index_copy_(0, into, torch.logaddexp(flat[into], flat[out_of]))


def _flat_index(logits_NW: torch.Tensor, lines: Sequence[int], ids: Sequence[TokenIds]) -> torch.Tensor:
    """Build the index into the flattened logits of `ids[i]` in line `lines[i]`, for all i."""
    width = logits_NW.shape[1]
    index = np.concatenate([n * width + some for n, some in zip(lines, ids, strict=True)])
    return torch.from_numpy(index).to(logits_NW.device)


def _keep_only(logits_W: torch.Tensor, ids: TokenIds) -> None:
    where = torch.from_numpy(ids).to(logits_W.device)
    kept = logits_W[where]
    logits_W.fill_(-torch.inf)
    logits_W[where] = kept


def _penalize(logits_NW: torch.Tensor, lines: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    ids, amounts = [], []
    for row in rows:
        assert row.counts is not None
        counts = row.counts.num_generated
        ids.append(row.counts.ids)
        penalty = np.empty((2, len(counts)), np.float32)
        penalty[0] = row.params.repetition_penalty
        penalty[1] = row.params.frequency_penalty * counts + row.params.presence_penalty * (counts > 0)
        amounts.append(penalty)
    where = _flat_index(logits_NW, lines, ids)
    flat = logits_NW.view(-1)
    repetition, subtracted = torch.from_numpy(np.concatenate(amounts, axis=1)).to(flat.device)
    seen = flat[where]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition) - subtracted
    flat[where] = seen


class Alternatives(NamedTuple):
    """Tokens that are reported with a chosen one: the likeliest, or those that the request names."""

    num_top: int
    given_ids: tuple[int, ...] = ()
    """Distinct; if there are any, num_top is 0."""


def alternatives_of(params: SamplingParams) -> Alternatives:
    given_ids = params.logprob_token_ids
    return Alternatives(0 if given_ids else params.num_logprobs or 0, given_ids)


def given_ids_NG(alternatives: Sequence[Alternatives]) -> NDArray[np.int64]:
    """Lay out the tokens that requests name, padded with token 0."""
    size = max(len(each.given_ids) for each in alternatives)
    ids_NG = np.zeros((len(alternatives), size), np.int64)
    for line, each in zip(ids_NG, alternatives, strict=True):
        line[: len(each.given_ids)] = each.given_ids
    return ids_NG


def report_logprobs(
    logits_NW: torch.Tensor, token_ids: Sequence[int], alternatives: Sequence[Alternatives]
) -> list[TokenLogprobs]:
    """Report the log-softmax of unedited logits at each chosen token, its rank and its alternatives.

    Tokens of probability zero are left out of the likeliest. Equal tokens share a rank, and are listed by
    id; the chosen one is never cut off by its equals.
    """
    num_lines = len(token_ids)
    device = logits_NW.device
    chosen_N = torch.tensor(token_ids, device=device)
    given_NG = torch.from_numpy(given_ids_NG(alternatives)).to(device)
    if num_lines == 1:
        # torch adds up a single long row in parts, and so rounds otherwise than among others.
        logits_NW, chosen_N, given_NG = logits_NW.expand(2, -1), chosen_N.expand(2), given_NG.expand(2, -1)
    num_top = max(each.num_top for each in alternatives)
    measures_NF = measure_logprobs(logits_NW, chosen_N, num_top, given_NG)
    return write_reports(measures_NF[:num_lines].cpu().numpy(), token_ids, alternatives)


def measure_logprobs(
    logits_NW: torch.Tensor, chosen_N: torch.Tensor, num_top: int, given_NG: torch.Tensor
) -> torch.Tensor:
    """Compute the measures that `write_reports` needs from float32 logits, without waiting for their device.

    [N, 2 + G + 2K] float64: log-probability and rank of the chosen token, the log-probabilities of the given
    tokens, then the K best log-probabilities, then their tokens. K is `num_top`, or all there are.
    """
    log_sum_N1 = logits_NW.logsumexp(-1, keepdim=True)
    chosen_logit_N1 = logits_NW.gather(1, chosen_N.unsqueeze(1))
    ranks_N1 = (logits_NW > chosen_logit_N1).sum(-1, keepdim=True) + 1
    values_NK, ids_NK = logits_NW.topk(min(num_top, logits_NW.shape[1]), dim=-1)
    given = (logits_NW.gather(1, given_NG) - log_sum_N1,) if given_NG.shape[1] else ()
    parts = (chosen_logit_N1 - log_sum_N1, ranks_N1, *given, values_NK - log_sum_N1, ids_NK)
    return torch.cat([part.double() for part in parts], dim=1)


def write_reports(
    measures_NF: NDArray[np.float64], token_ids: Sequence[int], alternatives: Sequence[Alternatives]
) -> list[TokenLogprobs]:
    """Write reports of chosen tokens from lines of `measure_logprobs`."""
    num_given = max((len(each.given_ids) for each in alternatives), default=0)
    logprobs, ranks, given_NG = measures_NF[:, 0], measures_NF[:, 1], measures_NF[:, 2 : 2 + num_given]
    best_N = _likeliest(measures_NF[:, 2 + num_given :])
    lines = zip(token_ids, alternatives, logprobs.tolist(), ranks.astype(np.int64).tolist(), strict=True)
    report = []
    for (token_id, asked, logprob, rank), best, given in zip(lines, best_N, given_NG.tolist(), strict=True):
        if asked.given_ids:
            top = {token_id: logprob} | dict(zip(asked.given_ids, given, strict=False))
            report.append(TokenLogprobs(token_id, logprob, rank, tuple(top.items())))
        else:
            shown = best.shown(asked.num_top, (token_id, logprob), rank)
            report.append(TokenLogprobs(token_id, logprob, rank, shown))
    return report


class _Likeliest(NamedTuple):
    """The K likeliest tokens of a line."""

    is_plain: bool
    """The common case: no equals whose order is open, and no token to leave out."""
    values: list[float]
    ids: list[int]

    def shown(self, num: int, chosen: tuple[int, float], rank: int) -> tuple[tuple[int, float], ...]:
        best = list(zip(self.ids[:num], self.values[:num], strict=True))
        if best and rank <= num and chosen[0] not in self.ids[:num]:
            # Its equals took the last places: among equals the chosen one is shown.
            best[-1] = chosen
        if not self.is_plain:
            best = sorted((entry for entry in best if entry[1] != -torch.inf), key=_best_first)
        return tuple(best)


def _likeliest(best_NF: NDArray[np.float64]) -> list[_Likeliest]:
    """Read the K best values of each line, and the tokens behind them."""
    num_best = best_NF.shape[1] // 2
    values_NK, ids_NK = best_NF[:, :num_best], best_NF[:, num_best:].astype(np.int64)
    is_falling_N = np.all(values_NK[:, 1:] < values_NK[:, :-1], axis=1)
    is_plain_N = is_falling_N & np.all(values_NK > -np.inf, axis=1)
    lines = zip(is_plain_N.tolist(), values_NK.tolist(), ids_NK.tolist(), strict=True)
    return [_Likeliest(*line) for line in lines]


def _best_first(entry: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = entry
    return -logprob, token_id
