"""Calls of MiniMax M3: elements that are named after their keys, with others within them."""

import json
import re

import pytest

from server.reply.reading.dialects import find_dialect
from server.reply.reading.element_calls import NAMESPACE
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase
from server.reply.reading.whole_calls import MAX_CALL_CHARS
from tests.server.reply.reading.joined_replies import joined_reply

NESTED = {
    "$defs": {"Stop": {"properties": {"name": {"type": "string"}, "at": {"type": "integer"}}}},
    "properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}},
        "codes": {"items": {"type": "string"}},
        "where": {"properties": {"zip": {"type": "string"}}},
        "order": {"type": "object", "properties": {"item": {"type": "string"}}},
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
        "sizes": {"type": ["array", "null"], "items": {"type": "string"}},
    },
}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("<codes><item>1</item><item>2</item></codes>", {"codes": ["1", "2"]}),
        ("<where><zip>53111</zip><floor>2</floor></where>", {"where": {"zip": "53111", "floor": 2}}),
        (
            "<stops><item><name>7</name><at>8</at></item><item><at>9</at></item></stops>",
            {"stops": [{"name": "7", "at": 8}, {"at": 9}]},
        ),
        ("<stops>[]</stops><a>b < c</a>", {"stops": [], "a": "b < c"}),
        ("<where><zip>1</where><codes>", {"where": {"zip": "1"}, "codes": ""}),
        ("</no><a>1</a><a>2</a><b>3</b><a>4</a>", {"a": [1, 2, 4], "b": 3}),
        ("<codes><item>1</item></codes><codes><item>2</item></codes>", {"codes": ["1", "2"]}),
        ("<where><zip>1</zip></where><where><zip>2</zip></where>", {"where": [{"zip": "1"}, {"zip": "2"}]}),
        ("<where>by <zip>1</zip>it</where>", {"where": {"zip": "1", "$text": "by it"}}),
        ("<where>by<$text>1</$text></where>", {"where": {"$text": 1, "$$text": "by"}}),
        ("<stops><item><at>1</at></item>end</stops>", {"stops": [{"at": 1}, "end"]}),
        (
            "<grid><item><item>1</item><item>2</item></item><item><item>3</item></item></grid><a>4</a>",
            {"grid": [[1, 2], [3]], "a": 4},
        ),
        ("<b><b><c>1</c></b><d>2</d></b>", {"b": {"b": {"c": 1}, "d": 2}}),
        ("<env><PORT>80</PORT></env><floor>2</floor>", {"env": {"PORT": "80"}, "floor": 2}),
        ("<order><item>7</item></order>", {"order": {"item": "7"}}),
        ("<sizes><size>1</size><size>2</size></sizes>", {"sizes": ["1", "2"]}),
        ("<sizes>\n</sizes><order></order><a></a>", {"sizes": [], "order": {}, "a": ""}),
    ],
)
def test_elements_within_elements_are_objects_and_lists(written, meant) -> None:
    marked = re.sub(r"</?[\w$]+>", lambda tag: NAMESPACE + tag[0], f"{written}</invoke>")
    text = f'{NAMESPACE}<invoke name="get_weather">{marked}'
    reader = ReplyReader(find_dialect("minimax_m3", "").row, {"get_weather": NESTED}, Phase.ANSWER)
    assert json.loads(joined_reply(reader, list(text)).calls[0][1]) == meant


def test_brackets_around_a_value_count_with_those_within_it() -> None:
    """Arguments that were deeper would be refused when they come back as an object."""
    tags = [f"{NAMESPACE}<a>" for _ in range(40)]
    text = f'{NAMESPACE}<invoke name="now">{"".join(tags)}{"[" * 40}{"]" * 40}{NAMESPACE}</invoke>'
    reader = ReplyReader(find_dialect("minimax_m3", "").row, {"now": {}}, Phase.ANSWER)
    value = json.loads(joined_reply(reader, [text]).calls[0][1])
    while isinstance(value, dict):
        value = value["a"]
    assert value == "[" * 40 + "]" * 40


def test_text_between_the_arguments_is_content_behind_the_call() -> None:
    text = f"As asked:{NAMESPACE}<a>1{NAMESPACE}</a> so{NAMESPACE}</invoke>\n{NAMESPACE}</tool_call>Done"
    row = find_dialect("minimax_m3", "").row
    for pieces in ([text], list(text)):
        reader = ReplyReader(row, {"now": {}}, Phase.ANSWER)
        reply = joined_reply(reader, [f'{NAMESPACE}<invoke name="now">', *pieces])
        assert (reply.calls, reply.content) == ([("now", '{"a": 1}')], "As asked: so\nDone")


def test_elements_of_one_name_within_each_other_end_where_the_brackets_do() -> None:
    tags = f"{NAMESPACE}<a>1{NAMESPACE}</a>{NAMESPACE}<a>" * 60
    text = f'{NAMESPACE}<invoke name="now">{tags}{NAMESPACE}</invoke>'
    reader = ReplyReader(find_dialect("minimax_m3", "").row, {"now": {}}, Phase.ANSWER)
    ((_, arguments),) = joined_reply(reader, [text]).calls
    json.loads(arguments)
    assert arguments.count("[") + arguments.count("{") <= 64


def test_a_long_call_whose_name_has_been_sent_is_read_to_its_end() -> None:
    text = f'{NAMESPACE}<invoke name="now">{NAMESPACE}<a>{"b" * MAX_CALL_CHARS}{NAMESPACE}</invoke>'
    reader = ReplyReader(find_dialect("minimax_m3", "").row, {"now": {}}, Phase.ANSWER)
    reply = joined_reply(reader, [text[:99], text[99:]])
    assert [json.loads(arguments) for _, arguments in reply.calls] == [{"a": "b" * MAX_CALL_CHARS}]
