"""Reasoning apart from the answer."""

import dataclasses

import pytest

from server.api.chat.message_reader import MessageReader, Reading
from server.app import build_app
from server.reply.reading.dialects import THINK
from server.reply.reading.events import Content, Reasoning
from server.reply.reading.machine import ReplyReader
from server.reply.reading.row import Phase, Row
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO

TEMPLATE = "{{ messages }}{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
THINKING = dataclasses.replace(INFO, chat_template=TEMPLATE, added_tokens={"<think>": 60, "</think>": 62})
HI = {"messages": [{"role": "user", "content": "hi"}]}
TEXTS = ("<think>", "\nHm", "m.\n", "</think>", "\n\n", "Yes", ".\n")
CHAT = "/v1/chat/completions"


ROW = Row(thoughts=THINK.thoughts)


def split(start: Phase, text: str) -> list[Reasoning | Content]:
    reader = ReplyReader(ROW, {}, start)
    *found, last = [*reader.feed(text), *reader.finish()]
    if found and type(found[-1]) is type(last):
        return [*found[:-1], type(last)(found[-1].text + last.text)]
    return [*found, last]


@pytest.mark.parametrize(
    ("start", "text", "found"),
    [
        (Phase.POSSIBLE, "<think>\nHm.\n</think>\n\nYes.\n", [Reasoning("Hm."), Content("Yes.\n")]),
        (Phase.POSSIBLE, "\n<think></think>Yes.", [Content("Yes.")]),
        (Phase.POSSIBLE, "\n</think>\n\nYes.</think>", [Content("Yes.</think>")]),
        (Phase.POSSIBLE, "<think>Hm", [Reasoning("Hm")]),
        (Phase.POSSIBLE, "<thin", [Content("<thin")]),
        (Phase.POSSIBLE, " \n", [Content(" \n")]),
        (Phase.POSSIBLE, "Yes. <think>no</think>", [Content("Yes. <think>no</think>")]),
        (
            Phase.THOUGHT,
            "Hm, 1 < 2 </thin\n\n</think> Yes",
            [Reasoning("Hm, 1 < 2 </thin"), Content("Yes")],
        ),
        (Phase.THOUGHT, "\n<think>\nHm</think>Yes", [Reasoning("Hm"), Content("Yes")]),
        (Phase.THOUGHT, "Hm</th", [Reasoning("Hm</th")]),
        (Phase.THOUGHT, "<thi", [Reasoning("<thi")]),
        (Phase.ANSWER, "<think>Hm</think>", [Content("<think>Hm</think>")]),
    ],
)
def test_the_block_at_the_beginning_is_reasoning(start, text, found) -> None:
    assert split(start, text) == found


@pytest.mark.parametrize(
    ("start", "end_id", "outputs", "num"),
    [
        (Phase.POSSIBLE, 9, [("<think>", [8]), ("Hm", [1]), ("</think>", [9]), ("Yes", [2])], 3),
        (Phase.POSSIBLE, 9, [("<think>Hm</think>Yes", [8, 1, 9, 2])], 3),
        (
            Phase.POSSIBLE,
            None,
            [("<th", [8]), ("ink>", [7]), ("Hm", [1]), ("</think>", [9]), ("Yes", [2])],
            4,
        ),
        (Phase.POSSIBLE, None, [("<think>Hm</think>Yes", [8, 1, 9, 2])], 4),
        (Phase.POSSIBLE, 9, [(" ", [3]), ("Yes", [2])], 0),
        (Phase.THOUGHT, 9, [("Hm", [1]), ("", [4]), ("</think>", [9]), ("Yes </think>", [2, 9])], 3),
        (Phase.THOUGHT, 9, [("Hm", [1, 2, 3])], 3),
        (Phase.ANSWER, 9, [("</think>", [9])], 0),
        (Phase.POSSIBLE, 9, [("</think>Yes", [9, 2])], 0),
        (Phase.POSSIBLE, 9, [("So</think>", [1, 9]), ("Yes", [2])], 0),
        (Phase.POSSIBLE, 9, [("<think></think>Yes", [8, 9, 2])], 2),
        (Phase.POSSIBLE, 9, [("", [8, 9]), ("<think></think>Yes", [2, 3])], 2),
    ],
)
def test_tokens_of_reasoning_are_counted_to_the_end_of_the_block(start, end_id, outputs, num) -> None:
    reader = MessageReader(Reading(row=ROW, start=start, reasoning_end_id=end_id))
    for text, token_ids in outputs:
        reader.feed(text, token_ids)
    reader.finish()
    assert reader.num_reasoning_tokens == num


