"""The making of one response: its conversation, its chat turn, and the stored part of it.

Owns: the way from a request, fresh or read back from disk, to a reply that is ready to be made.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from engine.errors import ContextLengthExceeded, RequestRejected, TooManyPictures
from engine.types import GenerationRequest
from server.api.chat.replies import OnlyChoice
from server.api.chat.turn import ChatTurn, prepare_turn, prompt_of, raw_text
from server.api.responses.events import OnEnd, ResponseStream
from server.api.responses.input import (
    chat_of,
    cut_before,
    has_pictures,
    ignored_names,
    in_our_words,
    said_item,
    turns,
)
from server.api.responses.protocol import InputItem, ResponsesRequest
from server.api.responses.replies import ResponsePlan
from server.api.responses.store import StoredResponse, weigh
from server.api.responses.tools import Toolbox, toolbox_of
from server.edge.http.edge import Edge, edge_of
from server.edge.http.ignored import note_ignored
from server.reply.generate.answering import new_head
from server.reply.generate.calls import Origin
from server.reply.generate.replies import ReplyPlan

Items = Sequence[InputItem]
FittedT = TypeVar("FittedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTask:
    body: ResponsesRequest
    earlier: StoredResponse | None
    """The response that it goes on from."""
    origin: Origin
    created_s: int
    is_stored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """A response that can be made now."""

    request: GenerationRequest
    reply: ResponseStream
    is_read_whole: bool
    """Whether it is enough to look at the reply once all of it is there."""


def conversation_of(body: ResponsesRequest, earlier: StoredResponse | None) -> Items:
    """The items before the answer. Raises RequestRejected if there are none."""
    items = (*(earlier.conversation if earlier else ()), *body.input)
    if not items and body.instructions is None:
        raise RequestRejected("input must not be an empty list", param="input")
    return items


async def begin_making(edge: Edge, task: ResponseTask, on_end: OnEnd = lambda _: None) -> Making:
    """Prepare the chat turn of a response. Raises RequestRejected, Overloaded, EngineUnavailable."""
    items = conversation_of(task.body, task.earlier)
    tools = toolbox_of(task.body, items)
    task.origin.note(ignored_names(task.body, tools))
    turn = await _prepare(edge, task, items, tools)
    head = new_head(task.origin, edge.engine.info)
    plan = ResponsePlan(
        id=head.id,
        created_s=task.created_s,
        model=head.model,
        body=task.body,
        params=turn.request.params,
        is_stored=task.is_stored,
        tools=tools,
        prompt_ids=turn.prompt_ids,
        raw_text=partial(raw_text, edge.engine) if task.body.enable_response_messages else None,
    )
    choice = OnlyChoice(ReplyPlan(head=head, num_prompt_tokens=(len(turn.prompt_ids),)), turn.reading)
    return Making(
        request=turn.request,
        reply=ResponseStream(plan, choice, on_end=on_end, unix_time_s=time.time),
        is_read_whole=not task.body.stream and turn.reading.counts_by_tokens,
    )


async def count_input_tokens(request: Request, body: ResponsesRequest, items: Items) -> int:
    """Tokens of the prompt that a response would have. Raises RequestRejected, Overloaded."""
    tools, max_model_len = toolbox_of(body, items), edge_of(request).engine.info.max_model_len
    note_ignored(request, ignored_names(body, tools))

    async def count(items: Items) -> int:
        prompt = await prompt_of(request, await chat_of(body, items, tools))
        num_tokens = len(prompt.token_ids)
        if body.truncation == "auto" and num_tokens + (body.max_output_tokens or 1) > max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, which with those of the reply are more than the context"
                f" window of {max_model_len} tokens",
                param="input",
            )
        return num_tokens

    with in_our_words(tools):
        return await _that_fits(body, items, count)


def stored_response(
    owner: str, body: ResponsesRequest, earlier: StoredResponse | None, response: dict[str, Any]
) -> StoredResponse:
    """Make the entry of the store for a response at its end."""
    new = (*body.input, *map(said_item, response["output"]))
    return StoredResponse(
        owner=owner,
        body=orjson.dumps(response),
        input=tuple(body.input),
        conversation=(*(earlier.conversation if earlier else ()), *new),
        num_conversation_bytes=weigh(new) + (earlier.num_conversation_bytes if earlier else 0),
    )


async def _prepare(edge: Edge, task: ResponseTask, items: Items, tools: Toolbox) -> ChatTurn:
    """The chat path up to the first token, its errors in the words of this endpoint."""
    has_tries = task.body.truncation == "auto" and edge.engine.info.vision is not None and has_pictures(items)
    keeper = edge.engine.pictures.new_lease() if has_tries else None

    async def turn_of(items: Items) -> ChatTurn:
        return await prepare_turn(edge, await chat_of(task.body, items, tools), task.origin, keeper)

    try:
        with in_our_words(tools):
            return await _that_fits(task.body, items, turn_of)
    finally:
        if keeper is not None:
            keeper.release()


async def _that_fits(
    body: ResponsesRequest, items: Items, turn_of: Callable[[Items], Awaitable[FittedT]]
) -> FittedT:
    """Leave out as few of the oldest turns as possible, if the body allows it.

    Raises ContextLengthExceeded and TooManyPictures if one is too much.
    """
    try:
        return await turn_of(items)
    except (ContextLengthExceeded, TooManyPictures):
        places = turns(items) if body.truncation == "auto" else []
        if not places:
            raise
    # The fewer turns, the shorter: each try rules out half of the remaining ones.
    low, high = 0, len(places) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            await turn_of(cut_before(items, places[middle]))
        except (ContextLengthExceeded, TooManyPictures):
            low = middle + 1
        else:
            high = middle
    return await turn_of(cut_before(items, places[low]))
