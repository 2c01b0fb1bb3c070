"""Sampling on several ranks: each draws some of the tokens of a step, and one of them answers for all.

Owns: the samplers of all ranks. A row whose token follows from its logits, its seed and its place alone is
drawn by any rank of the last stage, as all of them have the logits. All others are sampled by the first of
these, which alone has grammars, counts and reports, and which gets the tokens of the rest within the step.
The other ranks find the tokens of a step in `sampled` of their stage (engine/core/stage_steps.py). Those of a
step with drafts are exchanged within it, since the step itself ends with how many there are.
Never: decides by anything but the plan, or the ranks would exchange different numbers.

Shapes: N tokens that are sampled in a step, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scheduler.messages import SamplingParams
from worker.devices.device import Device
from worker.ranks.ranks import Ranks
from worker.sampling.grammar_rows import Grammars
from worker.sampling.row_sampler import (
    DraftedPlace,
    LaunchedSample,
    SampleResult,
    VerifiedRow,
    lines_of,
)
from worker.sampling.sampler import Sampler
from worker.sampling.state import SamplingRow

Verify = Callable[[Tensor, Sequence[int], Sequence[Sequence[int]]], list[VerifiedRow]]
"""See RowSampler.verify."""
_UNREAD = SamplingParams(num_logprobs=0)
"""Stand-in for parameters that the first rank alone reads; as those, it makes no plain row."""
_FAILED = -1


def divide_lines(states: Sequence[SamplingRow], num_ranks: int) -> list[list[int]]:
    """Divide the rows of a step: each rank gets as many, as far as they are plain, and the first the rest."""
    num_each = len(states) // num_ranks
    plain = [n for n, state in enumerate(states) if state.is_plain]
    others: list[list[int]] = []
    for _ in range(1, num_ranks):
        start = max(0, len(plain) - num_each)
        others.append(plain[start:])
        del plain[start:]
    taken = {n for lines in others for n in lines}
    return [[n for n in range(len(states)) if n not in taken], *others]


def verify_for_all(
    verify: Verify, logits_NV: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]], ranks: Ranks
) -> list[VerifiedRow]:
    """Verify, and send the other ranks each row's tokens: how many, and one number for each place."""
    verified = verify(logits_NV, rows, drafts)
    numbers: list[int] = []
    for found, guesses in zip(verified, drafts, strict=True):
        num_tokens = len(found.token_ids)
        numbers += (num_tokens, *found.token_ids, *[0] * (1 + len(guesses) - num_tokens))
    ranks.broadcast(numbers)
    return verified


class LeadingSampler(Sampler):
    """Sampler of the rank that answers for all."""

    def __init__(self, *, vocab_size: int, device: Device, grammars: Grammars, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size, device=device, grammars=grammars)
        self._ranks = ranks

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        del rows
        own, *others = divide_lines(states, self._ranks.size)
        result = self._sample(logits_NV, own, states)
        if num_most := max(map(len, others), default=0):
            _, *drawn = self._ranks.of_all([0] * num_most).tolist()
            for lines, token_ids in zip(others, drawn, strict=True):
                for n, token_id in zip(lines, token_ids, strict=False):
                    if token_id == _FAILED:
                        result.failed[n] = states[n].failure
                    else:
                        result.token_ids[n] = token_id
        return LaunchedSample(torch.tensor(result.token_ids, dtype=torch.int64), lambda: result)

    def verify(
        self, logits_NV: Tensor, rows: Sequence[int], drafts: Sequence[Sequence[int]]
    ) -> list[VerifiedRow]:
        """See RowSampler."""
        return verify_for_all(super().verify, logits_NV, rows, drafts, self._ranks)

    def _sample_places(self, logits_NV: Tensor, places: Sequence[DraftedPlace]) -> SampleResult:
        lines_NV = lines_of(logits_NV, [each.line for each in places])
        return self._sample(lines_NV, range(len(places)), [each.state for each in places])


class FollowingSampler(Sampler):
    """Sampler of the other ranks, whose tokens are in `sampled` before a result is asked for.

    A position that failed where it was sampled has its token 0 here too.
    """

    def __init__(self, *, vocab_size: int, device: Device, ranks: Ranks) -> None:
        super().__init__(vocab_size=vocab_size, device=device)
        self._ranks = ranks

    def add_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """See RowSampler."""
        state = SamplingRow(
            params, token_ids, num_prompt_tokens=num_prompt_tokens, vocab_size=self._vocab_size
        )
        super().add_row(row, params if state.is_plain else _UNREAD, token_ids, num_prompt_tokens)

    def _launch(
        self, logits_NV: Tensor, rows: Sequence[int], states: Sequence[SamplingRow]
    ) -> LaunchedSample:
        if self._ranks.stage.is_last:
            self._draw_own(logits_NV, states)

        def collect() -> SampleResult:
            token_ids = self._ranks.stage.sampled.popleft()
            assert len(token_ids) == len(rows), "ranks do not compute the same"
            return SampleResult(token_ids=token_ids, logprobs={}, failed={})

        return LaunchedSample(self._tokens_of(len(rows)), collect)

    def _tokens_of(self, num_rows: int) -> Tensor:
        """Return memory for the tokens of a step, [N], as its device will know them."""
        return torch.zeros(num_rows, dtype=torch.int64)

    def _draw_own(self, logits_NV: Tensor, states: Sequence[SamplingRow]) -> None:
        """Draw this rank's part of a step for the first rank."""
        _, *others = divide_lines(states, self._ranks.size)
        num_most = max(map(len, others), default=0)
        if num_most == 0:
            return
        own = others[self._ranks.rank - 1]
        result = self._sample(logits_NV, own, states)
        token_ids = [_FAILED if n in result.failed else result.token_ids[n] for n in own]
        self._ranks.of_all([*token_ids, *[0] * (num_most - len(own))])

    def verify(
        self,
        logits_NV: Tensor,  # noqa: ARG002 - read by rank 0
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> list[VerifiedRow]:
        """See RowSampler."""
        num_numbers = sum(2 + len(guesses) for guesses in drafts)
        numbers = iter(self._ranks.broadcast([0] * num_numbers))
        verified = []
        for row, guesses in zip(rows, drafts, strict=True):
            num_tokens = next(numbers)
            token_ids = [next(numbers) for _ in range(1 + len(guesses))][:num_tokens]
            failure = "" if num_tokens else "it failed on rank 0"
            verified.append(VerifiedRow(token_ids=tuple(token_ids), logprobs=(), failure=failure))
            self._take(row, verified[-1])
        return verified
