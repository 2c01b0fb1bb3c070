"""Every way of marking reasoning: whole, cut in every place, and found by the model."""

import dataclasses

import pytest

from server.api.chat.message_reader import Message, MessageReader, Reading
from server.api.chat.plan import model_reading
from server.app import build_app
from server.edge.http.edge import Parsers
from server.reply.reading.dialects import STYLES, find_style
from server.reply.reading.row import Phase
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO

CHAT = "/v1/chat/completions"
ANALYSIS = "<|channel|>analysis<|message|>Hm, 1 < 2.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."
GOLDEN = [
    ("think", "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes.", []),
    ("mistral", "[THINK]Hm, 1 < 2.[/THINK]Yes.", "Hm, 1 < 2.", "Yes.", []),
    ("minimax_m3", "<mm:think>Hm, 1 < 2.</mm:think>Yes.", "Hm, 1 < 2.", "Yes.", []),
    ("seed_oss", "<seed:think>\nHm, 1 < 2.</seed:think>Yes.", "Hm, 1 < 2.", "Yes.", []),
    ("gemma4", "<|channel>thought\nHm, 1 < 2.\n<channel|>Yes.", "Hm, 1 < 2.", "Yes.", []),
    *(
        (
            style,
            f"<|START_THINKING|>Hm, 1 < 2.<|END_THINKING|><|START_{word}|>Yes.<|END_{word}|>",
            *("Hm, 1 < 2.", "Yes.", []),
        )
        for style, word in (("cohere", "RESPONSE"), ("cohere_text", "TEXT"))
    ),
    (
        "cohere",
        "<|START_THINKING|>Hm, 1 < 2.<|END_THINKING|>"
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>',
        *("Hm, 1 < 2.", None, [("f", '{"a": 1}')]),
    ),
    ("harmony", ANALYSIS + FINAL + "<|return|>", "Hm, 1 < 2.", "Yes.", []),
    ("harmony", ANALYSIS + FINAL, "Hm, 1 < 2.", "Yes.", []),
    ("harmony", ANALYSIS + CALL, "Hm, 1 < 2.", None, [("f", '{"a": 1}')]),
    (
        "harmony",
        ANALYSIS + "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>" + CALL + CALL,
        "Hm, 1 < 2.",
        "Wait.",
        [("f", '{"a": 1}')] * 2,
    ),
    (
        "harmony",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        None,
        None,
        [("f", '{"a": 1}')],
    ),
    ("harmony", "Just a text, without any mark.", None, "Just a text, without any mark.", []),
    ("harmony", "<|channel|>analysis<|message|>Hm", "Hm", "", []),
]


def read(style: str, start: Phase, pieces: list[str]) -> dict:
    tool_calls = style if style in ("harmony", "cohere") else "none"
    model = model_reading(Parsers(tool_calls=tool_calls, reasoning=style), INFO)
    reading = Reading(row=model.row, schemas={"f": {}}, start=start, new_call_id=lambda: "call_1")
    reader, message = MessageReader(reading), Message()
    for piece in pieces:
        message.add(reader.feed(piece, ()))
    message.add(reader.finish())
    return message.body()


@pytest.mark.parametrize(("style", "text", "reasoning", "content", "calls"), GOLDEN)
def test_reasoning_answer_and_calls_are_told_apart_however_the_text_is_cut(
    style, text, reasoning, content, calls
) -> None:
    whole = read(style, Phase.POSSIBLE, [text])
    assert (whole.get("reasoning"), whole["content"]) == (reasoning, content)
    found = [call["function"] for call in whole.get("tool_calls", [])]
    assert [(call["name"], call["arguments"]) for call in found] == calls
    assert read(style, Phase.POSSIBLE, list(text)) == whole
    for cut in range(1, len(text)):
        assert read(style, Phase.POSSIBLE, [text[:cut], text[cut:]]) == whole


def test_every_style_has_a_golden_text() -> None:
    assert {style for style, *_ in GOLDEN} == {style.name for style in STYLES}


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_auto_finds_a_style_in_the_template_or_the_tokenizer(style) -> None:
    """Cohere's in the template alone: Aya's tokenizers have its marks, which Aya does not write."""
    is_of_cohere = style.name.startswith("cohere")
    assert find_style("auto", style.sign, {}) is style
    assert find_style("auto", "", {style.sign: 5}) is (None if is_of_cohere else style)
    assert find_style("none", style.sign, {}) is None


GPT_OSS = dataclasses.replace(
    INFO,
    chat_template="<|channel|> <|message|>",
    added_tokens={"<|channel|>": 5, "<|message|>": 6, "<|end|>": 3},
)


async def test_a_reply_in_channels_comes_out_as_a_message(engine) -> None:
    engine.model_info = GPT_OSS
    engine.texts = (
        "<|channel|>",
        "analysis<|message|>",
        "Hm",
        "<|end|>",
        "<|start|>assistant",
        *list(FINAL[18:]),
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": len(engine.texts)}
    async with connect(build_app(engine, Settings())) as client:
        reply = (await client.post(CHAT, json=body)).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm", "Yes.")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert {3, 5, 6} <= engine.requests[0].shown_special_ids


@pytest.mark.parametrize(
    ("dialect", "tokens"),
    [
        ("minicpm5", ("<function", "</function>", "<param", "</param>")),
        ("minimax_m3", ("]<]minimax[>[", "<tool_call>", "</invoke>")),
        ("deepseek_v32", ("｜DSML｜",)),
    ],
)
def test_special_tokens_that_are_parts_of_marks_stay_in_the_text(dialect, tokens) -> None:
    numbers = {token: number for number, token in enumerate(tokens)}
    info = dataclasses.replace(INFO, added_tokens=numbers | {"<pad>": 9})
    reading = model_reading(Parsers(tool_calls=dialect, reasoning="none"), info)
    assert reading.shown_ids(reading.row.marks) == set(numbers.values())


async def test_a_grammar_holds_in_the_final_channel(engine) -> None:
    engine.model_info, engine.texts = GPT_OSS, ("{", "}")
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "response_format": {"type": "json_object"},
    }
    async with connect(build_app(engine, Settings())) as client:
        reply = (await client.post(CHAT, json=body)).json()
    prompt = bytes(engine.requests[0].prompt_token_ids[:-1])
    assert prompt.endswith(b"<|channel|>final<|message|>")
    assert engine.requests[0].params.grammar.begins_after is None
    assert reply["choices"][0]["message"]["content"] == "{}"
