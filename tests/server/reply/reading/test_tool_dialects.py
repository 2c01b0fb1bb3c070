"""Replies as each family of models writes them: whole, and cut in every place."""

import codecs
import json
import re
from itertools import pairwise

import orjson
import pytest

from server.reply.reading.argument_values import ArgumentTypes
from server.reply.reading.dialects import DIALECTS, find_dialect
from server.reply.reading.element_calls import NAMESPACE
from server.reply.reading.events import Arguments, CallStart, Content, Event
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase
from tests.server.reply.reading.joined_replies import joined_reply

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detail": {"type": ["string", "null"]},
            "units": {"enum": ["C", "F"]},
            "at": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
BONN = {"city": 'Bonn "am\nRhein" 🚂', "days": 3}
BONN_JSON = json.dumps(BONN, ensure_ascii=False)
WEATHER_AND_TIME = [("get_weather", BONN), ("now", {})]

GOLDEN = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": ' + BONN_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me look.",
    ),
    (
        "qwen3_coder",
        "<function=get_weather>" + BONN_JSON + "</function><function=now>{}</function>",
        "",
    ),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": ' + BONN_JSON + '}; {"name": "now", "parameters": {}}',
        "",
    ),
    (
        "llama4_json",
        'Look: <|python_start|>{"name": "get_weather", "parameters": ' + BONN_JSON + "}<|python_end|>"
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>',
        "Look:",
    ),
    (
        "mistral",
        "[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]" + BONN_JSON + "[TOOL_CALLS]now[ARGS]{}",
        "",
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": ' + BONN_JSON + '}, {"name": "now"}]',
        "",
    ),
    (
        "phi4",
        'functools[{"name": "get_weather", "arguments": '
        + BONN_JSON
        + '}, {"name": "now", "arguments": {}}]',
        "",
    ),
    (
        "phi4",
        '<|tool_call|>[{"name": "get_weather", "arguments": ' + BONN_JSON + '}, {"name": "now"}]'
        "<|/tool_call|>",
        "",
    ),
    (
        "json",
        '[{"name": "get_weather", "arguments": ' + BONN_JSON + '}, {"name": "now", "arguments": {}}]',
        "",
    ),
    (
        "deepseek",
        "I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        + BONN_JSON
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look it up.",
    ),
    (
        "deepseek",
        "I look it up.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        + BONN_JSON
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "I look it up.",
    ),
    (
        "kimi_k2",
        "Well.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        "<|tool_call_argument_begin|>" + BONN_JSON + "<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "Well.",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        + BONN_JSON
        + "<|call|><|channel|>commentary to=functions.now<|message|>{}<|call|>",
        "",
    ),
    (
        "qwen3_coder",
        'Let me look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn "am\nRhein" 🚂\n'
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        "Let me look.",
    ),
    (
        "qwen3_coder",
        '<seed:tool_call><function=get_weather><parameter=city>Bonn "am\nRhein" 🚂</parameter>'
        "<parameter=days>3</parameter></function></seed:tool_call><function=now></function>",
        "",
    ),
    (
        "glm45",
        "I see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Bonn "am\nRhein" 🚂</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I see.",
    ),
    (
        "glm45",
        '<tool_call>get_weather<arg_key>city</arg_key><arg_value>Bonn "am\nRhein" 🚂</arg_value>'
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "",
    ),
    (
        "minimax_m2",
        'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bonn "am\nRhein" 🚂'
        '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "Hm.",
    ),
    (
        "glm45",
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        '<arg_value>Bonn "am\nRhein" 🚂</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now<tool_sep></tool_call>\n</tool_calls>",
        "",
    ),
    (
        "minimax_m3",
        f'So.\n{NAMESPACE}<tool_call>\n{NAMESPACE}<invoke name="get_weather">{NAMESPACE}<city>'
        f'Bonn "am\nRhein" 🚂{NAMESPACE}</city>{NAMESPACE}<days>3{NAMESPACE}</days>{NAMESPACE}</invoke>\n'
        f'{NAMESPACE}<invoke name="now">{NAMESPACE}</invoke>\n{NAMESPACE}</tool_call>',
        "So.",
    ),
    (
        "minicpm5",
        'Well. <function name="get_weather"><param name="city">Bonn "am\nRhein" 🚂</param>'
        '<param name="days">3</param></function>\n<function name="now"></function>',
        "Well.",
    ),
    *(
        (
            "deepseek_v32",
            f'So.\n\n<｜DSML｜{word}>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
            'string="true">Bonn "am\nRhein" 🚂</｜DSML｜parameter>\n<｜DSML｜parameter name="days" '
            'string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n'
            f"</｜DSML｜invoke>\n</｜DSML｜{word}>",
            "So.",
        )
        for word in ("function_calls", "tool_calls")
    ),
    *(
        (
            dialect,
            f'Look.{begin}[{{"name": "get_weather", "arguments": {BONN_JSON}}}, '
            f'{{"name": "now", "arguments": {{}}}}]{end}',
            "Look.",
        )
        for dialect, begin, end in (
            ("hunyuan", "\n<tool_calls>\n", "\n</tool_calls>"),
            ("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
            ("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
            ("internlm", "<|action_start|><|plugin|>\n", "<|action_end|>"),
        )
    ),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + BONN_JSON
        + '},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
    ),
    (
        "pythonic",
        r"""[get_weather(city='Bonn "am\nRhein" 🚂', days=3), now()]""",
        "",
    ),
    (
        "pythonic",
        r"""So: <|python_start|>[get_weather(city='Bonn "am\nRhein" 🚂', days=3), now()]<|python_end|>""",
        "So:",
    ),
    (
        "lfm2",
        r"""One moment. <|tool_call_start|>[get_weather(city='Bonn "am\nRhein" 🚂', days=3), now()]"""
        "<|tool_call_end|>",
        "One moment.",
    ),
    (
        "olmo3",
        r"""<function_calls>get_weather(city='Bonn "am\nRhein" 🚂', days=3)""" + "\nnow()</function_calls>",
        "",
    ),
    (
        "gemma4",
        'Yes.<|tool_call>call:get_weather{city:<|"|>Bonn "am\nRhein" 🚂<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "Yes.",
    ),
    (
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>Bonn "am\nRhein" 🚂<escape>,days:3}'
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
        "",
    ),
]