@pytest.fixture
def thinking(engine):
    engine.model_info, engine.texts = THINKING, TEXTS
    engine.model_info.added_tokens["</think>"] = TEXTS.index("</think>")  # the id that it gets there
    return engine


async def ask(client, **fields) -> dict:
    response = await client.post(CHAT, json={**HI, "max_tokens": len(TEXTS), **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_message_tells_it_under_both_names_and_usage_counts_it(client, thinking) -> None:
    reply = await ask(client)
    message = reply["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hmm."
    assert message["content"] == "Yes.\n"
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert thinking.requests[0].shown_special_ids == {60, 3}


async def test_whole_replies_come_token_by_token_where_only_the_text_shows_the_end(client, thinking) -> None:
    """Large pieces would count the answer's tokens that came with the last ones of the thoughts."""
    responses = {"input": "hi", "max_output_tokens": len(TEXTS)}
    for added_tokens, is_coarse in (({}, False), ({"</think>": TEXTS.index("</think>")}, True)):
        thinking.model_info = dataclasses.replace(THINKING, added_tokens=added_tokens)
        await ask(client)
        reply = (await client.post("/v1/responses", json=responses)).json()
        assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
        assert thinking.are_read_whole[-2:] == [is_coarse, is_coarse]


async def test_reasoning_can_be_left_out_and_is_counted_all_the_same(client, thinking) -> None:
    reply = await ask(client, include_reasoning=False)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Yes.\n", "refusal": None}
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({"messages": [{"role": "user", "content": "a<think>\n"}]}, "Hm", "Yes"),
        ({"messages": [{"role": "user", "content": "a<think>\n\n</think>\n\n"}]}, None, "Hm</think>\n\nYes"),
        (
            {
                "messages": [{"role": "assistant", "content": "<think>Well"}],
                "continue_final_message": True,
            },
            "Hm",
            "Yes",
        ),
        (
            {
                "messages": [{"role": "assistant", "content": "<think>Well</think>So"}],
                "continue_final_message": True,
            },
            None,
            "Hm</think>\n\nYes",
        ),
    ],
)
async def test_a_prompt_may_have_opened_or_closed_the_block(
    client, thinking, fields, reasoning, content
) -> None:
    thinking.texts = ("Hm", "</think>", "\n\n", "Yes")
    message = (await ask(client, max_tokens=4, **fields))["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


_OFF = {"enable_thinking": False, "thinking": False}
_ON = {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("effort", "switches"),
    [
        ("none", _OFF),
        ("minimal", _OFF),
        ("low", _ON),
        ("medium", _ON),
        ("high", _ON),
        ("xhigh", _ON),
        ("max", _ON),
    ],
)
async def test_every_effort_is_offered_to_the_template(client, engine, effort, switches) -> None:
    response = await client.post(CHAT, json={**HI, "reasoning_effort": effort})
    assert response.status_code == 200
    await client.post("/v1/responses", json={"input": "hi", "reasoning": {"effort": effort}})
    await client.post("/tokenize", json={**HI, "reasoning_effort": effort})
    for _, options in engine.chats:
        assert options.hints == {"reasoning_effort": effort, **switches}
    assert len(engine.chats) == 3


@pytest.mark.parametrize(
    ("fields", "hints"),
    [
        ({"enable_thinking": True}, _ON),
        ({"enable_thinking": False, "reasoning_effort": "high"}, {**_OFF, "reasoning_effort": "high"}),
        ({"thinking": {"type": "enabled"}}, _ON),
        ({"thinking": {"type": "disabled"}}, _OFF),
        ({"thinking": {"type": "auto"}}, {}),
        ({"reasoning": {"enabled": False}}, _OFF),
        ({"reasoning": {"effort": "low"}}, {**_ON, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {**_ON, "reasoning_effort": "high"}),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, {}),
    ],
)
async def test_switches_of_reasoning_of_other_servers_mean_the_same(client, thinking, fields, hints) -> None:
    thinking.model_info = dataclasses.replace(THINKING, template_variables=frozenset({"enable_thinking"}))
    reply = await client.post(CHAT, json={**HI, "max_tokens": 9, **fields})
    assert "x-tokenyard-ignored" not in reply.headers or "chat_template_kwargs" in fields
    await client.post("/tokenize", json={**HI, **fields})
    assert [options.hints for _, options in thinking.chats] == [hints, hints]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"thinking": {"type": [], "budget_tokens": 0}}, "thinking.type"),
        ({"thinking": "enabled"}, "thinking"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens"),
    ],
)
async def test_a_switch_of_reasoning_that_is_none_is_named_as_it_was_written(client, fields, param) -> None:
    reply = await client.post(CHAT, json={**HI, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_reasoning_is_left_out_and_has_a_budget_in_the_words_of_other_servers(client, thinking) -> None:
    reply = await ask(client, reasoning={"exclude": True, "max_tokens": 7})
    assert "reasoning" not in reply["choices"][0]["message"]
    assert thinking.requests[0].params.answer.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"enable_thinking": True}, "enable_thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.type, thinking.budget_tokens"),
        ({"reasoning": {"enabled": False, "max_tokens": 9}}, "reasoning.enabled, reasoning.max_tokens"),
    ],
)
async def test_a_switch_that_has_no_effect_is_named_as_it_was_written(
    client, engine, fields, ignored
) -> None:
    reply = await client.post(CHAT, json={**HI, "max_tokens": 2, **fields})
    assert reply.headers["x-tokenyard-ignored"] == ignored


