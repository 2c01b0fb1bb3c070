"""Replies in the styles of published response templates: whole, and cut in every place."""

import json

import pytest

from server.api.chat.message_reader import Message, MessageReader, Reading
from server.reply.reading.row import Phase
from server.reply.reading.template_rows import TemplateError, template_row
from tests.server.reply.reading.templates import GPT_OSS, QWEN, QWEN_CODER, TEMPLATES

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
    ("qwen", "", "A <tool_call>{no}</tool_call> B", ("", "A <tool_call>{no}</tool_call> B", [])),
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


def new_reader(spec: dict, prompt: str, *, max_calls: int | None = None) -> MessageReader:
    found = template_row(spec)
    return MessageReader(
        Reading(
            row=found,
            schemas=SCHEMAS,
            start=Phase.POSSIBLE,
            prompt_end=found.behind_anchor(prompt) or "",
            max_calls=max_calls,
            new_call_id=lambda: "call_1",
        )
    )


def read_by(reader: MessageReader, pieces: list[str], *, is_cut: bool = False) -> dict:
    message = Message()
    for piece in pieces:
        message.add(reader.feed(piece, ()))
    message.add(reader.finish(is_cut=is_cut))
    return message.body()


def read(spec: dict, prompt: str, pieces: list[str]) -> dict:
    return read_by(new_reader(spec, prompt), pieces)


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


def test_arguments_take_the_types_of_the_schema_where_they_fit() -> None:
    call = "<tool_call><function=get_weather><parameter=city>7</parameter><parameter=days>{}</parameter>"
    for days, written in (("7", "7"), ("soon", '"soon"')):
        message = read(QWEN_CODER, "", [call.format(days) + "</function></tool_call>"])
        assert message["tool_calls"][0]["function"]["arguments"] == f'{{"city": "7", "days": {written}}}'


@pytest.mark.parametrize("name", ["gpt_oss", "cohere"])
def test_a_long_reply_without_fields_is_content_and_comes_before_its_end(name) -> None:
    text = "1234 " * 400 + "end"
    reader = new_reader(TEMPLATES[name], "")
    message, num_early = Message(), 0
    for at in range(0, len(text), 5):
        pieces = reader.feed(text[at : at + 5], ())
        num_early += bool(pieces)
        message.add(pieces)
    message.add(reader.finish())
    assert message.body()["content"] == text
    assert num_early > 10


CUT_OFF = "<tool_call><function=get_weather><parameter=city>Bonn</parameter><parameter=days>1"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_that_a_stop_string_or_a_limit_cuts_off_stays_open(reason) -> None:
    for pieces in cuts(CUT_OFF):
        reader = new_reader(QWEN_CODER, "")
        message = read_by(reader, pieces, is_cut=True)
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["arguments"]) == (None, '{"city": "Bonn"')
        assert reader.finish_reason(reason) == reason


def test_a_call_that_the_model_ends_with_its_reply_is_one() -> None:
    reader = new_reader(QWEN_CODER, "")
    (call,) = read_by(reader, [CUT_OFF + "</parameter>"])["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bonn", "days": 1}
    assert reader.finish_reason("stop") == "tool_calls"


IN_TAGS = r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"


@pytest.mark.parametrize(
    ("content", "mark", "tags", "reply"),
    [
        ("json", "(?:>)?", "", '>{"city": "Bonn"}'),
        ("json", "(?:>)?", "", '{"city": "Bonn"}'),
        ("json", r"(?:\s*)", "", ' {"city": "Bonn"}'),
        ("xml-inline", ">", IN_TAGS.replace("<p=", r"<p=(?:\s*)"), "><p=city>Bonn</p>"),
        ("xml-inline", ">", IN_TAGS + r"(?:\s*)", "><p=city>Bonn</p>"),
        ("xml-inline", ">", IN_TAGS.replace("</p>", "(?:</p>)?"), "><p=city>Bonn</p>"),
        ("xml-inline", ">", r"<p=(?P<key>\w+)>(?:\s*<v>)?(?P<value>.*?)</p>", "><p=city> <v>Bonn</p>"),
    ],
)
def test_a_mark_that_may_be_missing_is_read_with_it_and_without(content, mark, tags, reply) -> None:
    field = {"open_pattern": rf"<call:(?P<name>\w+){mark}", "close": "</call>", "content": content}
    if tags:
        field["content_args"] = {"tag_pattern": tags}
    text = f"<call:get_weather{reply}</call>"
    for pieces in ([text], *cuts(text)):
        (call,) = read({"start_anchor": "A:", "fields": {"tool_calls": field}}, "", pieces)["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Bonn"}'}


def test_a_call_that_the_prompt_has_begun_goes_on() -> None:
    reader = new_reader(QWEN, '<|im_start|>assistant\n<tool_call>{"name": ')
    (call,) = read_by(reader, ['"now", "arguments": {}}</tool_call>'])["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


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


def test_a_long_argument_in_tags_is_read_in_one_piece_as_in_many() -> None:
    call = "<tool_call><function=get_weather><parameter=city>{}</parameter></function></tool_call>"
    text = call.format("Bonn " * 4_000)
    whole = read(QWEN_CODER, "", [text])
    assert len(whole["tool_calls"][0]["function"]["arguments"]) > 19_000
    assert read(QWEN_CODER, "", [text[at : at + 4] for at in range(0, len(text), 4)]) == whole


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "its version is 2"),
        ({"colour": 1}, "unknown keys: colour"),
        ({"fields": {}}, "no fields"),
        ({"start_anchor": None}, "neither start_anchor nor start_anchor_pattern"),
        ({"fields": {"plan": {"open": "<p>"}}}, "'plan' has no place in a reply"),
        ({"fields": {"content": {"shut": "x"}}}, "'content' has unknown keys: shut"),
        ({"fields": {"content": {}, "thinking": {}}}, "thoughts begin with one text"),
        ({"fields": {"thinking": {"open": "a"}, "reasoning": {"open": "b"}}}, "two fields are thoughts"),
        ({"fields": {"content": {"content": "json"}}}, "shown as text"),
        ({"fields": {"tool_calls": {"content": "json"}}}, "has no beginning"),
        ({"fields": {"tool_calls": {"open": "a", "content": "yaml"}}}, "its content is 'yaml'"),
        ({"fields": {"tool_calls": {"open": "a", "open_pattern": "a"}}}, "both open and open_pattern"),
        ({"fields": {"tool_calls": {"open": []}}}, "no list of texts"),
        ({"fields": {"tool_calls": {"open_pattern": "a(?!b)"}}}, "open_pattern: what stands at character 1"),
        (
            {"fields": {"tool_calls": {"open": "a", "content": "xml-inline"}}},
            "needs the name of the function",
        ),
        (
            {"fields": {"tool_calls": {"open": "a", "content": "json", "transform": {"name": "f"}}}},
            "placeholder",
        ),
    ],
)
def test_a_template_that_cannot_be_had_is_refused_with_the_reason(change, reason) -> None:
    spec = {key: value for key, value in {**GPT_OSS, **change}.items() if value is not None}
    with pytest.raises(TemplateError, match=reason):
        template_row(spec)
