"""Whatever a model does, the events of its response tell it once, in order, and end."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from engine.types import SamplingParams, TokenOutput
from server.api.responses.events import ResponseStream
from server.api.responses.models import ResponseEvent, ResponseObject
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.replies import ResponsePlan
from server.api.responses.tools import Toolbox
from server.edge.error_replies import ErrorReply

USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}
OUTPUT = TokenOutput(index=0, text="", token_ids=())


class FakeChat:
    """The chunks of a chat completion, as they are given."""

    def __init__(self, chunks: list[list[dict[str, Any]]]) -> None:
        self._chunks = iter(chunks)

    def update(self, prompt_index: int, output: TokenOutput) -> list[dict[str, Any]]:
        return [{"choices": [choice]} for choice in next(self._chunks)]

    def finish(self) -> list[dict[str, Any]]:
        return [{"choices": [], "usage": USAGE}]


def choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def piece(kind: str, text: str, number: int) -> list[dict[str, Any]]:
    match kind:
        case "text":
            return [choice({"content": text})]
        case "reasoning":
            return [choice({"reasoning": text, "reasoning_content": text})]
        case "call":
            function = {"name": "f", "arguments": ""}
            call = {"index": number, "id": f"call_{number}", "type": "function", "function": function}
            arguments = {"index": number, "function": {"arguments": text}}
            return [choice({"tool_calls": [call]}), choice({"tool_calls": [arguments]})]
        case _:
            return []


pieces = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning", "call", "nothing"]), st.text(min_size=1)), max_size=12
)


def new_stream(chunks: list[list[dict[str, Any]]], ends: list[dict[str, Any]]) -> ResponseStream:
    plan = ResponsePlan(
        id="resp_1",
        created_s=1,
        model="fake",
        body=ResponsesRequest.model_validate({"input": "hi"}),
        params=SamplingParams(),
        is_stored=True,
        tools=Toolbox({}),
    )
    return ResponseStream(plan, FakeChat(chunks), on_end=ends.append, unix_time_s=lambda: 2.0)


def check(events: list[dict[str, Any]], said: list[tuple[str, str]]) -> None:
    events = orjson.loads(orjson.dumps(events))
    for event in events:
        ResponseEvent.model_validate(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1]["response"]
    ResponseObject.model_validate(final, strict=True)
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in done] == added
    assert len(set(added)) == len(added)
    assert final["output"] == done
    for kind, name in (
        ("text", "output_text"),
        ("reasoning", "reasoning_text"),
        ("call", "function_call_arguments"),
    ):
        told = "".join(event["delta"] for event in events if event["type"] == f"response.{name}.delta")
        assert told == "".join(text for what, text in said if what == kind)
        places = {event["output_index"] for event in events if event["type"] == f"response.{name}.delta"}
        assert all(final["output"][place]["id"] == added[place] for place in places)


@given(pieces, st.sampled_from(["stop", "length", "timeout", "tool_calls"]))
def test_a_whole_stream_tells_each_thing_once(said, reason):
    chunks = [piece(kind, text, number) for number, (kind, text) in enumerate(said)]
    ends: list[dict[str, Any]] = []
    stream = new_stream([*chunks, [choice({}, reason)]], ends)
    events = [event for _ in range(len(chunks) + 1) for event in stream.update(0, OUTPUT)] + stream.finish()
    check(events, said)
    is_complete = reason in ("stop", "tool_calls")
    assert events[-1]["type"] == ("response.completed" if is_complete else "response.incomplete")
    assert ends == [events[-1]["response"]]
    assert events[-1]["response"]["output"]


@given(pieces)
def test_a_broken_stream_tells_what_there_was(said):
    chunks = [piece(kind, text, number) for number, (kind, text) in enumerate(said)]
    ends: list[dict[str, Any]] = []
    stream = new_stream(chunks, ends)
    error = ErrorReply(status=500, message="no", type="server_error", param=None, code="model_error")
    events = [event for _ in chunks for event in stream.update(0, OUTPUT)] + stream.fail(error)
    check(events, said)
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "no"}
    assert ends == []
