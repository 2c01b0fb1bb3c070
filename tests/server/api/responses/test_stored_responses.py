"""Request of a stored response, page by page; and the extra fields that agents send to /v1/responses."""

import openai
import pytest

from server.api.responses.models import InputItemPage, ResponseObject
from server.app import build_app
from tests.server.api.responses.test_responses import PATH, create
from tests.server.conftest import Settings, connect

ITEMS = [
    {"role": "user", "content": "one"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"role": "assistant", "content": "two", "id": "msg_1"},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
    {"role": "user", "content": [{"type": "input_text", "text": text} for text in ("four", "five")]},
]


async def page(client, response_id: str, **query) -> dict:
    reply = await client.get(f"{PATH}/{response_id}/input_items", params=query)
    assert reply.status_code == 200, reply.text
    InputItemPage.model_validate(reply.json(), strict=True)
    return reply.json()


async def test_the_items_come_newest_first_as_they_were_sent(client):
    made = await create(client, input=ITEMS)
    listed = await page(client, made["id"])
    assert not listed["has_more"]
    assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][-1]["id"])
    items = listed["data"][::-1]
    assert (await page(client, made["id"], order="asc"))["data"] == items
    shapes = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
    assert shapes == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": text} for text in ("four", "five")],
        },
    ]
    assert [items[1]["id"], items[2]["id"]] == ["rs_1", "msg_1"]
    assert len({item["id"] for item in items}) == len(items)


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_pages_join_without_a_gap_even_where_ids_are_there_twice(client, order):
    items = [{"role": "user", "content": str(place), "id": "same"} for place in range(5)]
    made = await create(client, input=items)
    found, after = [], {}
    while True:
        listed = await page(client, made["id"], limit=2, order=order, **after)
        found += [item["content"][0]["text"] for item in listed["data"]]
        after = {"after": listed["last_id"]}
        if not listed["has_more"]:
            break
    assert found == [str(place) for place in (range(5) if order == "asc" else reversed(range(5)))]
    assert (await page(client, made["id"], order=order, **after))["data"] == []


async def test_items_of_an_earlier_response_are_listed_there(client):
    first = await create(client, input="a", max_output_tokens=2)
    second = await create(client, input="b", previous_response_id=first["id"])
    (item,) = (await page(client, second["id"]))["data"]
    assert item["content"] == [{"type": "input_text", "text": "b"}]


async def test_a_reference_stands_for_an_item_that_its_owner_has_stored(engine):
    async with connect(build_app(engine, Settings(api_keys=("mine", "yours")))) as client:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))

        async def reply_to(items, headers=mine):
            body = {"input": items, "max_output_tokens": 2}
            return await client.post(PATH, json=body, headers=headers)

        first = (await reply_to("abcd")).json()
        said = {"type": "item_reference", "id": first["output"][0]["id"]}
        asked = {"type": "item_reference", "id": first["id"].replace("resp", "msg") + "_in0"}
        again = {"role": "user", "content": "go on"}
        second = await reply_to([asked, said, again])
        assert second.status_code == 200, second.text
        messages, _ = engine.chats[-1]
        assert messages == [
            {"role": "user", "content": "abcd"},
            {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
            again,
        ]
        unknown = {"type": "item_reference", "id": "msg_1"}
        for items, headers in (([said], yours), ([unknown], mine), ([said, said], mine)):
            missing = await reply_to(items, headers)
            assert missing.status_code == 404, missing.text
            assert missing.json()["error"]["message"].startswith(f"Item with id '{items[0]['id']}' not found")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "1" * 5000}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "random"}, "order"),
        ({"after": "msg_none"}, "after"),
    ],
)
async def test_a_wrong_page_is_refused_by_name(client, query, param):
    made = await create(client)
    reply = await client.get(f"{PATH}/{made['id']}/input_items", params=query)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_only_what_is_stored_has_items_and_only_for_its_key(engine):
    async with connect(build_app(engine, Settings(api_keys=("mine", "yours")))) as client:
        mine, yours = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))
        made = [
            await client.post(PATH, json={"input": "hi", "store": store}, headers=mine)
            for store in (True, False)
        ]
        kept, dropped = (reply.json()["id"] for reply in made)
        for response_id, headers, status in (
            (kept, mine, 200),
            (kept, yours, 404),
            (kept, {}, 401),
            (dropped, mine, 404),
        ):
            place = f"{PATH}/{response_id}"
            assert (await client.get(f"{place}/input_items", headers=headers)).status_code == status
            refusal = 400 if status == 200 else status
            assert (await client.post(f"{place}/cancel", headers=headers)).status_code == refusal


async def test_the_sdk_walks_the_pages_and_hears_that_nothing_can_be_cancelled(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as sdk:
        made = await sdk.responses.create(model="fake", input=ITEMS)
        listed = [item async for item in sdk.responses.input_items.list(made.id, limit=4, order="asc")]
        assert [item.type for item in listed] == [item.get("type", "message") for item in ITEMS]
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await sdk.responses.cancel(made.id)


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
async def test_agents_may_ask_for_summaries_and_encrypted_reasoning(client, summary):
    response = await create(
        client,
        include=["reasoning.encrypted_content"],
        reasoning={"effort": "medium", "summary": summary, "generate_summary": summary},
        store=False,
        max_output_tokens=2,
    )
    ResponseObject.model_validate(response, strict=True)
    assert response["reasoning"] == {"effort": "medium", "summary": None}
    assert not response["store"]
    assert response["output"][0]["content"][0]["logprobs"] == []
