"""Accuracy lost by quantization: two servers of one checkpoint, compared on a fixed set of prompts.

The first one is the truth. It answers greedily; then both score its prompts and answers token by token
(`echo` with `logprobs` and no new tokens), so that one early difference does not spoil all that follows.

    tokenyard serve FOLDER --port 8001 & tokenyard serve FOLDER --quantization int8 --port 8002 &
    python -m campaigns.quantization --truth http://127.0.0.1:8001 --other http://127.0.0.1:8002

Owns: the prompts and the three figures. Never: starts or ends a server.
"""

import argparse
import json
import math
import urllib.request
from dataclasses import dataclass
from itertools import chain
from typing import Any

_NUM_ANSWER_TOKENS = 48
_TIMEOUT_S = 120
_PROMPTS = (
    *(f"What is the capital of {country}?" for country in ("France", "Italy", "Japan", "Peru", "Kenya")),
    *(f"Count from {first} to {first + 6}." for first in (1, 3, 10, 24)),
    *(f"What is {a} plus {b}?" for a, b in ((2, 3), (7, 8), (10, 5), (4, 9))),
    "Once upon a time",
    "Write a short story about a dog.",
    "Tell me about the sea.",
    "How do plants grow?",
    "Say hello in three ways.",
    "What do you know about trains?",
    "Name four colours.",
    "Why is the sky blue?",
)


@dataclass(frozen=True, slots=True)
class Scored:
    """One text under one model, from its second token on."""

    tokens: list[str]
    logprobs: list[float]
    best: list[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    num_tokens: int
    num_same_best: int
    """At how many places both think the same token the most likely."""
    mean_difference: float
    """Mean difference of the log-probabilities of the true text's tokens, without its sign."""
    perplexities: tuple[float, float]
    num_answers: int
    num_same_answers: int


def compare(truth: str, other: str) -> Comparison:
    """Raises OSError if a server does not answer, KeyError if it answers something else."""
    answers = [(prompt, _answer(truth, prompt), _answer(other, prompt)) for prompt in _PROMPTS]
    texts = [prompt + answer for prompt, answer, _ in answers]
    pairs = [(_score(truth, text), _score(other, text)) for text in texts]
    ours = list(chain.from_iterable(pair[0].logprobs for pair in pairs))
    theirs = list(chain.from_iterable(pair[1].logprobs for pair in pairs))
    same = sum(a == b for pair in pairs for a, b in zip(pair[0].best, pair[1].best, strict=True))
    return Comparison(
        num_tokens=len(ours),
        num_same_best=same,
        mean_difference=sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours),
        perplexities=(math.exp(-sum(ours) / len(ours)), math.exp(-sum(theirs) / len(theirs))),
        num_answers=len(answers),
        num_same_answers=sum(a == b for _, a, b in answers),
    )


def _answer(url: str, prompt: str) -> str:
    text: str = _complete(url, prompt=prompt, max_tokens=_NUM_ANSWER_TOKENS)["text"]
    return text


def _score(url: str, text: str) -> Scored:
    logprobs = _complete(url, prompt=text, max_tokens=0, echo=True, logprobs=1)["logprobs"]
    # The first token has nothing before it, and so no probability.
    best = [max(top, key=top.__getitem__) for top in logprobs["top_logprobs"][1:]]
    return Scored(logprobs["tokens"][1:], logprobs["token_logprobs"][1:], best)


def _complete(url: str, **fields: Any) -> dict[str, Any]:
    body = json.dumps({**fields, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        choice: dict[str, Any] = json.load(reply)["choices"][0]
    return choice


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare two servers of one checkpoint, token by token.")
    parser.add_argument("--truth", required=True, metavar="URL", help="the one that counts as right")
    parser.add_argument("--other", required=True, metavar="URL", help="the one that is measured")
    arguments = parser.parse_args()
    found = compare(arguments.truth, arguments.other)
    print("| Figure | Value |")
    print("|---|---|")
    print(f"| tokens compared | {found.num_tokens} |")
    print(f"| same most likely token | {100 * found.num_same_best / found.num_tokens:.2f} % |")
    print(f"| mean difference of a token's log-probability | {found.mean_difference:.4f} |")
    print(f"| perplexity, truth and other | {found.perplexities[0]:.4f}, {found.perplexities[1]:.4f} |")
    print(f"| same greedy answers | {found.num_same_answers} of {found.num_answers} |")


if __name__ == "__main__":
    main()