async def test_what_the_caller_says_of_thinking_wins_over_the_effort(client, engine) -> None:
    kwargs = {"enable_thinking": True}
    await client.post(CHAT, json={**HI, "reasoning_effort": "none", "chat_template_kwargs": kwargs})
    ((_, options),) = engine.chats
    assert (options.hints, options.kwargs) == ({"reasoning_effort": "none"}, kwargs)


@pytest.mark.parametrize(
    ("option", "info", "is_split"),
    [
        ("auto", INFO, False),
        ("auto", dataclasses.replace(INFO, chat_template="</think>"), True),
        ("auto", dataclasses.replace(INFO, added_tokens={"</think>": 5}), True),
        ("none", THINKING, False),
        ("think", INFO, True),
    ],
)
async def test_the_option_decides_and_auto_looks_at_the_model(engine, option, info, is_split) -> None:
    engine.model_info, engine.texts = info, ("<think>a</think>", "b")
    async with connect(build_app(engine, Settings(reasoning_parser=option))) as client:
        reply = await ask(client, max_tokens=2)
    assert ("reasoning" in reply["choices"][0]["message"]) == is_split
    assert ("completion_tokens_details" in reply["usage"]) == is_split


@pytest.mark.parametrize(
    ("content", "fields", "added", "begins_after"),
    [
        ("hi", {}, (60,), 3),  # the model would open the block: opened for it
        ("hi<think>", {}, (), 3),
        ("hi</think>", {}, (), None),
        ("hi", {"chat_template_kwargs": {"enable_thinking": False}}, (), None),
        ("hi", {"reasoning_effort": "none"}, (), None),
        ("hi", {"reasoning_effort": "low"}, (60,), 3),
        ("hi", {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, (60,), 3),
    ],
)
async def test_a_grammar_begins_behind_the_reasoning(
    client, thinking, content, fields, added, begins_after
) -> None:
    messages = [{"role": "user", "content": content}]
    await ask(client, messages=messages, response_format={"type": "json_object"}, **fields)
    request = thinking.requests[0]
    assert request.prompt_token_ids == (*content.encode(), *added)
    assert request.params.grammar.begins_after == begins_after


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, ()),
        ({"reasoning_effort": "high"}, (60,)),
        ({"chat_template_kwargs": {"enable_thinking": True}}, (60,)),
    ],
)
async def test_a_default_turns_reasoning_off_before_a_grammar_unless_the_request_asks_for_it(
    client, thinking, fields, added
) -> None:
    off = {"enable_thinking": False, "mood": 1}
    thinking.model_info = dataclasses.replace(
        THINKING, template_variables=frozenset({"enable_thinking"}), default_template_kwargs=off
    )
    await ask(client, response_format={"type": "json_object"}, **fields)
    assert thinking.requests[0].prompt_token_ids == (*b"hi", *added)
    assert "mood" not in thinking.chats[0][1].hints


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("fields", "num_tokens"), [({"max_tokens": 28}, 100), ({"max_tokens": None}, 127)])
async def test_a_prompt_that_is_cut_to_what_fits_leaves_room_for_the_opened_block(
    client, thinking, side, fields, num_tokens
) -> None:
    messages = [{"role": "user", "content": "x" * 500}]
    cut = {"truncate_prompt_tokens": -1, "truncation_side": side, **fields}
    await ask(client, messages=messages, response_format={"type": "json_object"}, **cut)
    prompt = thinking.requests[0].prompt_token_ids
    assert (len(prompt), prompt[-1]) == (num_tokens, 60)


