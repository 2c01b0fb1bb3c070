"""Replies in the styles of published response templates: whole, and cut in every place."""

import json

import pytest

from server.api.chat.message_reader import Message, MessageReader, Reading
from server.api.chat.reasoning import ReasoningStart
from server.api.chat.reasoning_styles import ReasoningStyle, TemplateSplitter, style_of
from server.reply.response_templates.searches import MAX_PROMPT_STEPS, SearchSteps, TooManySteps
from server.reply.response_templates.template import TemplateError, compile_template
from server.reply.response_templates.template_reader import MAX_CALL_CHARS, MAX_HELD_CHARS, TemplateReader
from tests.server.reply.response_templates.templates import FUNCTION, GPT_OSS, QWEN, QWEN_CODER, TEMPLATES

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}
BONN = {"city": 'Bonn "am\nRhein" 🚂', "days": 3}
BONN_JSON = json.dumps(BONN, ensure_ascii=False)
CALLS = [("get_weather", BONN), ("now", {})]
# template, end of the prompt, reply, reasoning, content, calls
GOLDEN = [
    (
        "qwen",
        "<|im_start|>assistant\n",
        "<think>\nHm, 1 < 2.\n</think>\n\nLet me look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": ' + BONN_JSON + "}\n</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>',
        ("Hm, 1 < 2.", "Let me look.", CALLS),
    ),
    ("qwen", "user\nhi<think>\n<|im_start|>assistant\n<think>\n", "Hm.</think>Yes.", ("Hm.", "Yes.", [])),
    ("qwen", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes. \n", ("", "Yes.", [])),
    ("qwen", "<|im_start|>assistant\n", "<think>Hm", ("Hm", "", [])),
    ("qwen", "", "1 <tool_ca", ("", "1 <tool_ca", [])),
    ("qwen", "", "A <tool_call>{no}</tool_call> B", ("", "A\n<tool_call>{no}</tool_call>\nB", [])),
    (
        "qwen_coder",
        "<|im_start|>assistant\n<think>\n",
        "Hm.\n</think>\n\n<tool_call>\n<function=get_weather>\n"
        '<parameter=city>\nBonn "am\nRhein" 🚂\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        ("Hm.", "", CALLS),
    ),
    (
        "qwen_coder",
        "",
        "<tool_call><function=get_weather><parameter=at>a</parameter><parameter=at>b</parameter></function>"
        "</tool_call>",
        ("", "", [("get_weather", {"at": ["a", "b"]})]),
    ),
    (
        "gpt_oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.get_weather <|constrain|>json<|message|>" + BONN_JSON + "<|call|>"
        "<|channel|>commentary to=functions.now<|message|>{}",
        ("Hm, 1 < 2.", "", CALLS),
    ),
    (
        "gpt_oss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("Hm", "Yes.", []),
    ),
    ("gpt_oss", "<|start|>assistant", "Just a text.", ("", "Just a text.", [])),
    (
        "cohere",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": ' + BONN_JSON + "},\n"
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        ("Hm.", "", CALLS),
    ),
    (
        "cohere",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        "<|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ("", "Yes.", []),
    ),
    ("ernie", "Assistant:", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n", ("Hm.", "Yes.", [])),
    (
        "gemma",
        "<|turn>model\n",
        "<|channel>thought\nHm.<channel|>See: <|tool_call>call:get_weather{city:"
        '<|"|>Bonn "am\nRhein" 🚂<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>',
        ("Hm.", "See:", CALLS),
    ),
    (
        "inkling",
        "<|message_model|>",
        "<|content_thinking|>Hm, <|end_message|><|message_model|><|content_thinking|>1 < 2.<|end_message|>"
        '<|message_model|>get_weather<|content_invoke_tool_json|>{"name":"get_weather","args":'
        + BONN_JSON
        + "}<|end_message|><|message_model|>now<|content_invoke_tool_json|>"
        '{"name":"now","args":{}}<|end_message|>'
        "<|message_model|><|content_text|>Yes. <|end_message|>",
        ("Hm, 1 < 2.", "Yes. ", CALLS),
    ),
    (
        "lines",
        "",
        "On it. [[get_weather\ncity = Bonn\ndays=3\n]]",
        ("", "On it.", [("get_weather", {"city": "Bonn", "days": 3})]),
    ),
]


def new_reader(
    spec: dict, prompt: str, schemas: dict | None = SCHEMAS, *, max_calls: int | None = None
) -> MessageReader:
    template = compile_template(spec)

    def splitter(_: ReasoningStart) -> TemplateSplitter:
        reader = TemplateReader(template, schemas)
        reader.begin_behind(template.behind_anchor(prompt, SearchSteps(MAX_PROMPT_STEPS)) or "")
        return TemplateSplitter(reader)

    style = ReasoningStyle(name="template", begin="", end="", sign="", new_splitter=splitter)
    return MessageReader(
        Reading(
            reasoning=ReasoningStart.POSSIBLE,
            style=style,
            max_calls=max_calls,
            new_call_id=lambda: "call_1",
        )
    )


def read_by(reader: MessageReader, pieces: list[str]) -> dict:
    message = Message()
    for piece in pieces:
        message.add(reader.feed(piece, ()))
    message.add(reader.finish())
    return message.body()


def read(spec: dict, prompt: str, pieces: list[str], schemas: dict | None = SCHEMAS) -> dict:
    return read_by(new_reader(spec, prompt, schemas), pieces)


def cuts(text: str) -> list[list[str]]:
    """In two, at every place, and into characters."""
    return [[text[:at], text[at:]] for at in range(1, len(text))] + [list(text)]


@pytest.mark.parametrize(("name", "prompt", "text", "wanted"), GOLDEN)
def test_a_reply_is_read_whole_and_cut_in_every_place(name, prompt, text, wanted) -> None:
    whole = read(TEMPLATES[name], prompt, [text])
    calls = [call["function"] for call in whole.get("tool_calls", [])]
    read_calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
    assert (whole.get("reasoning_content", ""), whole["content"] or "", read_calls) == wanted
    for pieces in cuts(text):
        assert read(TEMPLATES[name], prompt, pieces) == whole, pieces


def test_every_style_has_a_golden_reply() -> None:
    assert {name for name, *_ in GOLDEN} == set(TEMPLATES)


def test_calls_are_content_where_no_tool_may_be_called() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = read(QWEN, "", ["Well.", call], schemas=None)
    assert message["content"] == f"Well.\n{call}"
    assert "tool_calls" not in message


def test_arguments_take_the_types_of_the_schema_where_they_fit() -> None:
    call = "<tool_call><function=get_weather><parameter=city>7</parameter><parameter=days>{}</parameter>"
    for days, written in (("7", "7"), ("soon", '"soon"')):
        message = read(QWEN_CODER, "", [call.format(days) + "</function></tool_call>"])
        assert message["tool_calls"][0]["function"]["arguments"] == f'{{"city": "7", "days": {written}}}'


PATHOLOGICAL = [
    # A nest of repeats, that takes a backtracking search two to the power of the length.
    ({"open_pattern": r"(?:(a+)+)+!", "close": "!"}, "a" * 3_000),
    # As many ways at once as the expression has ops.
    ({"open_pattern": r"(?:a?){300}a{300}", "close": "!"}, "a" * 3_000),
    # A search that begins anew at each character, each time up to the end.
    ({"open_pattern": r"a(?:.*z)?", "close": "a", "content": "kv-lines"}, "a" * 3_000),
    # Text that could become a mark for as long as there is any.
    ({"open_pattern": r"a.*z", "close": "!"}, "a" * (MAX_HELD_CHARS + 2_000)),
    # Tags, of which each could end with the last character only.
    (
        {
            "open": "a",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"(?P<key>a)(?P<value>(?:.*z)?)"},
        },
        "a" * 3_000,
    ),
]


