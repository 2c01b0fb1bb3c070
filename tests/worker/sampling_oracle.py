"""The sampler in slow and obvious Python, one token of one sequence at a time.

Owns: the meaning of SamplingParams, in double precision, without tensors.
Never: an import from the sampler under test.
"""

import math
from dataclasses import dataclass

from scheduler.messages import SamplingParams


@dataclass(frozen=True)
class Choice:
    """Tokens that may be drawn with their probabilities, by id, as the inverse CDF goes."""

    tokens: list[int]
    probabilities: list[float]
    margin: float
    """Distance of the nearest truncation from falling otherwise; rounding decides below about 1e-6."""

    def permits(self, token_id: int, uniform: float) -> bool:
        """Whether `uniform` falls into the share of `token_id`, but for rounding."""
        if token_id not in self.tokens:
            return False
        place = self.tokens.index(token_id)
        low = sum(self.probabilities[:place])
        return low - 1e-5 <= uniform <= low + self.probabilities[place] + 1e-5


def edited(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Logits after bias, bans and penalties."""
    result = list(logits)
    for token_id, bias in params.logit_bias:
        result[token_id] += bias
    for token_id in banned(params, output, num_tokens=len(logits)):
        result[token_id] = -math.inf
    for token_id in set(prompt + output):
        if result[token_id] > 0:
            result[token_id] /= params.repetition_penalty
        else:
            result[token_id] *= params.repetition_penalty
        if token_id in output:
            result[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    return result


def banned(params: SamplingParams, output: list[int], *, num_tokens: int) -> set[int]:
    """Tokens that must not be sampled after `output`."""
    found = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    for *before, last in params.bad_words:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            found.add(last)
    if params.allowed_token_ids:
        found |= set(range(num_tokens)) - set(params.allowed_token_ids)
    return found


def choose(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> Choice:
    """Tokens that may be sampled after `output`."""
    values = edited(logits, params, prompt, output)
    best = max(values)
    if params.temperature == 0:
        return Choice([values.index(best)], [1.0], 1.0)
    weights = {n: math.exp((value - best) / params.temperature) for n, value in enumerate(values)}
    margin = 1.0
    if params.min_p > 0:
        margin = min(abs(weight - params.min_p) for weight in weights.values())
    order = [n for n in weights if weights[n] >= params.min_p and weights[n] > 0]
    if 0 < params.top_k < len(logits) or params.top_p < 1:
        order.sort(key=lambda n: (-weights[n], n))
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = sum(weights[n] for n in order)
        kept, mass = [], 0.0
        for n in order:
            if kept:  # the first stays, whatever top_p is
                margin = min(margin, abs(mass / total - params.top_p))
                if mass >= params.top_p * total:
                    break
            kept.append(n)
            mass += weights[n]
        order = kept
    order.sort()
    total = sum(weights[n] for n in order)
    return Choice(order, [weights[n] / total for n in order], margin)
