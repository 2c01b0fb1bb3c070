"""However a text is cut, its readers find the same: no call, name, character or reasoning more or less."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.reply.reading.dialects import DIALECTS as DIALECT_ROWS
from server.reply.reading.dialects import THINK, find_dialect, named_row
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase, Row
from tests.server.reply.reading.joined_replies import JoinedReply, joined_reply

NAMES = {"look": {}, "f": {"properties": {"a": {"type": "string"}}}}
DIALECTS = ("hermes", "llama3_json", "mistral", "json")
ALL_DIALECTS = tuple(dialect.name for dialect in DIALECT_ROWS)

# What the parsers look for, whole and in halves, between what they must pass on.
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "</", "<|python_tag|>", "<|python", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "[TOOL", "<think>", "</think>", "</thi", '{"name": "f", "arguments": ', '"}'),
    *('{"name": "look", "parameters": {"a": [1, {"b": "}"}]}}', '{"arguments": {}, "name": "f"}'),
    *('{"name": "f"}', '"arguments": "{\\"a\\": 1}"', '{"a": "<', '\\"', "\\", '"', "{", "}", "[", "]", ","),
    *(
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
    ),
    *("</arg_value>", '<invoke name="f">', "<|tool_call>call:f{", '<|"|>', "<tool_call|>", "functools["),
    *(
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<｜tool▁call▁end｜>",
        "<|tool_call_begin|>functions.f:0",
        "<|tool_call_end|>",
    ),
    *(
        "<|channel|>commentary to=f<|message|>{",
        "<|call|>",
        "[f(a=",
        "'x')]",
        "<function_calls>",
        "</function_calls>",
    ),
    *(";", ":", " ", "\n", "f", "look", "Hello", "é😀", "null", "12", "\u2028"),
]


def texts_of(row: Row) -> st.SearchStrategy[str]:
    ends = () if row.call is None or row.call.head is None else row.call.head.ends
    fragment = st.sampled_from(FRAGMENTS) | st.sampled_from([*row.marks, *ends, " "]) | st.text(max_size=3)
    return st.lists(fragment, max_size=14).map("".join)


CUTS = st.lists(st.integers(0, 400), max_size=12)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[start:end] for start, end in pairwise(places)]


def row_of(dialect: str) -> Row:
    found = find_dialect(dialect, "")
    return named_row("f") if found is None else found.row


def reader_of(dialect: str) -> ReplyReader:
    return ReplyReader(row_of(dialect), NAMES, Phase.ANSWER)


def read(dialect: str, parts: list[str]) -> JoinedReply:
    return joined_reply(reader_of(dialect), parts)


@pytest.mark.parametrize("dialect", [*ALL_DIALECTS, "none"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_a_text_means_the_same_however_it_is_cut(dialect: str, data: st.DataObject, cuts: list[int]) -> None:
    row = row_of(dialect)
    row = row if row.thoughts is not None else replace(row, thoughts=THINK.thoughts)
    text = data.draw(texts_of(row))
    for start in (Phase.ANSWER, Phase.THOUGHT, Phase.POSSIBLE):
        whole = joined_reply(ReplyReader(row, NAMES, start), [text])
        for parts in (pieces(text, cuts), list(text)):
            assert joined_reply(ReplyReader(row, NAMES, start), parts) == whole


def test_a_sign_and_white_space_before_any_value_mean_the_same_however_they_are_cut() -> None:
    assert read("none", [": "]) == read("none", list(": "))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), cuts=CUTS)
def test_without_readers_a_text_stays_as_it_is(text: str, cuts: list[int]) -> None:
    assert joined_reply(ReplyReader(Row(), {}, Phase.ANSWER), pieces(text, cuts)).content == text


ARGUMENTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def written(dialect: str, calls: list[tuple[str, dict]]) -> str:
    """Text of the calls as the models write them."""
    key = "parameters" if dialect == "llama3_json" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    return {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "json": f"[{', '.join(objects)}]",
        "mistral_13": "".join(
            f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
        ),
    }[dialect]


@pytest.mark.parametrize("dialect", [*DIALECTS, "mistral_13"])
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, cuts=CUTS)
def test_calls_come_out_as_they_were_meant(
    dialect: str, calls: list[tuple[str, dict]], cuts: list[int]
) -> None:
    found = read(dialect.removesuffix("_13"), pieces(written(dialect, calls), cuts))
    assert found.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


SLOW = (
    *(
        "<function=",
        "<function=f><parameter=a>",
        "<tool_call>f\n<arg_key>",
        "[f(",
        "<function_calls>",
        "<|tool_call>{",
    ),
    *("<｜tool▁call▁begin｜>", "<|tool_call_begin|>functions.f:0{", "<|channel|>", "<tool_call>f"),
)


def num_lines(dialect: str, text: str) -> int:
    """Lines of Python that reading a text takes."""
    num, parser = 0, reader_of(dialect)

    def count(_frame: object, event: str, _value: object) -> object:
        nonlocal num
        num += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        parser.feed(text)
        parser.finish()
    finally:
        sys.settrace(before)
    return num


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_reading_takes_time_in_proportion_to_the_text(dialect: str) -> None:
    """Each of these would be slow if anything were looked at twice for each character."""
    for unit in ("<tool_call>{", "[TOOL_CALLS][", "{", "<", " ", '{"name": "f", "arguments": {"a": "', *SLOW):
        times = 400 // len(unit)
        assert num_lines(dialect, unit * 2 * times) < 2.2 * num_lines(dialect, unit * times) + 100, unit
        parser = reader_of(dialect)
        parser.feed(unit * (5000 // len(unit)))  # deeper than Python may call
        parser.finish()


class CountedText(str):
    """A text that counts the characters of its copies."""

    num_copied = 0

    def __getitem__(self, place: object) -> str:
        found = super().__getitem__(place)
        CountedText.num_copied += len(found)
        return found


@pytest.mark.parametrize("dialect", ALL_DIALECTS)
def test_a_long_piece_of_text_is_copied_a_few_times(dialect: str) -> None:
    for unit in ("[TOOL_CALLS][", "[", "{", "<", " ", '{"name": "f", "arguments": [', *SLOW):
        text = CountedText(unit + unit[-1] * 3000)
        CountedText.num_copied = 0
        reader_of(dialect).feed(text)
        assert CountedText.num_copied < 20 * len(text), unit
