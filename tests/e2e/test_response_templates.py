"""A checkpoint that brings a response template, served by the real command."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.serving import ROOT, RunningServer, running_server

pytestmark = pytest.mark.night

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
# The built-in model knows no marks: the first sentence is its reasoning.
TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open_pattern": r"(?:^|<think>\s*)", "close": "!"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
        "content": {},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = Path(shutil.copytree(ROOT / "engine/demo_model", tmp_path_factory.mktemp("models") / "demo"))
    chat_template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(chat_template.replace("if tools and", "if false and"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": TEMPLATE}))
    with running_server(tmp_path_factory.mktemp("template"), str(folder)) as server:
        yield server


async def test_replies_are_read_by_it_whole_and_streaming(server) -> None:
    prompt = "<|begin|><|user|>Hello<|end|><|assistant|>"
    fields = {"temperature": 0, "max_tokens": 60}
    body = {"prompt": prompt, "add_special_tokens": False, **fields}
    text = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
    first, _, rest = text.strip().partition("!")
    assert rest, text
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60) as sdk:
        ask = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS, **fields}
        whole = (await sdk.chat.completions.create(**ask)).choices[0].message
        async with sdk.chat.completions.stream(**ask) as stream:
            streamed = await stream.get_final_completion()
    for message in (whole, streamed.choices[0].message):
        assert (message.reasoning_content, message.content) == (first.strip(), rest.strip())
