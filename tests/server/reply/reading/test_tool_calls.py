"""Each dialect's parser: what it takes for a call, and what becomes of malformed ones."""

from dataclasses import replace

import pytest

from server.reply.reading.dialects import THINK, find_dialect, find_style, named_row
from server.reply.reading.events import Arguments, CallStart, Content, Event
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase
from tests.server.reply.reading.joined_replies import joined_reply

NAMES = {"f": {}, "g": {}}


def reader_of(dialect: str) -> ReplyReader:
    found = find_dialect(dialect, "")
    assert found is not None
    return ReplyReader(found.row, NAMES, Phase.ANSWER)


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of one call's arguments are one."""
    found: list[Event] = []
    for event in events:
        if found and isinstance(event, Arguments) and isinstance(found[-1], Arguments):
            event = Arguments(event.index, found.pop().text + event.text)
        found.append(event)
    return found


def read(dialect: str, text: str) -> list[Event]:
    parser = reader_of(dialect)
    events = joined(parser.feed(text) + parser.finish())
    texts = [event.text for event in events if isinstance(event, Content)]
    return [Content("".join(texts))] if len(texts) == len(events) else events


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [CallStart(index, name), Arguments(index, arguments)]


@pytest.mark.parametrize(
    ("dialect", "text", "events"),
    [
        (
            "hermes",
            'One moment.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}<y"}}\n</tool_call>\n'
            '<tool_call>{"name": "unheard_of"}</tool_call>\n',
            [Content("One moment."), *call(0, "f", '{"a": "x}<y"}'), *call(1, "unheard_of", "{}")],
        ),
        (
            "hermes",
            'Wait.\n<tool_call>{"name": "f"}</tool_call>\n\n<tool_call>{"name": "g"}</tool_call>\n Done.',
            [
                Content("Wait."),
                *call(0, "f", "{}"),
                *call(1, "g", "{}"),
                Content("\n\n Done."),
            ],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": null}</tool_call>'
            '<tool_call>{"arguments": null, "name": "g"}</tool_call>'
            '<tool_call>{"name": "g", "arguments": "null" }</tool_call>',
            [*call(0, "f", "{}"), *call(1, "g", "{}"), *call(2, "g", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": 12}</tool_call>', call(0, "f", "12")),
        (
            "hermes",
            '<tool_call>{"arguments": { "a":1 }, "name": "f"}</tool_call> Done.',
            [*call(0, "f", '{ "a":1 }'), Content("Done.")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
            call(0, "f", '{"a": 1}'),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": [tue}"}</tool_call>'
            '<tool_call>{"name": "g", "arguments": "no JSON"}</tool_call>',
            [*call(0, "f", '{"a": ["tue"]}'), *call(1, "g", '"no JSON"')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": " "}</tool_call>'
            '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}} "}</tool_call>',
            [*call(0, "f", "{}"), *call(1, "g", '{"a": 1}')],
        ),
        (
            "hermes",
            """<tool_call>{"arguments": " {'a': [True, {'b': 'it\\\\'s'}]}", "name": "f"}</tool_call>""",
            call(0, "f", """{"a": [true, {"b": "it's"}]}"""),
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        (
            "llama3_json",
            '{"type": "function", "name": "f", "parameters": {"a": 1}}',
            call(0, "f", '{"a": 1}'),
        ),
        (
            "llama3_json",
            'Look:<|python_tag|>{"name": "unheard_of", "parameters": {}}',
            [Content("Look:"), *call(0, "unheard_of", "{}")],
        ),
        (
            "mistral",
            'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            [Content("Well"), *call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": [1]}[TOOL_CALLS]g{"b": "]}"}',
            [*call(0, "f", '{"a": [1]}'), *call(1, "g", '{"b": "]}"}')],
        ),
        (
            "json",
            '[{"name": "f", "parameters": {"a": 1}},\n {"name": "g", "arguments": {}}]',
            [*call(0, "f", '{"a": 1}'), *call(1, "g", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "city": "Bonn", "type": "function", "n": [1]}</tool_call>',
            call(0, "f", '{"city": "Bonn", "n": [1]}'),
        ),
        (
            "qwen3_coder",
            "<function=f>\nAs asked: <parameter=a>1</parameter></function> Bye",
            [*call(0, "f", '{"a": 1}'), Content("As asked:  Bye")],
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.f<|message|>{} I hope<|call|>",
            [*call(0, "f", "{}"), Content("I hope")],
        ),
    ],
)
def test_calls_are_found(dialect, text, events) -> None:
    assert read(dialect, text) == events


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", "a < b </tool_call> <tool"),
        ("hermes", "<tool_call>oops</tool_call> and on"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f"'),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\n<function=f>"),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),
        ("llama3_json", '{"name": "f", "age": 36}'),
        ("llama3_json", '{"name": "f"}'),
        ("llama3_json", '{"name": "f", "parameters": 5}'),
        ("llama3_json", 'Like this: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>search.call(query="x")'),
        ("mistral", "[TOOL_CALLS]f says hello"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS] \n[1, 2]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("mistral", "[TOOL"),
        ("json", "[1, 2] is a list"),
        ("json", '{"answer": 42}'),
        ("json", 'Sure: {"name": "f", "arguments": {}}'),
        ("json", "  two spaces at both ends  "),
    ],
)
def test_what_is_no_call_after_all_stays_in_the_text(dialect, text) -> None:
    assert read(dialect, text) == [Content(text)]


@pytest.mark.parametrize(
    ("dialect", "text", "events"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', call(0, "f", '{"a": [1]}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a', call(0, "f", "{}")),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b', call(0, "f", '{"a": "b"}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', call(0, "f", '{"a": 1}')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', call(0, "f", '{"a": 1}')),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}} I hope.</tool_call>',
            [*call(0, "f", "{}"), Content("I hope.</tool_call>")],
        ),
        (
            "llama3_json",
            '{"name": "f", "parameters": {}} is what I would call',
            [*call(0, "f", "{}"), Content("is what I would call")],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', call(0, "f", "{}")),
        ("json", '[{"name": "f", "arguments": {"a": "', call(0, "f", '{"a": ""}')),
        ("json", '[{"name": "f", "arguments": {"a": "b\\u00', call(0, "f", '{"a": "b"}')),
        (
            "hermes",
            '<tool_call>{"name": " f\\n"}, {"name": "g", "argu',
            [*call(0, "f", "{}"), Content('{"name": "g", "argu')],
        ),
        ("hermes", '<tool_call>[{"name": "f"}]\n', call(0, "f", "{}")),
        ("qwen3_coder", "<function=f><parameter=a>12", call(0, "f", '{"a": 12}')),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": ["b\\', call(0, "f", '{"a": ["b"]}')),
    ],
)
def test_a_call_that_has_begun_is_closed_where_the_model_ends_its_reply(dialect, text, events) -> None:
    assert read(dialect, text) == events


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('I look.<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>', ("", "I look.", [("f", "{}")])),
        ("Hi<|END_RESPONSE|>", ("", "Hi", [])),
        ("<|START_THINKING|>Hm<|END_THINKING|>\nYes.", ("Hm", "Yes.", [])),
        (
            "Well<|START_THINKING|>Hm<|END_THINKING|>, so<|START_RESPONSE|>.<|END_RESPONSE|>\n",
            ("Hm", "Well.", []),
        ),
    ],
)
def test_text_before_the_first_mark_of_an_answer_is_content_too(text, found) -> None:
    style = find_style("cohere", "", {})
    row = replace(find_dialect("cohere", "").row, thoughts=style.thoughts, answer=style.answer)
    for pieces in ([text], list(text)):
        reply = joined_reply(ReplyReader(row, NAMES, Phase.POSSIBLE), pieces)
        assert (reply.thoughts, reply.content, reply.calls) == found


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = reader_of("hermes")
    assert parser.feed('<tool_call>{"name": "f", "argum') == []
    assert parser.feed('ents": {"city"') == [CallStart(0, "f"), Arguments(0, "{")]
    assert parser.feed(': "Köl') == [Arguments(0, '"city": "Köl')]
    assert parser.feed('n"}') == [Arguments(0, 'n"}')]
    assert parser.feed("}</tool_call>") == []


@pytest.mark.parametrize(
    ("dialect", "start", "text", "events"),
    [
        ("hermes", Phase.POSSIBLE, "<tool_ca", []),
        ("hermes", Phase.POSSIBLE, "<thin", []),
        ("hermes", Phase.CALL, '{"name": "f", "argum', []),
        ("minimax_m2", Phase.ANSWER, "<minimax:tool_call>\n<", []),
        ("minimax_m2", Phase.ANSWER, 'A<minimax:tool_call>\n<invoke name="f"', [Content("A")]),
        ("qwen3_coder", Phase.ANSWER, "<tool_call>\n<function=f>\n</function>\n</tool", call(0, "f", "{}")),
        (
            "deepseek",
            Phase.ANSWER,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁e",
            call(0, "f", "{}"),
        ),
        ("hermes", Phase.ANSWER, "1 <", [Content("1 <")]),
        ("hermes", Phase.ANSWER, "1 </tool", [Content("1 </tool")]),
    ],
)
def test_half_a_mark_that_a_limit_cuts_off_is_no_answer(dialect, start, text, events) -> None:
    row = replace(find_dialect(dialect, "").row, thoughts=THINK.thoughts)
    for pieces in ([text], list(text)):
        reader = ReplyReader(row, NAMES, start)
        found = [event for piece in pieces for event in reader.feed(piece)] + reader.finish(is_cut=True)
        texts = "".join(event.text for event in found if isinstance(event, Content))
        assert ([Content(texts)] if texts else joined(found)) == events


def test_text_before_a_possible_mark_is_not_held_back() -> None:
    parser = reader_of("hermes")
    assert parser.feed("Hello <tool") == [Content("Hello")]
    assert parser.feed("box>") == [Content(" <toolbox>")]


def test_a_forced_call_is_all_of_the_text() -> None:
    parser = ReplyReader(named_row("f"), NAMES, Phase.ANSWER)
    assert parser.feed(" \n") == []
    assert parser.feed(' {"a') + parser.feed('": 1}') == [*call(0, "f", "{"), Arguments(0, '"a": 1}')]
    assert parser.finish() == []


QWEN_25 = "{%- if tools %}return a json object within <tool_call></tool_call> XML tags{% endif %}"
QWEN_3_CODER = "{%- if tools %}<tool_call>\n<function=example>{% endif %}"
GLM_45 = "{%- if tools %}<tool_call>{name}<arg_key>{% endif %}"
MISTRAL_7 = "{{- '[TOOL_CALLS]' + message.tool_calls | tojson }}"
LLAMA_31 = "{{- '<|python_tag|>' }}{% if tools %}{% endif %}"
LLAMA_32 = '{"name": function name, "parameters": dictionary of argument name and its value}'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN_25, "hermes"),
        (MISTRAL_7, "mistral"),
        (LLAMA_31, "llama3_json"),
        (LLAMA_32, "llama3_json"),
        (QWEN_3_CODER, "qwen3_coder"),
        (GLM_45, "glm45"),
        ("{{ messages[0].content }}", "generic"),
        ("", "generic"),
    ],
)
def test_auto_knows_a_dialect_by_the_template(template, name) -> None:
    found = find_dialect("auto", template)
    assert found.name == name
    assert find_dialect("none", template) is None
    assert find_dialect("json", template).name == "json"