async def test_without_a_token_for_its_end_a_grammar_leaves_no_reasoning(client, thinking) -> None:
    thinking.model_info = dataclasses.replace(THINKING, added_tokens={})
    thinking.texts = ("{", "}")
    messages = [{"role": "user", "content": "hi<think>"}]
    reply = await ask(client, max_tokens=2, messages=messages, response_format={"type": "json_object"})
    assert thinking.requests[0].params.grammar.begins_after is None
    assert reply["choices"][0]["message"]["content"] == "{}"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_thoughts_have_as_many_tokens_as_the_request_allows(client, thinking, path) -> None:
    budget: dict = {"thinking_token_budget": 7}
    if path != CHAT:
        budget = {"thinking": {"type": "enabled", "budget_tokens": 7}}
    assert (await client.post(path, json={**HI, "max_tokens": 9, **budget})).status_code == 200
    answer = thinking.requests[0].params.answer
    assert (answer.token_ids, answer.begin_token_ids, answer.max_tokens) == ((3,), (60,), 7)
    assert (answer.text, answer.begin) == ("</think>", "<think>")


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_budget_that_cannot_be_kept_is_named_as_ignored(client, thinking, path) -> None:
    budget: dict = {"thinking_token_budget": 7}
    if path != CHAT:
        budget = {"thinking": {"type": "enabled", "budget_tokens": 7}}
    switch = frozenset({"enable_thinking"})
    thinking.model_info = dataclasses.replace(THINKING, template_variables=switch)
    kept = await client.post(path, json={**HI, "max_tokens": 9, **budget})
    assert "x-tokenyard-ignored" not in kept.headers
    thinking.model_info = dataclasses.replace(THINKING, added_tokens={})  # the marks are several tokens
    reply = await client.post(path, json={**HI, "max_tokens": 9, **budget})
    assert reply.status_code == 200
    assert reply.headers["x-tokenyard-ignored"].endswith(("thinking_token_budget", "thinking.budget_tokens"))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"think": "high"}),
        ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "disabled"}}),
        (CHAT, {"max_tokens": 9, "enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
async def test_a_switch_that_comes_with_an_effort_is_not_in_vain_where_that_is_read(
    client, thinking, path, fields
) -> None:
    effort = frozenset({"reasoning_effort"})
    thinking.model_info = dataclasses.replace(THINKING, template_variables=effort)
    reply = await client.post(path, json={**HI, **fields})
    assert (reply.status_code, "x-tokenyard-ignored" in reply.headers) == (200, False)


async def test_a_budget_of_thoughts_is_for_chats(client) -> None:
    reply = await client.post("/v1/completions", json={"prompt": "hi", "thinking_token_budget": 7})
    assert reply.json()["error"]["param"] == "thinking_token_budget"


async def test_stop_tokens_of_the_caller_are_for_the_answer(client, thinking) -> None:
    await ask(client, stop_token_ids=[5])
    params = thinking.requests[0].params
    assert params.answer.stop_token_ids == (5,)
    assert set(params.stop_token_ids) == {5, *INFO.eos_token_ids}


async def test_reasoning_of_earlier_turns_is_the_templates_to_use(client, thinking) -> None:
    messages = [
        {"role": "assistant", "content": "a", "reasoning": "why"},
        {"role": "assistant", "content": "b", "reasoning_content": "how"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}]},
        {"role": "user", "content": "c"},
    ]
    await ask(client, messages=messages)
    assert thinking.chats[0][0][:3] == [
        {"role": "assistant", "content": "a", "reasoning_content": "why", "thinking": "why"},
        {"role": "assistant", "content": "b", "reasoning_content": "how", "thinking": "how"},
        {"role": "assistant", "content": "", "reasoning_content": "so", "thinking": "so"},
    ]
