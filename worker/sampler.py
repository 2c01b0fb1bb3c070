"""Logits to tokens: one call for all sequences that draw in a step.

Owns: the sampling state of each row, the grouping of rows by the work they need, the check that
logits are finite.
Never: which sequence holds a row (rows.py), nor when a sequence ends (the scheduler).
Source: the order of the steps is that of scheduler.messages.SamplingParams.

A token depends on the row's own logits, parameters, seed and history alone: neither neighbours nor
preemption change it.

Shapes: N rows, V vocabulary, W vocabulary padded to whole blocks of draw.BLOCK.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from scheduler.messages import SamplingParams, TokenLogprobs
from worker.draw import BLOCK, LEAST_TOP_P, Draw, draw, pick_best
from worker.grammar import Grammars
from worker.logits import edit_logits, report_logprobs
from worker.sampling_state import SamplingRow

_CPU_LOGITS_PER_THREAD = 1 << 17
"""Half a MiB of float32: the logits at work stay in each core's own cache from pass to pass."""

_DEVICE_LOGITS = 1 << 24
"""64 MiB of float32: enough to fill an accelerator, little beside its KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was drawn. Positions are those in the `rows` that were asked for."""

    token_ids: list[int]
    """One for each position; 0 and without meaning where the position failed."""
    logprobs: dict[int, TokenLogprobs]
    """By position, for rows that asked."""
    failed: dict[int, str]
    """By position: why no token could be drawn, for the log."""


class Sampler:
    """Draws tokens for rows; remembers of each row its parameters, its counts and its progress."""

    def __init__(self, *, vocab_size: int, device: torch.device, grammars: Grammars | None = None) -> None:
        """Without `grammars` no row may have one."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        width = -(-vocab_size // BLOCK) * BLOCK
        self._rows: dict[int, SamplingRow] = {}
        if device.type == "cpu":
            # A row for each thread at least: the selection of candidates runs on one thread a row.
            num_threads = torch.get_num_threads()
            num_lines = max(num_threads, num_threads * _CPU_LOGITS_PER_THREAD // width)
        else:
            num_lines = max(1, _DEVICE_LOGITS // width)
        self._scratch_NW = torch.empty((num_lines, width), dtype=torch.float32, device=device)

    def add_row(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Take `row` into use, on admission and again after a preemption.

        token_ids are the prompt and all that was generated so far.
        """
        state = SamplingRow(
            params, token_ids, num_prompt_tokens=num_prompt_tokens, vocab_size=self._vocab_size
        )
        if params.grammar is not None:
            assert self._grammars is not None, "a sampler without grammars"
            state.grammar = self._grammars.row(params.grammar, token_ids[num_prompt_tokens:])
        self._rows[row] = state

    def remove_row(self, row: int) -> None:
        """Forget `row`; nothing happens if it is unknown."""
        self._rows.pop(row, None)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[int]) -> SampleResult:
        """Draw one token for each of `rows`, each once, from its line of `logits`; record what was drawn.

        logits is [N, V] of any floating dtype on the sampler's device, and is not changed. -inf marks a
        token that cannot occur. A row fails alone, and draws nothing, if its logits hold a NaN or +inf,
        or if no token is left.
        """
        assert logits.shape == (len(rows), self._vocab_size)
        states = [self._rows[row] for row in rows]
        result = SampleResult(token_ids=[0] * len(rows), logprobs={}, failed={})
        greedy = [n for n, state in enumerate(states) if state.is_greedy]
        drawn = [n for n, state in enumerate(states) if not state.is_greedy]
        for lines in (*self._in_chunks(greedy), *self._in_chunks(drawn)):
            self._sample_lines(logits, lines, states, result)
        asked = [n for n in range(len(rows)) if states[n].params.num_logprobs is not None]
        for lines in self._in_chunks([n for n in asked if n not in result.failed]):
            self._report_lines(logits, lines, states, result)
        for n, state in enumerate(states):
            if n not in result.failed:
                state.record(result.token_ids[n])
        return result

    def _in_chunks(self, lines: list[int]) -> Iterator[list[int]]:
        size = len(self._scratch_NW)
        return (lines[start : start + size] for start in range(0, len(lines), size))

    def _load(self, logits: torch.Tensor, lines: list[int]) -> torch.Tensor:
        """`lines` of the logits as float32 in scratch memory, padded with -inf; good until the next load."""
        loaded_NW = self._scratch_NW[: len(lines)]
        if lines[-1] - lines[0] + 1 == len(lines):
            source = logits[lines[0] : lines[-1] + 1]
        else:
            source = logits[torch.tensor(lines, device=logits.device)]
        loaded_NW[:, : self._vocab_size].copy_(source)
        loaded_NW[:, self._vocab_size :] = -torch.inf
        return loaded_NW

    def _sample_lines(
        self, logits: torch.Tensor, lines: list[int], states: list[SamplingRow], result: SampleResult
    ) -> None:
        """Fill in `result` for `lines`, which are all greedy or all drawn."""
        loaded_NW = self._load(logits, lines)
        # NaN and +inf both surface in the maximum, and so does a row of nothing but -inf.
        peak_N = loaded_NW.amax(-1)
        is_sound_N = peak_N.isfinite()
        chosen = [states[n] for n in lines]
        if any(state.edits_logits for state in chosen):
            if self._grammars is not None:
                # First: whether a text is complete decides whether it may end before its minimum length.
                self._grammars.mask(loaded_NW, [state.grammar for state in chosen])
            edit_logits(loaded_NW, chosen)
            # The first check stands: a ban may have hidden what was wrong.
            peak_N = loaded_NW.amax(-1)
            is_sound_N &= peak_N.isfinite()
        is_sound = is_sound_N.tolist()
        if not all(is_sound):
            for n, sound in zip(lines, is_sound, strict=True):
                if not sound:
                    result.failed[n] = _why_none(states[n])
            lines = [n for n, sound in zip(lines, is_sound, strict=True) if sound]
            chosen = [states[n] for n in lines]
            loaded_NW, peak_N = loaded_NW[is_sound_N], peak_N[is_sound_N]
            if not lines:
                return
        if chosen[0].is_greedy:
            tokens = pick_best(loaded_NW)
        else:
            tokens = draw(loaded_NW, peak_N, [self._draw_of(state) for state in chosen])
        for n, token_id in zip(lines, tokens, strict=True):
            result.token_ids[n] = token_id

    def _draw_of(self, state: SamplingRow) -> Draw:
        params = state.params
        return Draw(
            uniform=state.next_uniform(),
            temperature=params.temperature,
            min_p=params.min_p,
            # As many as there are is no truncation, and must not cost a sort of the whole row.
            top_k=params.top_k if 0 < params.top_k < self._vocab_size else 0,
            top_p=max(params.top_p, LEAST_TOP_P),
        )

    def _report_lines(
        self, logits: torch.Tensor, lines: list[int], states: list[SamplingRow], result: SampleResult
    ) -> None:
        num_top = [states[n].params.num_logprobs or 0 for n in lines]
        token_ids = [result.token_ids[n] for n in lines]
        report = report_logprobs(self._load(logits, lines), token_ids, num_top)
        result.logprobs.update(zip(lines, report, strict=True))


def _why_none(state: SamplingRow) -> str:
    failure = state.grammar.failure if state.grammar is not None else ""
    return failure or "logits are not finite, or no token is left to draw"
