"""The streams of /v1/chat/completions that tests/golden/chat_*.sse hold to the letter.

Owns: which requests, and what differs from run to run. `python -m tests.server.golden_streams` writes them
anew; look at the difference before you keep it.
"""

import asyncio
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import RequestFailed
from engine.types import FinishReason
from server.app import build_app
from tests.server.conftest import Settings, connect
from tests.server.fake_engine import INFO, FakeEngine

FOLDER = Path(__file__).resolve().parents[1] / "golden"
_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "wait")]
_DIALECT = dataclasses.replace(INFO, chat_template="<tool_call> <think> </think>")
_CALLS = (
    *("I ", "will.\n", "<tool_call>", '{"name": "lo', 'ok", "arguments": {"at"', ': "sea"}}', "</tool_call>"),
    *("\n<tool_call>", '{"name": "wait"', "}", "</tool_call>"),
)
_THOUGHTS = ("<think>", "\nHm", ".\n", "</think>", "\n\n", "Yes")


@dataclass(frozen=True)
class Golden:
    """One stream: the request, and the engine that answers it."""

    body: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


GOLDEN = {
    "plain": Golden(engine={"texts": ("Hello", ",", " world")}),
    "two_choices": Golden({"n": 2}, {"texts": ("a", "b")}),
    "logprobs": Golden({"logprobs": True, "top_logprobs": 2}, {"texts": ("é", "")}),
    "usage": Golden({"stream_options": {"include_usage": True}}, {"texts": ("Hi", "!")}),
    "usage_in_every_chunk": Golden(
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"texts": ("Hi", "")}
    ),
    "tools": Golden({"tools": _TOOLS}, {"texts": _CALLS, "model_info": _DIALECT}),
    "required_tool": Golden(
        {"tools": _TOOLS, "tool_choice": "required"},
        {"texts": ('[{"name": "wait", ', '"parameters": {', "}}]")},
    ),
    "named_tool": Golden({"tools": _TOOLS, "tool_choice": _TOOLS[0]}, {"texts": ('{"at"', ': "sea"}')}),
    "reasoning": Golden(
        {"stream_options": {"include_usage": True}}, {"texts": _THOUGHTS, "model_info": _DIALECT}
    ),
    "error": Golden(
        engine={"texts": ("Hello", ","), "error_after": 1, "error": RequestFailed("logits are not finite")}
    ),
}

_VARIES = (
    (r"chatcmpl-[0-9a-f]{32}", "chatcmpl-ID"),
    (r'"created":\d+', '"created":0'),
    (r"fp_[0-9a-f]{12}", "fp_0"),
    (r"req_\w+", "req_ID"),
)


async def stream_of(golden: Golden) -> str:
    """Events as on the wire, with what varies replaced. Calls are numbered in order of appearance."""
    engine = FakeEngine(end_as=FinishReason.STOP, **golden.engine)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": len(engine.texts)}
    async with connect(build_app(engine, Settings())) as client:
        text = (await client.post("/v1/chat/completions", json={**body, **golden.body})).text
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text)
    ids = dict.fromkeys(re.findall(r"call_[0-9a-f]{24}", text))
    for number, call_id in enumerate(ids):
        text = text.replace(call_id, f"call_{number}")
    return text


async def _write() -> None:
    for name, golden in GOLDEN.items():
        (FOLDER / f"chat_{name}.sse").write_text(await stream_of(golden), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_write())
