"""llama.cpp's endpoints over HTTP, as its plug-ins for editors ask them."""

import dataclasses

import orjson
import pytest

from engine.types import FinishReason
from server.api.llama_cpp.replies import LlamaProperties, LlamaReply
from tests.server.fake_engine import INFO

COMPLETION, INFILL = "/completion", "/infill"


async def test_a_text_is_continued_whole_and_in_events_alike(client, engine):
    body = {"prompt": "abc", "n_predict": 2, "seed": 7, "cache_prompt": True, "samplers": ["top_k"]}
    whole = (await client.post(COMPLETION, json=body)).json()
    LlamaReply.model_validate(whole, strict=True)
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("AB", True, "limit")
    assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (2, 3)
    reply = await client.post(COMPLETION, json={**body, "stream": True})
    events = [orjson.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-1]]
    for event in events:
        LlamaReply.model_validate(event, strict=True)
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event["content"] for event in events) == "AB"
    assert [request.params.seed for request in engine.requests] == [7, 7]


@pytest.mark.parametrize(("stopped_by", "kind", "word"), [(None, "eos", ""), ("z", "word", "z")])
async def test_each_end_has_llama_cpps_name(client, engine, stopped_by, kind, word):
    engine.end_as, engine.stop_reason = FinishReason.STOP, stopped_by
    reply = (await client.post(COMPLETION, json={"prompt": [97], "n_predict": 1, "seed": -1})).json()
    assert (reply["stop_type"], reply["stopping_word"]) == (kind, word)


async def test_a_hole_is_filled_behind_all_that_comes_before_it(client, engine):
    engine.can_infill = True
    extra = [{"filename": "a.py", "text": "x"}]
    body = {
        "input_extra": extra,
        "input_prefix": "p\n",
        "prompt": "q",
        "input_suffix": "\ns",
        "n_predict": 9999,
    }
    assert (await client.post(INFILL, json=body)).status_code == 200
    (request,) = engine.requests
    assert request.prompt_token_ids == await engine.encode_infill("a.py\nx\np\nq", "\ns")
    assert request.params.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)


async def test_no_tokens_asked_for_means_that_the_prompt_is_cached(client, engine):
    reply = (await client.post(COMPLETION, json={"prompt": "abc", "n_predict": 0})).json()
    assert reply["content"] == ""
    assert engine.requests[0].params.max_tokens == 1


async def test_a_grammar_or_a_schema_binds_the_text(client, engine):
    await client.post(COMPLETION, json={"prompt": "a", "n_predict": 1, "grammar": 'root ::= "a"'})
    await client.post(COMPLETION, json={"prompt": "a", "n_predict": 1, "json_schema": {"type": "object"}})
    await client.post(COMPLETION, json={"prompt": "a", "n_predict": 1, "grammar": ""})
    both = {"grammar": "", "json_schema": {"type": "array"}}
    await client.post(COMPLETION, json={"prompt": "a", "n_predict": 1, **both})
    texts = [request.params.grammar and request.params.grammar.text for request in engine.requests]
    assert texts == ['root ::= "a"', '{"type":"object"}', None, '{"type":"array"}']


async def test_properties_name_the_window_and_the_template(client, engine):
    engine.model_info = dataclasses.replace(INFO, chat_template="{{ x }}")
    page = (await client.get("/props")).json()
    LlamaProperties.model_validate(page, strict=True)
    assert page["default_generation_settings"]["n_ctx"] == INFO.max_model_len
    assert (page["model_alias"], page["chat_template"]) == (INFO.served_names[0], "{{ x }}")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETION, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETION, {"prompt": "a", "n_probs": 3}, "n_probs"),
        (COMPLETION, {"prompt": "a", "temperature": 9}, "temperature"),
        (COMPLETION, {"prompt": "a", "grammar": "refuse"}, "grammar"),
        (COMPLETION, {"prompt": "a", "json_schema": {"title": "refuse"}}, "json_schema"),
        (COMPLETION, {"prompt": "a", "grammar": "b", "json_schema": {}}, "grammar"),
        (INFILL, {"input_prefix": "a"}, "input_suffix"),
        (INFILL, {"input_extra": [{}]}, "input_extra[0].text"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(client, engine, path, body, param):
    reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "structured_outputs" not in reply.text
    assert not engine.requests
