"""Whatever a model does, the events of its response tell it once, in order, and end."""

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from engine.types import SamplingParams, TokenOutput
from server.api.chat.message_reader import Piece, ToolCall
from server.api.responses.events import ResponseStream
from server.api.responses.models import ResponseEvent, ResponseObject
from server.api.responses.protocol import ResponsesRequest
from server.api.responses.replies import ResponsePlan
from server.api.responses.tools import Toolbox
from server.edge.error_replies import ErrorReply
from server.reply.reading.events import Arguments, Content, Reasoning

USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 0},
}
OUTPUT = TokenOutput(index=0, text="", token_ids=())


class FakeChoice:
    """The pieces of a chat's reply, as they are given."""

    is_plain, stop_reason, ends_in_call = False, None, False

    def __init__(self, outputs: list[list[Piece]], finish_reason: str = "stop") -> None:
        self._outputs = iter(outputs)
        self.finish_reason = finish_reason

    def read(self, prompt_index: int, output: TokenOutput) -> list[Piece]:
        return next(self._outputs)

    def usage(self) -> dict[str, Any]:
        return USAGE


def piece(kind: str, text: str, number: int) -> list[Piece]:
    match kind:
        case "text":
            return [Content(text)]
        case "reasoning":
            return [Reasoning(text)]
        case "call":
            return [ToolCall(number, f"call_{number}", "f"), Arguments(number, text)]
        case _:
            return []


pieces = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning", "call", "nothing"]), st.text(min_size=1)), max_size=12
)


def new_stream(choice: FakeChoice, ends: list[dict[str, Any]]) -> ResponseStream:
    plan = ResponsePlan(
        id="resp_1",
        created_s=1,
        model="fake",
        body=ResponsesRequest.model_validate({"input": "hi"}),
        params=SamplingParams(),
        is_stored=True,
        tools=Toolbox({}),
    )
    return ResponseStream(plan, choice, on_end=ends.append, unix_time_s=lambda: 2.0)


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
    stream = new_stream(FakeChoice([*chunks, []], reason), ends)
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
    stream = new_stream(FakeChoice(chunks), ends)
    error = ErrorReply(status=500, message="no", type="server_error", param=None, code="model_error")
    events = [event for _ in chunks for event in stream.update(0, OUTPUT)] + stream.fail(error)
    check(events, said)
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "no"}
    assert ends == []