@pytest.mark.parametrize(("calls", "text"), PATHOLOGICAL)
def test_a_template_that_takes_too_long_costs_its_reply_the_calls_and_no_text(calls, text) -> None:
    spec = {
        "start_anchor": ">",
        "fields": {
            "tool_calls": {**calls, "repeats": True, "transform": {"function": {"name": "f"}}},
            "content": {},
        },
    }
    read_text = read(spec, "", [text])
    if "tool_calls" not in read_text:
        assert read_text["content"] == text
    in_pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    assert read(spec, "", in_pieces) == read_text


def test_text_that_may_become_a_mark_is_held_back_so_far_only() -> None:
    spec = {"start_anchor": ">", "fields": {"tool_calls": {"open_pattern": "<.*>"}, "content": {}}}
    reader = TemplateReader(compile_template(spec), {})
    assert reader.feed("Hi <" + "x" * (MAX_HELD_CHARS - 2))[0].text == "Hi"
    assert len(reader.feed("x" * 100)[0].text) > 50


def test_a_call_that_is_too_long_is_content() -> None:
    text = '<tool_call>{"name": "' + "x" * MAX_CALL_CHARS + '"}</tool_call>'
    message = read(QWEN, "", [text])
    assert (message["content"], "tool_calls" in message) == (text, False)