def reader_of(dialect: str) -> ReplyReader:
    found = find_dialect(dialect, "")
    assert found is not None
    return ReplyReader(found.row, TOOLS, Phase.ANSWER)


def read(dialect: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, joined as a client joins them."""
    parser = reader_of(dialect)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = calls[event.index]
            calls[event.index] = (name, arguments + event.text)
    return "".join(event.text for event in events if isinstance(event, Content)), calls


def parsed(calls: list[tuple[str, str]]) -> list[tuple[str, dict]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("dialect", "text", "content"), GOLDEN)
def test_a_familys_calls_are_read_however_the_text_is_cut(dialect, text, content) -> None:
    whole = read(dialect, text)
    assert (whole[0], parsed(whole[1])) == (content, WEATHER_AND_TIME)
    assert read(dialect, *text) == whole
    for cut in range(1, len(text)):
        assert read(dialect, text[:cut], text[cut:]) == whole


QUOTED = [(*row, "'") for row in GOLDEN if 'name="' in row[1]]
QUOTED += [(*row, "") for *row, _ in QUOTED if row[0] != "minimax_m3"]


@pytest.mark.parametrize(("dialect", "text", "content", "quote"), QUOTED)
def test_names_stand_in_quotes_of_either_kind_or_in_none(dialect, text, content, quote) -> None:
    other = re.sub(r'(name|string)="([^"]*)"', rf"\1={quote}\2{quote}", text)
    assert other != text
    whole = read(dialect, other)
    assert (whole[0], parsed(whole[1])) == (content, WEATHER_AND_TIME)
    assert read(dialect, *other) == whole


@pytest.mark.parametrize(("dialect", "text", "content"), GOLDEN)
def test_a_familys_calls_are_read_from_tokens_that_end_at_any_byte(dialect, text, content) -> None:
    """Cut as the detokenizer hands tokens on: a character that is not whole waits for its last byte."""
    data, whole = text.encode(), read(dialect, text)
    for cuts in (range(1, len(data)), *((cut,) for cut in range(1, len(data)))):
        decoder = codecs.getincrementaldecoder("utf-8")()
        ends = [*cuts, len(data)]
        pieces = [decoder.decode(data[begin:end]) for begin, end in pairwise([0, *ends])]
        assert read(dialect, *pieces) == whole


@pytest.mark.parametrize(("dialect", "text", "content"), GOLDEN)
def test_a_reply_that_breaks_off_raises_nothing_and_never_grows_a_call(dialect, text, content) -> None:
    for end in range(len(text)):
        _, calls = read(dialect, text[:end])
        assert [name for name, _ in calls] in ([], ["get_weather"], ["get_weather", "now"])


def test_every_dialect_has_a_golden_text() -> None:
    assert {dialect for dialect, _, _ in GOLDEN} == {row.name for row in DIALECTS}


@pytest.mark.parametrize("row", [row for row in DIALECTS if row.found_by], ids=lambda row: row.name)
def test_auto_finds_a_dialect_by_each_of_its_signs(row) -> None:
    for sign in row.found_by:
        assert find_dialect("auto", f"{{% if tools %}}{sign}{{% endif %}}") is row


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("qwen3_coder", "a < b <tool_call> and <function oops"),
        ("qwen3_coder", "<function=two words></function>"),
        ("glm45", "<tool_call>two words\n"),
        ("deepseek", "<｜tool▁call▁begin｜>nothing<｜tool▁call▁end｜> and on"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[link](https://example.org)"),
        ("pythonic", "[unheard_of(a=1)]"),
        ("pythonic", "[now(1)]"),
        ("pythonic", "[now(a=open('x'))]"),
        ("lfm2", "<|tool_call_start|>now(<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:now{a<tool_call|>"),
        ("gemma4", "<|tool_call>call:now"),
    ],
)
def test_a_text_that_is_no_call_stays_in_the_content(dialect, text) -> None:
    assert read(dialect, text) == (text, [])


def coder(**arguments: str) -> str:
    tags = (f"<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items())
    return "<function=get_weather>" + "".join(tags) + "</function>"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"days": "3"}, {"days": 3}),
        ({"days": "many"}, {"days": "many"}),
        ({"city": "3"}, {"city": "3"}),
        ({"city": "true"}, {"city": "true"}),
        ({"city": "\n a\\b\t\n"}, {"city": "\n a\\b\t\n"}),
        ({"detail": "None"}, {"detail": None}),
        ({"detail": "12"}, {"detail": "12"}),
        ({"units": "C"}, {"units": "C"}),
        ({"at": '{"x": [1, 2]}'}, {"at": {"x": [1, 2]}}),
        ({"at": "{broken"}, {"at": "{broken"}),
        ({"unknown": "[1]"}, {"unknown": [1]}),
        ({"unknown": "plain"}, {"unknown": "plain"}),
        ({"days": "1e999"}, {"days": "1e999"}),
        ({"at": '{"x": "\\ud800"}'}, {"at": '{"x": "\\ud800"}'}),
    ],
)
def test_a_value_in_tags_gets_the_type_of_its_schema_if_it_fits(written, meant) -> None:
    assert parsed(read("qwen3_coder", coder(**written))[1]) == [("get_weather", meant)]


PARTS = {
    "$defs": {"Place": {"type": "object"}, "Code": {"enum": ["7", "8"]}, "Loop": {"$ref": "#/$defs/Loop"}},
    "anyOf": [
        {"properties": {"place": {"allOf": [{"$ref": "#/$defs/Place"}]}, "id": {"type": "integer"}}},
        {"properties": {"id": {"type": "string"}, "code": {"$ref": "#/$defs/Code"}}},
        {"$ref": "#/$defs/Loop"},
    ],
    "properties": {"yes": {"const": "true"}, "on": {"anyOf": [{"type": "string"}, {"$ref": "#/no"}]}},
}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"place": '{"x": 1}'}, {"place": {"x": 1}}),
        ({"place": "{broken"}, {"place": "{broken"}),
        ({"id": "3"}, {"id": 3}),
        ({"id": "true"}, {"id": "true"}),
        ({"code": "7"}, {"code": "7"}),
        ({"yes": "true"}, {"yes": "true"}),
        ({"on": "1"}, {"on": "1"}),
    ],
)
def test_types_are_also_those_of_parts_and_references_of_a_schema(written, meant) -> None:
    reader = ReplyReader(find_dialect("qwen3_coder", "").row, {"get_weather": PARTS}, Phase.ANSWER)
    assert json.loads(joined_reply(reader, [coder(**written)]).calls[0][1]) == meant


def test_a_schema_whose_references_multiply_costs_no_more_than_its_first_parts() -> None:
    """Each of 100 parts refers to all of the next: followed one by one, more than there are atoms."""
    parts = {
        f"{n}": {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}, {"allOf": [{"$ref": f"#/$defs/{n + 1}"}]}]}
        for n in range(100)
    }
    types = ArgumentTypes({"$defs": parts, "properties": {"a": {"$ref": "#/$defs/0"}, "b": {"type": "null"}}})
    assert (types.of("a"), types.of("b")) == (frozenset(), {"null"})


def test_a_schema_that_refers_to_the_whole_of_itself_is_not_read_again_for_each_of_its_members() -> None:
    members = _Counted((f"{n}", {"$ref": "#"}) for n in range(1000))
    types = ArgumentTypes({"properties": members})
    assert types.within("3").within("4").of("5") == frozenset()
    assert members.num_read == 0


class _Counted(dict):
    """Counts how often it is read from end to end."""

    num_read = 0

    def items(self):
        self.num_read += 1
        return super().items()


@pytest.mark.parametrize(
    ("flag", "value", "meant"),
    [("true", "7", "7"), ("false", "7", 7), ("false", "seven", "seven"), ("", "7", 7)],
)
def test_a_flag_says_whether_a_value_is_a_text_where_no_schema_does(flag, value, meant) -> None:
    attribute = f' string="{flag}"' if flag else ""
    text = f'<｜DSML｜invoke name="now"><｜DSML｜parameter name="a"{attribute}>{value}</｜DSML｜parameter>'
    assert parsed(read("deepseek_v32", text + "</｜DSML｜invoke>")[1]) == [("now", {"a": meant})]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("<![CDATA[a < b]]>", "a < b"),
        ("<![CDATA[<param>x</param> ]] 1]]>", "<param>x</param> ]] 1"),
        ("a ]]>", "a ]]>"),
        ("7", "7"),
    ],
)
def test_a_value_of_minicpm_may_be_wrapped_as_in_xml(written, meant) -> None:
    """Its template wraps earlier values that have markup in them."""
    text = f'<function name="get_weather"><param name="city">{written}</param></function>'
    assert parsed(read("minicpm5", text)[1]) == [("get_weather", {"city": meant})]


def test_long_texts_in_tags_are_passed_on_as_they_come() -> None:
    parser = reader_of("qwen3_coder")
    parser.feed("<function=get_weather><parameter=city>\nBo")
    assert parser.feed('nn "') == [Arguments(0, 'nn \\"')]
    assert parser.is_inside_call


def test_kimis_own_ids_are_kept() -> None:
    parser = reader_of("kimi_k2")
    events = parser.feed("<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>")
    assert events[0] == CallStart(0, "now", "functions.now:7")


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"a": "\ud800\ude00 \ud800 \ude00"}',
        r'"{\"a\": \"\ud800\ude00 \ud800 \udeff\"}"',
        r'"{\"a\": \"\\ud800\\ude00 \\ud800 \\udeff\"}"',
    ],
)
def test_half_a_character_that_a_call_escapes_is_a_replacement_character(arguments) -> None:
    """Readers of JSON end at it: Anthropic's client does, in the middle of a stream."""
    text = '<tool_call>{"name": "now", "arguments": ' + arguments + "}</tool_call>"
    whole = read("hermes", text)
    assert orjson.loads(whole[1][0][1]) == {"a": "\U00010200 \ufffd \ufffd"}
    assert read("hermes", *text) == whole


def test_half_a_character_of_python_leaves_the_text_as_it_is() -> None:
    text = '[now(a="\\ud800")]'
    assert read("pythonic", text) == (text, [])
