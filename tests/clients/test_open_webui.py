"""The calls of Open WebUI, replayed: as an OpenAI connection, and as an Ollama connection.

Source: its routers for both, which send these paths, headers and fields, and read these parts of the replies.
"""

import json

import httpx
import pytest

pytestmark = pytest.mark.night

MODEL = "tokenyard-demo"
HEADERS = {
    "authorization": "Bearer none",
    "x-openwebui-user-name": "A%20User",
    "x-openwebui-user-id": "4f2c",
    "x-openwebui-user-email": "user@example.org",
    "x-openwebui-user-role": "user",
    "x-openwebui-chat-id": "c0ffee",
}
COUNT = "3, 4, 5, 6, 7, 8"
ASKED = [{"role": "user", "content": "Count from 3 to 8."}]


@pytest.fixture
def client(demo_server):
    with httpx.Client(base_url=demo_server.url, headers=HEADERS, timeout=60) as client:
        yield client


def test_a_connection_is_verified_and_its_models_are_listed(client):
    models = client.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert models["data"][0]["object"] == "model"


def test_a_chat_is_streamed_with_its_usage_and_a_done(client):
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, *ASKED],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 30,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())
    )
    assert text.strip()
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_titles_tags_and_follow_ups_are_asked_for_whole(client):
    for task in ("title_generation", "tags_generation", "follow_up_generation"):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"### Task: {task}. Answer in JSON."}],
            "stream": False,
            "max_completion_tokens": 20,
        }
        reply = client.post("/v1/chat/completions", json=body).json()
        assert isinstance(reply["choices"][0]["message"]["content"], str)


def test_native_tools_are_called_and_their_results_read(client):
    weather = {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    tools = [{"type": "function", "function": weather}]
    asked = [{"role": "user", "content": "What is the weather in Bonn?"}]
    body = {"model": MODEL, "messages": asked, "tools": tools, "stream": True, "max_tokens": 60}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    calls: dict[int, dict] = {}
    for line in lines[:-1]:
        for choice in json.loads(line).get("choices", ()):
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] = piece.get("id") or call["id"]
                call["name"] += piece["function"].get("name") or ""
                call["arguments"] += piece["function"].get("arguments") or ""
    assert calls[0]["name"] == "get_weather"
    json.loads(calls[0]["arguments"])
    call = {"id": calls[0]["id"], "type": "function", "function": calls[0]}
    call["function"].pop("id")
    messages = [
        *asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    answer = client.post("/v1/chat/completions", json={**body, "messages": messages, "stream": False})
    assert answer.status_code == 200, answer.text


def test_an_ollama_connection_lists_describes_and_chats(client):
    assert client.get("/api/version").json()["version"]
    for path in ("/api/tags", "/api/ps"):
        (model,) = client.get(path).json()["models"]
        assert (model["model"], model["name"]) == (MODEL, MODEL)
    assert "completion" in client.post("/api/show", json={"name": MODEL}).json()["capabilities"]
    body = {
        "model": MODEL,
        "messages": ASKED,
        "options": {"temperature": 0, "num_predict": 30, "num_ctx": 2048},
        "stream": True,
        "keep_alive": "5m",
    }
    with client.stream("POST", "/api/chat", json=body) as reply:
        lines = [json.loads(line) for line in reply.iter_lines() if line]
    assert "".join(line["message"]["content"] for line in lines) == COUNT
    assert lines[-1]["done"]
    assert lines[-1]["eval_count"] > 0


def test_an_error_says_what_is_wrong_where_the_page_looks_for_it(client):
    body = {"model": "not-there", "messages": ASKED, "stream": True}
    refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, bool(refused.json()["error"]["message"])) == (404, True)
    refused = client.post("/api/chat", json=body)
    assert (refused.status_code, isinstance(refused.json()["error"], str)) == (404, True)
