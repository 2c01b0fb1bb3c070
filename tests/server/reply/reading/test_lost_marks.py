"""Golden replies with a mark that is missing or stands twice: valid JSON, and no value of anything else."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from server.reply.reading.dialects import find_dialect
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase, Row
from server.reply.reading.template_rows import template_row
from tests.server.reply.reading.joined_replies import JoinedReply, joined_reply
from tests.server.reply.reading.templates import TEMPLATES
from tests.server.reply.reading.test_template_rows import GOLDEN as GOLDEN_OF_TEMPLATES
from tests.server.reply.reading.test_tool_dialects import BONN, GOLDEN, TOOLS

Case = tuple[str, Row, Phase, str]
CASES: list[Case] = [(name, find_dialect(name, "").row, Phase.ANSWER, text) for name, text, _ in GOLDEN] + [
    (name, template_row(TEMPLATES[name]), Phase.POSSIBLE, text)
    for name, _, text, wanted in GOLDEN_OF_TEMPLATES
    if wanted[2]
]


PYTHON = {"a": "xy", "b": "it's", "c": [1, 16, 10, 0.5, 5.0, 1]}
GEMMA = '{"a": ["New York", "Berlin"], "b c": 1}'


def inner_marks(row: Row) -> set[str]:
    """Marks of a row, also those that are looked for in one state only; brackets of JSON are none."""
    call = row.call
    assert call is not None
    ends = call.head.ends if call.head is not None else ()
    return {*row.marks, *ends, getattr(call.body, "key_end", "")} - {"", "{", "\n", ">"}


def broken(row: Row, text: str) -> Iterator[str]:
    for mark in sorted(inner_marks(row)):
        at = text.find(mark)
        while at != -1:
            yield text[:at] + text[at + len(mark) :]
            at = text.find(mark, at + 1)


def doubled(row: Row, text: str) -> Iterator[str]:
    for mark in sorted(inner_marks(row)):
        at = text.find(mark)
        while at != -1:
            yield text[:at] + mark + text[at:]
            at = text.find(mark, at + 1)


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def check(reply: JoinedReply, text: str, *, values: bool) -> None:
    for name, arguments in reply.calls:
        read = json.loads(arguments)
        if values and name.startswith("get_weather"):
            assert {key: BONN.get(key, value) for key, value in read.items()} == read, text
        if values and name == "now":
            assert read == {}, text


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{name}" for place, (name, *_) in enumerate(CASES)])
def test_a_mark_that_is_missing_breaks_no_json_and_moves_no_value(case: Case) -> None:
    _, row, start, text = case
    for one in broken(row, text):
        check(joined_reply(ReplyReader(row, TOOLS, start), [one]), one, values=case[0] != "lines")


WITHOUT_MARKS, HEADS_OF_MANY_WORDS = {"json"}, {"deepseek", "kimi_k2", "mistral", "harmony"}
WITH_WORDS = [golden for golden in GOLDEN if golden[0] not in WITHOUT_MARKS | HEADS_OF_MANY_WORDS]


@pytest.mark.parametrize(
    ("dialect", "text", "content"), WITH_WORDS, ids=[f"{at}-{each[0]}" for at, each in enumerate(WITH_WORDS)]
)
def test_a_word_before_or_behind_any_mark_is_in_the_reply_somewhere(dialect, text, content) -> None:
    row = find_dialect(dialect, "").row
    marks = re.compile("|".join(map(re.escape, sorted(inner_marks(row), key=len, reverse=True))))
    for place in {end for found in marks.finditer(text) for end in found.span()}:
        one = f"{text[:place]} Zzz {text[place:]}"
        reply = joined_reply(ReplyReader(row, TOOLS, Phase.ANSWER), [one])
        assert "Zzz" in reply.content + str(reply.calls), one
        assert joined_reply(ReplyReader(row, TOOLS, Phase.ANSWER), one) == reply
        check(reply, one, values=False)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"a": "\d+ \\ \" \u00e9 C:\Users"}', {"a": '\\d+ \\ " é C:\\Users'}),
        ('{"n": 12', {"n": 12}),
        (
            "{'a': 'it\\'s \"x, y\" ', \"b\": True, 'c d': ['e', None]}",
            {"a": 'it\'s "x, y" ', "b": True, "c d": ["e", None]},
        ),
        ('{"n":\u2028[1\x0b]}', {"n": [1]}),
        ('{"n": [1, true', {"n": [1, True]}),
        (r"{'a': '\xe9 \x1b \U0001F600 \0 \x4'}", {"a": "é \x1b \U0001f600 \0 \\x4"}),
        ("{'a': 'x' 'y'}}</tool_call>", {"a": "x"}),
        ('{"a": "x"\n "b": 1}', {"a": "x", "b": 1}),
        (
            '{"a": """x "y"\n\\nz""", "b": \'\'\'it\'s\'\'\', "c": ""}',
            {"a": 'x "y"\n\nz', "b": "it's", "c": ""},
        ),
        (json.dumps("{'a': 'x' 'y', 'b': '''it's''', 'c': (1, 0x10, 1_0, .5, 5., +1)}"), PYTHON),
        (json.dumps("{'a': 'x' 'y', 'b': [}"), "{'a': 'x' 'y', 'b': [}"),
        (json.dumps(r"{'a': '\xe9\U0001F600\0'}"), {"a": "é\U0001f600\0"}),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 99])
def test_arguments_that_are_not_quite_json_are_made_it(written: str, arguments: dict, size: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + written
    reply = joined_reply(ReplyReader(find_dialect("hermes", "").row, {}, Phase.ANSWER), cut(text, size))
    ((name, read),) = reply.calls
    assert (name, json.loads(read), reply.content) == ("f", arguments, "")


@pytest.mark.parametrize(
    ("dialect", "text", "arguments"),
    [
        ("qwen3_coder", "<function=f>{<parameter=city>\nBonn\n</parameter></function>", '{"city": "Bonn"}'),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>B</tool_call>", '{"a": "B"}'),
        (
            "qwen3_coder",
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            '{"a": 1, "a": 2}',
        ),
        ("glm45", "<tool_call>f\n{ <arg_key>a</arg_key><arg_value>B</arg_value></tool_call>", '{"a": "B"}'),
        ("qwen3_coder", '<function=f>{"a": 1}<parameter=days>3</parameter></function>', '{"a": 1}'),
        ("qwen3_coder", '<function=f>{ "a": "B" "x" "y": 3} {"z": 1}</function>', '{ "a": "B" }'),
        ("qwen3_coder", "<function=f>{ }</function>", "{ }"),
        ("gemma4", "<|tool_call>call:f{a:[New York, Berlin], b c:1}<tool_call|>", GEMMA),
        ("gemma4", "<|tool_call>call:f{True:[1, true, [x y]]}<tool_call|>", '{"True": [1, true, ["x y"]]}'),
        ("pythonic", "[f(a='true', b=[null, 'x'])]", '{"a": "true", "b": [null, "x"]}'),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 999])
def test_signs_that_do_not_belong_lose_no_argument(dialect, text, arguments, size) -> None:
    reply = joined_reply(ReplyReader(find_dialect(dialect, "").row, {"f": {}}, Phase.ANSWER), cut(text, size))
    assert (reply.content, reply.calls) == ("", [("f", arguments)])


def test_keys_that_are_the_same_in_json_make_no_call() -> None:
    for text, calls in (("[f(a={1: 2, '1': 3})]", []), ("[f(a={1: 2})]", [("f", '{"a": {"1": 2}}')])):
        reply = joined_reply(ReplyReader(find_dialect("pythonic", "").row, {"f": {}}, Phase.ANSWER), [text])
        assert reply.calls == calls


@pytest.mark.parametrize(
    ("dialect", "opening", "closing"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("qwen3_coder", "<function=f>", "</function> Hi"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 9999])
def test_what_is_nested_too_deep_is_dropped_and_open_at_a_limit(dialect, opening, closing, size) -> None:
    text, row = opening + '{"a": ' * 300 + "1" + "}" * 300, find_dialect(dialect, "").row
    ended = joined_reply(ReplyReader(row, {"f": {}}, Phase.ANSWER), cut(text + closing, size))
    assert ended.calls == [("f", '{"a": ' * 63 + "{" + "}" * 64)]
    assert ended.content == closing.partition(" ")[2]
    limited = joined_reply(ReplyReader(row, {"f": {}}, Phase.ANSWER), cut(text, size), is_cut=True)
    assert (limited.calls, limited.content) == ([("f", '{"a": ' * 63 + "{")], "")


def test_white_space_in_a_call_of_braces_is_read_in_linear_time() -> None:
    row = find_dialect("gemma4", "").row
    for num_chars in (1000, 200_000):
        began_s = time.process_time()
        joined_reply(ReplyReader(row, {}, Phase.ANSWER), ["<|tool_call>" + " " * num_chars])
        assert time.process_time() - began_s < 1.0  # 200,000 took minutes


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{name}" for place, (name, *_) in enumerate(CASES)])
def test_a_mark_that_stands_twice_breaks_no_json(case: Case) -> None:
    _, row, start, text = case
    for one in doubled(row, text):
        check(joined_reply(ReplyReader(row, TOOLS, start), [one]), one, values=False)


@pytest.mark.night
@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{name}" for place, (name, *_) in enumerate(CASES)])
def test_a_broken_reply_is_the_same_however_it_is_cut(case: Case) -> None:
    _, row, start, text = case
    for one in (*broken(row, text), *doubled(row, text)):
        whole = joined_reply(ReplyReader(row, TOOLS, start), [one])
        assert joined_reply(ReplyReader(row, TOOLS, start), one) == whole, one
        for at in range(1, len(one), 3):
            assert joined_reply(ReplyReader(row, TOOLS, start), [one[:at], one[at:]]) == whole, (one, at)


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{name}" for place, (name, *_) in enumerate(CASES)])
def test_arguments_are_json_wherever_the_model_ends_its_reply(case: Case) -> None:
    _, row, start, text = case
    for end in range(len(text)):
        whole = joined_reply(ReplyReader(row, TOOLS, start), [text[:end]])
        for name, arguments in whole.calls:
            assert name in TOOLS
            json.loads(arguments)
        if end % 16 == 0:
            assert joined_reply(ReplyReader(row, TOOLS, start), text[:end]) == whole, text[:end]
