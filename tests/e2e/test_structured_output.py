"""Structured output over real HTTP, from the built-in model with its real tokenizer."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Literal

import httpx
import pydantic
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.e2e.serving import RunningServer
from tests.engine.grammars.test_grammar_compiler import ENDLESS

pytestmark = pytest.mark.night

CHAT = [{"role": "user", "content": "Write a JSON object with name and age"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=40)
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["calm", "wild"] | None


@pytest.fixture
async def client(equipped_server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{equipped_server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def complete(client: AsyncOpenAI, **outputs: object) -> list[str]:
    """Three texts of 200 tokens at most, as wild as can be."""
    answer = await client.completions.create(
        model="tokenyard-demo",
        prompt="Once upon a time",
        n=3,
        seed=1,
        max_tokens=200,
        temperature=2.0,
        extra_body={"structured_outputs": outputs},
    )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    return [choice.text for choice in answer.choices]


async def test_the_sdk_parses_what_comes_back_into_its_model(client: AsyncOpenAI) -> None:
    for seed in range(3):
        answer = await client.chat.completions.parse(
            model="tokenyard-demo", messages=CHAT, response_format=Person, temperature=1.5, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Person)


async def test_a_stream_joins_to_the_same_text(client: AsyncOpenAI) -> None:
    schema = {"name": "person", "strict": True, "schema": Person.model_json_schema()}
    asked = {
        "model": "tokenyard-demo",
        "messages": CHAT,
        "seed": 5,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    Person.model_validate_json("".join(pieces))


async def test_json_object_is_an_object(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tokenyard-demo",
        messages=CHAT,
        temperature=0,
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


async def test_a_regular_expression_is_matched(client: AsyncOpenAI) -> None:
    for text in await complete(client, regex=r"[A-Z][a-z]{3,9}: [0-9]{2}\.[0-9]"):
        assert re.fullmatch(r"[A-Z][a-z]{3,9}: [0-9]{2}\.[0-9]", text)


async def test_one_of_the_choices_is_taken(client: AsyncOpenAI) -> None:
    assert set(await complete(client, choice=["red", "green\nblue", 'quo"te 😀'])) <= {
        "red",
        "green\nblue",
        'quo"te 😀',
    }


@pytest.mark.parametrize(
    "grammar",
    [
        'start: pair (", " pair)? "."\npair: WORD "=" /[0-9]{1,3}/\nWORD: /[a-z]{2,8}/\n',
        'root ::= pair (", " pair)? "."\npair ::= [a-z]{2,8} "=" [0-9]{1,3}\n',
    ],
    ids=["Lark", "GBNF"],
)
async def test_a_grammar_is_followed(client: AsyncOpenAI, grammar: str) -> None:
    for text in await complete(client, grammar=grammar):
        assert re.fullmatch(r"[a-z]{2,8}=[0-9]{1,3}(, [a-z]{2,8}=[0-9]{1,3})?\.", text)


async def test_a_hopeless_schema_is_refused_in_time_while_a_stream_goes_on(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tokenyard-demo",
        prompt="Once",
        max_tokens=400,
        stream=True,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    arrivals_s = []

    async def read() -> None:
        async for _ in stream:
            arrivals_s.append(time.monotonic())

    reader = asyncio.create_task(read())
    started_s = time.monotonic()
    with pytest.raises(BadRequestError) as caught:
        await client.completions.create(
            model="tokenyard-demo",
            prompt="x",
            extra_body={"structured_outputs": {"json": json.loads(ENDLESS.text)}},
        )
    took_s = time.monotonic() - started_s
    await reader
    assert took_s < 5.0
    assert caught.value.param == "structured_outputs.json"
    assert "make it simpler" in caught.value.message
    meanwhile = [each for each in arrivals_s if started_s < each < started_s + 1.0]
    assert len(meanwhile) > 5


async def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(client: AsyncOpenAI) -> None:
    schema = {"name": "x", "schema": {"not": {"type": "string"}}}
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(
            model="tokenyard-demo",
            messages=CHAT,
            response_format={"type": "json_schema", "json_schema": schema},
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "not" in caught.value.message


async def test_a_costly_schema_for_many_choices_holds_up_nobody_else(
    equipped_server: RunningServer, client: AsyncOpenAI
) -> None:
    """The worker compiles it for each choice, in the loop that serves everybody."""
    engine_pid = equipped_server.engine_pid
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(2000)}}
    streaming = await client.completions.create(
        model="tokenyard-demo", prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    hopeless = asyncio.create_task(
        client.completions.create(
            model="tokenyard-demo",
            prompt="x",
            n=128,
            max_tokens=2,
            extra_body={"structured_outputs": {"json": schema}},
        )
    )
    last_s, longest_s = time.monotonic(), 0.0
    async for _ in streaming:
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        if hopeless.done():
            break
    await streaming.close()
    with pytest.raises(BadRequestError, match="make it simpler"):
        await hopeless
    assert longest_s < 5
    assert equipped_server.engine_pid == engine_pid


async def test_a_grammar_that_fails_under_way_is_the_callers_fault_and_refused_from_then_on(
    client: AsyncOpenAI,
) -> None:
    asked = {
        "model": "tokenyard-demo",
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "temperature": 2.0,
        "extra_body": {"structured_outputs": {"regex": "(.*a.{50}){20}"}},
    }
    with pytest.raises(BadRequestError, match="the grammar failed") as told:
        await client.completions.create(**asked)
    assert told.value.code == "invalid_grammar"
    with pytest.raises(BadRequestError, match="an earlier request with it was ended") as told:
        await client.completions.create(**asked)
    assert told.value.param == "structured_outputs.regex"


async def test_in_a_stream_a_grammar_that_fails_under_way_is_its_last_event_after_the_text_so_far(
    client: AsyncOpenAI, equipped_server: RunningServer
) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "temperature": 2.0,
        "stream": True,
        "seed": 1,
        "structured_outputs": {"regex": "(.*a.{50}){21}"},
    }
    beside = asyncio.create_task(
        client.completions.create(
            model="tokenyard-demo", prompt="Once", max_tokens=100, extra_body={"ignore_eos": True}
        )
    )
    async with httpx.AsyncClient(base_url=equipped_server.url, timeout=60) as plain:
        reply = await plain.post("/v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    *chunks, error, done = events
    assert (reply.status_code, done) == (200, "[DONE]")
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices)
    assert {choice["finish_reason"] for choice in choices} == {None}
    told = json.loads(error)["error"]
    assert (told["code"], told["type"]) == ("invalid_grammar", "invalid_request_error")
    assert (await beside).usage.completion_tokens == 100


async def test_choices_that_all_grow_dear_end_and_a_stream_beside_them_goes_on(
    client: AsyncOpenAI, equipped_server: RunningServer
) -> None:
    grammar = "start: s\ns: /[a-z ]/ | s s | s s s | s s s s"
    stream = await client.completions.create(
        model="tokenyard-demo", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(BadRequestError) as told:
        await client.completions.create(
            model="tokenyard-demo",
            prompt="Once",
            n=64,
            max_tokens=1000,
            extra_body={"structured_outputs": {"grammar": grammar}, "min_tokens": 900},
        )
    assert told.value.code == "invalid_grammar"
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"