def test_a_call_that_is_too_long_is_shown_once_where_the_steps_run_out_later() -> None:
    calls = {"open": "<", "close_pattern": "(?:a+)+(?:a?){300}!", "transform": {"function": {"name": "f"}}}
    spec = {"start_anchor": ">", "fields": {"tool_calls": calls, "content": {}}}
    text = "Hi <" + "x" * MAX_CALL_CHARS + "y" + "a" * 3_000
    reader = new_reader(spec, "")
    message = read_by(reader, [text[at : at + 997] for at in range(0, len(text), 997)])
    assert "".join(message["content"].split()) == "".join(text.split())


@pytest.mark.parametrize("name", ["gpt_oss", "cohere"])
def test_a_long_reply_without_fields_is_content_and_comes_before_its_end(name) -> None:
    text = "1234 " * (MAX_HELD_CHARS // 2) + "end"
    reader = new_reader(TEMPLATES[name], "")
    message, num_early = Message(), 0
    for at in range(0, len(text), 5):
        pieces = reader.feed(text[at : at + 5], ())
        num_early += bool(pieces)
        message.add(pieces)
    message.add(reader.finish())
    assert message.body()["content"] == text
    assert num_early > 10


def test_text_before_a_reply_that_takes_too_many_steps_stays() -> None:
    spec = {"start_anchor": ">", "fields": {"content": {"open_pattern": r"(?:a?){300}a{300}!"}}}
    text = "Well. " + "a" * 3_000
    assert read(spec, "", list(text))["content"] == text


CUT_OFF = "<tool_call><function=get_weather><parameter=city>Bonn</parameter><parameter=days>1"


@pytest.mark.parametrize(("reason", "stop_reason"), [("stop", "1"), ("length", None)])
def test_a_call_that_a_stop_string_or_a_limit_cuts_off_is_content(reason, stop_reason) -> None:
    now = "<tool_call><function=now></function></tool_call>"
    for text, num_calls in ((CUT_OFF, 0), (f"{now}{CUT_OFF}", 1)):
        for pieces in cuts(text):
            reader = new_reader(QWEN_CODER, "")
            reader.cut_off()
            message = read_by(reader, pieces)
            assert message["content"] == CUT_OFF
            assert len(message.get("tool_calls", [])) == num_calls
            assert reader.finish_reason(reason, stop_reason) == reason


def test_a_call_that_the_model_ends_with_its_reply_is_one() -> None:
    reader = new_reader(QWEN_CODER, "")
    (call,) = read_by(reader, [CUT_OFF + "</parameter>"])["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bonn", "days": 1}
    assert reader.finish_reason("stop", None) == "tool_calls"


def test_a_cut_off_call_is_shown_without_the_part_that_the_prompt_has() -> None:
    reader = new_reader(QWEN, '<|im_start|>assistant\n<tool_call>{"name": ')
    reader.cut_off()
    assert read_by(reader, ['"now", "argu'])["content"] == '"now", "argu'


def test_calls_of_the_prompt_are_not_counted() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    reader = new_reader(QWEN, f"<|im_start|>assistant\n{call}", max_calls=1)
    (read_call,) = read_by(reader, [call])["tool_calls"]
    assert read_call["function"]["name"] == "now"


@pytest.mark.parametrize(("end", "num_tokens"), [("<think>\n\n</think>\n\n", 0), ("<think>\n", 2)])
def test_tokens_are_reasoning_where_the_prompt_has_not_ended_it(end, num_tokens) -> None:
    reader = new_reader(QWEN, f"<|im_start|>assistant\n{end}")
    for number, piece in enumerate(["Hm", "</think>" if num_tokens else " so", "Yes", "."]):
        reader.feed(piece, (number,))
    assert reader.num_reasoning_tokens == num_tokens


@pytest.mark.parametrize("part", ['"id": "\\ud800", "name": "now"', '"name": "\\ud800"', '"name": "now"'])
def test_a_call_with_half_a_character_is_content(part) -> None:
    call = f'<tool_call>{{{part}, "arguments": {{"a": "\\ud800"}}}}</tool_call>'
    message = read(QWEN, "", [call])
    assert (message["content"], "tool_calls" in message) == (call, False)


def test_many_values_of_one_key_are_merged_in_a_list() -> None:
    tags = {"tag_pattern": "(?P<key>a)(?P<value>.)", "merge_duplicates": True}
    calls = {"open": "<", "close": ">", "content": "xml-inline", "content_args": tags, "transform": FUNCTION}
    calls = {**calls, "open_pattern": "<(?P<name>f)", "open": None}
    spec = {"start_anchor": ":", "fields": {"tool_calls": calls, "content": {}}}
    (call,) = read(spec, "", ["<f" + "a1" * 5_000 + "a2>"])["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": ["1"] * 5_000 + ["2"]}


def test_a_long_argument_in_tags_is_read_in_one_piece_as_in_many() -> None:
    call = "<tool_call><function=get_weather><parameter=city>{}</parameter></function></tool_call>"
    text = call.format("Bonn " * 4_000)
    whole = read(QWEN_CODER, "", [text])
    assert len(whole["tool_calls"][0]["function"]["arguments"]) > 19_000
    assert read(QWEN_CODER, "", [text[at : at + 4] for at in range(0, len(text), 4)]) == whole


def test_an_anchor_is_looked_for_in_so_many_steps_only() -> None:
    template = compile_template({**QWEN, "start_anchor": None, "start_anchor_pattern": "(?:a+)+(?:a?){99}:"})
    steps = SearchSteps(MAX_PROMPT_STEPS)
    assert template.behind_anchor("aa:b", steps) == "b"
    assert template.behind_anchor("a" * 15_000 + ":b", steps) is None
    with pytest.raises(TooManySteps):
        steps.spend(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "its version is 2"),
        ({"colour": 1}, "unknown keys: colour"),
        ({"fields": {}}, "no fields"),
        ({"start_anchor": None}, "neither start_anchor nor start_anchor_pattern"),
        ({"fields": {"plan": {"open": "<p>"}}}, "'plan' has no place in a reply"),
        ({"fields": {"content": {"shut": "x"}}}, "'content' has unknown keys: shut"),
        ({"fields": {"content": {}, "thinking": {}}}, "more than one field has no beginning"),
        ({"fields": {"thinking": {"open": "a"}, "reasoning": {"open": "b"}}}, "two fields are reasoning"),
        ({"fields": {"content": {"content": "json"}}}, "shown as text"),
        ({"fields": {"tool_calls": {"content": "json"}}}, "has no beginning"),
        ({"fields": {"tool_calls": {"open": "a", "content": "yaml"}}}, "its content is 'yaml'"),
        ({"fields": {"tool_calls": {"open": "a", "open_pattern": "a"}}}, "both open and open_pattern"),
        ({"fields": {"tool_calls": {"open": []}}}, "no list of texts"),
        ({"fields": {"tool_calls": {"open_pattern": "a(?!b)"}}}, "open_pattern: a look ahead"),
        ({"fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}}, "needs a tag_pattern"),
        ({"fields": {"tool_calls": {"open": "a", "transform": {"x": "{a} b"}}}}, "placeholder"),
    ],
)
def test_a_template_that_cannot_be_had_is_refused_with_the_reason(change, reason) -> None:
    spec = {key: value for key, value in {**GPT_OSS, **change}.items() if value is not None}
    with pytest.raises(TemplateError, match=reason):
        compile_template(spec)


def test_a_template_makes_the_row_by_which_replies_to_grammars_are_read() -> None:
    rows = {name: style_of(compile_template(spec)) for name, spec in TEMPLATES.items()}
    marks = {name: (row.begin, row.end, row.answer) for name, row in rows.items() if row is not None}
    assert marks == {
        "qwen": ("<think>", "</think>", ""),
        "qwen_coder": ("<think>", "</think>", ""),
        "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>"),
        "cohere": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
        "gemma": ("<|channel>thought", "<channel|>", ""),
    }
