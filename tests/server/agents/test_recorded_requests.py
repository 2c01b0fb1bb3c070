"""The second turn of each agent's loop, as it came over the wire: its shape, with texts of our own.

Recorded through a proxy from the programs in tests/clients/test_agents.py, and from aider.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.fake_engine import INFO

FOLDER = Path(__file__).parent
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
SHOWN = {"aider": 0, "claude_code": 24, "codex": 12, "opencode": 10}
"""Number of functions that the model is shown: Codex brings seven, and five in a namespace."""
LEFT_OUT = {"codex": "tools.web_search"}


@pytest.mark.parametrize("name", RECORDED)
async def test_the_second_turn_of_a_loop_is_answered_with_all_that_was_said(client, engine, name):
    recorded = RECORDED[name]
    engine.model_info = replace(
        INFO, served_names=("parrot",), chat_template="<tool_call>", max_model_len=2**20
    )
    engine.texts = ("Done.",)
    limit = "max_output_tokens" if recorded["path"] == "/v1/responses" else "max_tokens"
    body = {**recorded["body"], limit: 1}
    reply = await client.post(recorded["path"], json=body, headers=recorded["headers"])
    assert reply.status_code == 200, reply.text
    assert "Done." in reply.text
    ((messages, options),) = engine.chats
    assert len(options.tools) == SHOWN[name]
    assert reply.headers.get("x-tokenyard-ignored") == LEFT_OUT.get(name)
    if options.tools:
        *_, call, result = messages
        assert call["tool_calls"][0]["id"] == result["tool_call_id"]
        assert "cat note.txt" in call["tool_calls"][0]["function"]["arguments"]
    words = json.dumps(messages).count("Words of our own.")
    assert words == _num_texts(recorded["body"]), "no text was left out"


def _num_texts(body: dict) -> int:
    said = {name: body[name] for name in ("messages", "input", "system") if name in body}
    return json.dumps(said).count("Words of our own.")
