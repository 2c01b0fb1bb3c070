"""Expressions of checkpoints: the matches of Python's search, in steps that are bounded."""

import re

import pytest

from server.reply.response_templates.expressions import ExpressionError, of_expression
from server.reply.response_templates.searches import (
    MAX_PROMPT_STEPS,
    Search,
    SearchSteps,
    TooManySteps,
    all_matches,
)

MANY = 400_000
TEXTS = (
    "",
    "abc",
    "aabbcc <tool_call>\n<function=f>x",
    "<think>\n hm</think>",
    "k=v; key=a b;=;",
    "aaab\n",
    "Ünï 1٣_x",
)
EXPRESSIONS = (
    r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    r"(?:^|<think>\s*)",
    r"(?P<key>\w+)=(?P<value>.*?);",
    r"a{2}|(?P<x>a+?)b",
    r"(a|ab)(c|bcd)?(?P<x>d*)",
    r"x*",
    r"[^\w\s]+|\d",
    r"c\Z|b$",
    r"\A[a-c\]]{1,2}",
    r"(?:a*)*b?",
    r"(?:a??b?|c)?",
    r"\x61+",
    r"{a|a{0,1}b",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_first_match_is_that_of_python(expression) -> None:
    for text in TEXTS:
        wanted = re.search(expression, text.rstrip("\n"), re.DOTALL)
        found = all_matches(of_expression(expression), text.rstrip("\n"), SearchSteps(MAX_PROMPT_STEPS))
        if wanted is None:
            assert found == [], text
            continue
        assert (found[0].start, found[0].end) == wanted.span(), text
        assert found[0].groups == {
            name: wanted.span(name) for name in wanted.groupdict() if wanted[name] is not None
        }


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (r"a(?=b)", "a look ahead"),
        (r"(?<!a)b", "a look behind"),
        (r"(?P<x>a)(?P=x)", "a reference to a group"),
        (r"(a)\1", r"\1 is not read"),
        (r"a++", "possessive"),
        (r"(?>a)", "an atomic group"),
        (r"(?i)a", "flags"),
        (r"\bword\b", r"\b is not read"),
        (r"(?:(?:a)??)*", "prefers to be empty"),
        (r"(?:|a){2,3}", "prefers to be empty"),
        (r"(?:a?|b)+", "prefers to be empty"),
        (r"(a", "a ')' is missing"),
        (r"a)", "a ')' too many"),
        (r"[a", "too early"),
        (r"*a", "nothing stands before"),
        (r"a{2000}", "more than 1000 repeats"),
        (r"((a{100}){100}){100}", "more than 1000 steps"),
        (r"((((){1000}){1000}){1000}){1000}", "more than 1000 steps"),
        ("(" * 40 + ")" * 40, "nested"),
        ("a" * 2001, "at most 2000"),
    ],
)
def test_what_is_not_read_is_refused_by_name(expression, reason) -> None:
    with pytest.raises(ExpressionError, match=re.escape(reason)):
        of_expression(expression)


@pytest.mark.parametrize("expression", [r"(a+)+b", r"(a|a)*b", r"(a*)*(a*)*b", r"(.*)(.*)(.*)x"])
def test_an_expression_that_would_backtrack_for_ever_does_not(expression) -> None:
    assert all_matches(of_expression(expression), "a" * 5_000, SearchSteps(MANY)) == []


@pytest.mark.parametrize("expression", [r"(?:a?){300}a{300}", r"(?:a|b|ab){1,100}c"])
def test_many_ways_at_once_end_the_search(expression) -> None:
    with pytest.raises(TooManySteps):
        all_matches(of_expression(expression), "ab" * 5_000, SearchSteps(MANY))


def test_a_match_is_certain_as_soon_as_no_better_one_can_come() -> None:
    search = Search(of_expression(r"</f>\s*</t>"), SearchSteps())
    for place, char in enumerate("x</f>\n</t"):
        search.push(char, place)
    assert (search.match, search.begins_at) == (None, 1)
    search.push(">", 9)
    assert search.match is not None
    assert search.match.end == 10
