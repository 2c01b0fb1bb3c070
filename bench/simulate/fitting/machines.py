"""Machines that were measured: `--machine NAME`.

Owns: the measured steps (docs/benchmarks/gpu-measured.md), the step time that follows from four of them, and
how far off it is for the others, which were not fitted.
Never: a machine of which a step that was not fitted is off by more than a tenth: it is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bench.simulate.fitting.fitted_step_time import LinearStepTime

_CONTEXT_TOKENS = 1024
"""Context of each decode, and length of each prompt, when the steps were measured."""


class DecodeStep(NamedTuple):
    """Step of decodes, one token a sequence."""

    num_sequences: int
    seconds: float


class PromptStep(NamedTuple):
    """Step of prompts, with the tokens in it and their rate."""

    num_tokens: int
    tokens_per_s: float

    @property
    def seconds(self) -> float:
        return self.num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A card with a model. The first two steps of each kind are fitted, the others say how good that is."""

    what: str
    decodes: tuple[DecodeStep, ...]
    prompts: tuple[PromptStep, ...]
    per_context_token_s: float
    """Bytes of keys and values over the rate of a copy, or attention as it was measured alone."""
    kv_bytes_per_token: int
    num_cache_tokens: int
    """Tokens of the KV cache by arithmetic: 0.9 of the memory less weights and 2 GB for steps."""

    @property
    def step_time(self) -> LinearStepTime:
        """Coefficients by four steps. Where tokens are few, reading the weights hides their arithmetic."""
        short, long = self.prompts[:2]
        per_token_s = (long.seconds - short.seconds - self._context_s(long) + self._context_s(short)) / (
            long.num_tokens - short.num_tokens
        )
        # A step of no prompts, as the line through the two says: the base less what it hides.
        unhidden_s = short.seconds - short.num_tokens * per_token_s - self._context_s(short)
        (few, few_s), (many, many_s) = self.decodes[:2]
        per_decode_s = (
            many_s - unhidden_s
        ) / many - per_token_s  # many enough that nothing hides all of them
        base_s = few_s - few * per_decode_s
        # All of a decode is at least its context, or a larger batch with a short one would be faster.
        per_context_token_s = min(self.per_context_token_s, per_decode_s / _CONTEXT_TOKENS)
        return LinearStepTime(
            base_s=base_s,
            per_token_s=per_token_s,
            per_decode_s=per_decode_s - _CONTEXT_TOKENS * per_context_token_s,
            per_context_token_s=per_context_token_s,
            hidden_s=base_s - unhidden_s,
        )

    def errors(self) -> Iterator[tuple[str, float]]:
        """Yield the steps that were not fitted, in words, and by which part of its time each is off."""
        model = self.step_time
        for num, seconds in self.decodes[2:]:
            found_s = model.seconds(num, num, num * _CONTEXT_TOKENS)
            yield f"{num} decodes", found_s / seconds - 1
        for step in self.prompts[2:]:
            found_s = model.seconds(step.num_tokens, 0, self._num_context_tokens(step))
            yield f"{step.num_tokens} tokens of prompts", found_s / step.seconds - 1

    def __str__(self) -> str:
        errors = ", ".join(f"{words} {error:+.0%}" for words, error in self.errors())
        return f"{self.what}; steps that were not fitted: {errors}"

    def _context_s(self, step: PromptStep) -> float:
        return self.per_context_token_s * self._num_context_tokens(step)

    def _num_context_tokens(self, step: PromptStep) -> int:
        """Keys that are read: a part of one prompt ends in the middle of it, on an average of its parts."""
        num_prompts, num_left = divmod(step.num_tokens, _CONTEXT_TOKENS)
        return num_prompts * _CONTEXT_TOKENS + (_CONTEXT_TOKENS + num_left) // 2 * (num_left > 0)


MACHINES = {
    "h100-llama-3.1-8b": Machine(
        what="Llama-3.1-8B's shape, bfloat16, on an H100 80GB, single steps of 2026-11-26",
        decodes=(
            DecodeStep(1, 6.42e-3),
            DecodeStep(256, 19.66e-3),
            DecodeStep(16, 7.26e-3),
            DecodeStep(64, 9.65e-3),
        ),
        prompts=(PromptStep(512, 38_634), PromptStep(2048, 43_112), PromptStep(8192, 43_716)),
        per_context_token_s=128 * 1024 / 3009e9,
        kv_bytes_per_token=128 * 1024,
        num_cache_tokens=16 * 25_700,
    ),
    "h200-llama-3.1-8b-fp8": Machine(
        what="Llama-3.1-8B's shape, fp8 (weights, activations, keys), on an H200, single steps of 2026-11-26",
        decodes=(
            DecodeStep(1, 4.56e-3),
            DecodeStep(256, 16.64e-3),
            DecodeStep(8, 5.09e-3),
            DecodeStep(16, 5.66e-3),
            DecodeStep(64, 7.64e-3),
        ),
        prompts=(PromptStep(512, 50_591), PromptStep(2048, 57_980), PromptStep(8192, 60_448)),
        per_context_token_s=3.0e-3 / (64 * _CONTEXT_TOKENS),
        kv_bytes_per_token=64 * 1024,
        num_cache_tokens=16 * 111_000,
    ),
}
