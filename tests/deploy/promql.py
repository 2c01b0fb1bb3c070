"""Metrics and labels that a PromQL expression reads: enough of the language for ours, and strict about it.

Owns: tokens, selectors, label lists. A word that is neither a known function or operator nor a label counts
as a metric, so that a misspelt function is noticed too.
Never: evaluates anything.
Source: the grammar in Prometheus' documentation of its query language.
"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")
      |(?P<range>\[[^\]]*\])
      |(?P<word>[a-zA-Z_:][a-zA-Z0-9_:]*)
      |(?P<number>[0-9.]+)
      |(?P<mark>=~|!~|!=|==|>=|<=|[=<>+\-*/%^(){},])
      |(?P<space>\s+)""",
    re.VERBOSE,
)
_FUNCTIONS = frozenset(
    {"avg", "changes", "count", "histogram_quantile", "increase", "max", "min", "rate", "sum", "vector"}
)
_OPERATORS = frozenset({"and", "or", "unless"})
_LABEL_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})


@dataclass(frozen=True)
class Selector:
    metric: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    """Label, operator, value."""


@dataclass
class Reads:
    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    """Labels that the expression groups or joins by."""


def read(expression: str) -> Reads:
    """Raises ValueError for what is not understood."""
    tokens = _tokens(expression)
    found = Reads()
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind != "word" or text in _OPERATORS or text in _FUNCTIONS:
            continue
        if text in _LABEL_LISTS:
            if following == "(":
                end = _close(tokens, place, ")")
                found.labels |= {word for kind, word in tokens[place:end] if kind == "word"}
                place = end + 1
            continue
        matchers: tuple[tuple[str, str, str], ...] = ()
        if following == "{":
            end = _close(tokens, place, "}")
            matchers = _matchers(tokens[place + 1 : end])
            place = end + 1
        elif following == "(":
            raise ValueError(f"unknown function {text}")
        found.selectors.append(Selector(text, matchers))
    return found


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, place = [], 0
    while place < len(expression):
        match = _TOKEN.match(expression, place)
        if match is None:
            raise ValueError(f"not understood: {expression[place : place + 20]!r}")
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match.group()))
        place = match.end()
    if [text for _, text in tokens].count("(") != [text for _, text in tokens].count(")"):
        raise ValueError("unbalanced parentheses")
    return tokens


def _close(tokens: list[tuple[str, str]], start: int, mark: str) -> int:
    return next(place for place in range(start, len(tokens)) if tokens[place][1] == mark)


def _matchers(tokens: list[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    words = [token for token in tokens if token[1] != ","]
    if len(words) % 3:
        raise ValueError(f"not label matchers: {words}")
    return tuple(
        (words[place][1], words[place + 1][1], words[place + 2][1][1:-1]) for place in range(0, len(words), 3)
    )
