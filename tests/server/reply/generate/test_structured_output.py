"""Fields that ask for structure: what is refused, and what grammar the rest comes to."""

import json
from dataclasses import replace

import pytest
from fastapi import FastAPI

from engine.types import Grammar, GrammarKind
from server.app import build_app
from server.reply.generate.structured_output import MAX_GRAMMAR_BYTES, choice_grammar, json_schema_grammar
from tests.server.conftest import Settings
from tests.server.fake_engine import INFO, FakeEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}}
NAMED = {"name": "thing", "schema": SCHEMA}


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return build_app(engine, Settings(max_body_bytes=2**20))  # what is too large here fits the body


def of_format(**json_schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def of_outputs(**fields) -> dict:
    return {"structured_outputs": fields}


BAD = [
    ({"response_format": "json"}, "response_format", "invalid_value"),
    ({"response_format": {}}, "response_format.type", "missing_field"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_field"),
    (
        {"response_format": {"type": "json_object", "json_schema": NAMED}},
        "response_format.json_schema",
        "invalid_value",
    ),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "invalid_value"),
    (
        {"response_format": {"type": "json_object", "schema": {"const": "refuse"}}},
        "response_format.schema",
        "invalid_grammar",
    ),
    (of_format(name="", schema=SCHEMA), "response_format.json_schema.name", "invalid_value"),
    (of_format(name="a b", schema=SCHEMA), "response_format.json_schema.name", "invalid_value"),
    (of_format(name="x" * 65, schema=SCHEMA), "response_format.json_schema.name", "invalid_value"),
    (of_format(name="x"), "response_format.json_schema.schema", "missing_field"),
    (of_format(name="x", schema=[]), "response_format.json_schema.schema", "invalid_value"),
    (of_format(name="x", schema="{}"), "response_format.json_schema.schema", "invalid_value"),
    (
        of_format(name="x", schema={"enum": ["y" * MAX_GRAMMAR_BYTES]}),
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (of_format(**NAMED, strict="yes"), "response_format.json_schema.strict", "invalid_value"),
    (of_format(**NAMED, description="d" * 1025), "response_format.json_schema.description", "invalid_value"),
    (
        of_format(name="x", schema={"const": "refuse"}),
        "response_format.json_schema.schema",
        "invalid_grammar",
    ),
    (of_outputs(), "structured_outputs", "invalid_value"),
    (of_outputs(json_object=False), "structured_outputs", "invalid_value"),
    (of_outputs(regex="a", json=SCHEMA), "structured_outputs", "invalid_value"),
    (of_outputs(regex="a", json_object=True), "structured_outputs", "invalid_value"),
    (of_outputs(structural_tag="{}", regex="a"), "structured_outputs", "invalid_value"),
    (of_outputs(json='{"type": '), "structured_outputs.json", "invalid_value"),
    (of_outputs(json="[]"), "structured_outputs.json", "invalid_value"),
    (of_outputs(json='{"a":' * 300 + "1" + "}" * 300), "structured_outputs.json", "invalid_value"),
    (of_outputs(regex="a", disable_any_whitespace=True), "structured_outputs", "invalid_value"),
    (of_outputs(regex=""), "structured_outputs.regex", "invalid_value"),
    (of_outputs(regex="x" * 4097), "structured_outputs.regex", "invalid_value"),
    (of_outputs(regex="refuse"), "structured_outputs.regex", "invalid_grammar"),
    (of_outputs(choice=[]), "structured_outputs.choice", "invalid_value"),
    (of_outputs(choice=[""]), "structured_outputs.choice[0]", "invalid_value"),
    (of_outputs(choice="yes"), "structured_outputs.choice", "invalid_value"),
    (of_outputs(choice=["x"] * 1025), "structured_outputs.choice", "invalid_value"),
    (of_outputs(choice=["x" * 1025]), "structured_outputs.choice[0]", "invalid_value"),
    (of_outputs(choice=["x" * 1000] * 66), "structured_outputs.choice", "invalid_value"),
    (of_outputs(choice=["refuse"]), "structured_outputs.choice", "invalid_grammar"),
    (of_outputs(grammar=""), "structured_outputs.grammar", "invalid_value"),
    (of_outputs(grammar="x" * (MAX_GRAMMAR_BYTES + 1)), "structured_outputs.grammar", "invalid_value"),
    (
        {**of_format(**NAMED), **of_outputs(regex="a")},
        "structured_outputs",
        "invalid_value",
    ),
    ({**of_outputs(regex="a"), "ignore_eos": True}, "ignore_eos", "invalid_value"),
    ({"guided_regex": "a"}, "guided_regex", "unsupported_parameter"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "param", "code"), BAD)
async def test_a_bad_field_is_named(client, engine, path, fields, param, code):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    response = await client.post(path, json={**prompt, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert not engine.requests


async def test_an_older_name_is_refused_with_the_one_that_is_understood(client):
    response = await client.post(COMPLETIONS, json={"prompt": "x", "guided_json": {}})
    assert response.json()["error"]["message"].endswith("use structured_outputs.json")


async def test_a_model_without_an_end_of_sequence_token_takes_no_grammar(client, engine):
    engine.model_info = replace(INFO, eos_token_ids=())
    response = await client.post(COMPLETIONS, json={"prompt": "x", **of_outputs(regex="a")})
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs.regex", "unsupported_parameter")


SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"null"}}}'
GOOD = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ),
    (of_outputs(json=SCHEMA_TEXT), (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    (
        of_outputs(json=SCHEMA, disable_any_whitespace=False, disable_additional_properties=False),
        (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ),
    (of_outputs(json_object=True), (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    (of_format(**NAMED), (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    (of_format(**NAMED, strict=False, description="d"), (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    (of_outputs(json=SCHEMA), (GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    (of_outputs(regex="a+", json_object=False, structural_tag=None), (GrammarKind.REGEX, "a+")),
    (of_outputs(choice=["yes", 'n"o']), (GrammarKind.LARK, 'start: "yes" | "n\\"o"')),
    (of_outputs(grammar='start: "x"'), (GrammarKind.LARK, 'start: "x"')),
    (
        {"response_format": {"type": "text"}, **of_outputs(regex="a")},
        (GrammarKind.REGEX, "a"),
    ),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("fields", "expected"), GOOD)
async def test_each_way_to_ask_comes_to_one_grammar(client, engine, path, fields, expected):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": ["hi", "ho"]}
    response = await client.post(path, json={**prompt, **fields, "max_tokens": 1})
    assert response.status_code == 200, response.text
    wanted = None if expected is None else Grammar(kind=expected[0], text=expected[1])
    assert {request.params.grammar for request in engine.requests} == {wanted}


def test_the_keys_of_a_schema_keep_their_order():
    assert json.loads(json_schema_grammar(SCHEMA).text) == SCHEMA
    assert json_schema_grammar(SCHEMA).text.index('"b"') < json_schema_grammar(SCHEMA).text.index('"a"')


def test_a_format_that_json_schema_does_not_know_is_an_annotation():
    schema = {
        "$defs": {"path": {"type": "string", "format": "path"}},
        "properties": {
            "format": {"enum": [{"format": "secret"}], "default": {"format": "secret"}},
            "const": {"type": "string", "format": "binary"},
            "when": {"anyOf": [{"format": "date"}, {"type": "integer", "format": "int32"}]},
            "refused": {"type": "string", "format": "regex"},
        },
    }
    assert json.loads(json_schema_grammar(schema).text) == {
        "$defs": {"path": {"type": "string"}},
        "properties": {
            "format": {"enum": [{"format": "secret"}], "default": {"format": "secret"}},
            "const": {"type": "string"},
            "when": {"anyOf": [{"format": "date"}, {"type": "integer"}]},
            "refused": {"type": "string", "format": "regex"},
        },
    }


def test_choices_of_any_characters_are_one_lark_rule():
    assert choice_grammar(["a\n", "😀"]).text == 'start: "a\\n" | "😀"'


@pytest.mark.parametrize(
    ("path", "body", "num_choices"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 3}, 3),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "best_of": 4}, 8),
        (CHAT, {"messages": MESSAGES, "n": 5}, 5),
        (CHAT, {"messages": MESSAGES}, 1),
    ],
)
async def test_a_grammar_is_tried_for_all_choices_that_will_need_it(client, engine, path, body, num_choices):
    reply = await client.post(path, json=body | of_outputs(regex="a+") | {"max_tokens": 2})
    assert reply.status_code == 200
    assert engine.grammar_choices == [num_choices]


@pytest.mark.parametrize(
    ("grammar", "compiled"),
    [
        ('?start: value\n!value.2: "a"\n  ?!_x : "b"', 'start: value\nvalue.2: "a"\n_x : "b"'),
        ('start: "a"\n? "b"', 'start: "a"\n? "b"'),
        ('start: "x"?\n!TERMINAL: "b"', 'start: "x"?\n!TERMINAL: "b"'),
    ],
)
async def test_marks_of_a_lark_rule_that_shape_its_tree_alone_are_left_out(client, engine, grammar, compiled):
    reply = await client.post("/v1/completions", json={"prompt": "x", **of_outputs(grammar=grammar)})
    assert reply.status_code == 200, reply.text
    assert engine.requests[-1].params.grammar.text == compiled
