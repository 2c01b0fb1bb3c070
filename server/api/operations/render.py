"""POST .../render: prompts of requests as token ids, for routers that choose a replica by cached prefixes.

Owns: the shape, which is that of vLLM's renderers.
Never: how a prompt is made: that is the way of the request itself.

A render asks the queue for no room and compiles no grammar: a full queue must not blind a router.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.anthropic.input import chat_request_of, in_their_words
from server.api.anthropic.messages import AnthropicErrorBody
from server.api.anthropic.protocol import MESSAGES_REFUSALS, MessagesRequest
from server.api.chat.protocol import CHAT_REFUSALS, ChatCompletionRequest
from server.api.chat.turn import prompt_of
from server.api.completions.protocol import COMPLETION_REFUSALS, CompletionRequest
from server.api.completions.requests import check_completion, encode_prompts
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import (
    Endpoint,
    ReplyList,
    ReplyModel,
    documentation,
    json_reply,
)
from server.edge.http.json_body import read_request
from server.reply.generate.answering import new_reply_id
from server.reply.generate.protocol import GenerationFields, SamplingFields, ServiceFields
from server.reply.pictures.placing import ChatPrompt

_SAMPLING = {*SamplingFields.model_fields} - {*ServiceFields.model_fields}
_SAMPLING |= {"max_tokens", "max_completion_tokens", "n", "stop"}


class PictureRange(ReplyModel):
    offset: int
    length: int


class RenderedPictures(ReplyModel):
    image: list[PictureRange]


class PictureHashes(ReplyModel):
    image: list[str]


class RenderedFeatures(ReplyModel):
    """Places of the pictures of a prompt, and digests of them."""

    mm_placeholders: RenderedPictures
    mm_hashes: PictureHashes


class Rendered(ReplyModel):
    """A prompt, and what its request says about it."""

    request_id: str
    token_ids: list[int]
    token_offsets: None
    features: RenderedFeatures | None
    """Pictures of the prompt; null if it is text alone."""
    sampling_params: dict[str, Any]
    """Fields of sampling that the request has."""
    model: str
    stream: bool
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class RenderedPrompts(ReplyList):
    """Prompts of a completion, in their order."""

    root: list[Rendered]


router = APIRouter()
ENDPOINT = Endpoint(router=router)


@router.post("/v1/completions/render", **documentation(RenderedPrompts, request=CompletionRequest))
async def render_completion(request: Request) -> Response:
    """Return the token ids of each prompt of a completion."""
    body = await read_request(request, CompletionRequest, COMPLETION_REFUSALS, from_headers={})
    engine = edge_of(request).engine
    check_completion(body, engine.info)
    prompts = await encode_prompts(engine, body)
    return json_reply([_rendered(request, body, ChatPrompt(prompt.token_ids), "cmpl") for prompt in prompts])


@router.post("/v1/chat/completions/render", **documentation(Rendered, request=ChatCompletionRequest))
async def render_chat(request: Request) -> Response:
    """Return the token ids of a conversation's prompt."""
    body = await read_request(request, ChatCompletionRequest, CHAT_REFUSALS, from_headers={})
    prompt = await prompt_of(request, body)
    return json_reply(_rendered(request, body, prompt, "chatcmpl"))


@router.post(
    "/v1/messages/render", **documentation(Rendered, request=MessagesRequest, errors=AnthropicErrorBody)
)
async def render_messages(request: Request) -> Response:
    """Return the token ids of a conversation's prompt, in Anthropic's words."""
    body = await read_request(request, MessagesRequest, MESSAGES_REFUSALS, from_headers={})
    chat = chat_request_of(body)
    with in_their_words(body):
        prompt = await prompt_of(request, chat)
    return json_reply(_rendered(request, chat, prompt, "chatcmpl"))


def _rendered(request: Request, body: GenerationFields, prompt: ChatPrompt, kind: str) -> dict[str, Any]:
    sampling = body.model_dump(include=_SAMPLING, exclude_none=True)
    if "max_completion_tokens" in sampling:  # which is the same by a later name
        sampling["max_tokens"] = sampling.pop("max_completion_tokens")
    return {
        "request_id": new_reply_id(kind),
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": _features(prompt) if prompt.pictures else None,
        "sampling_params": sampling,
        "model": body.model or edge_of(request).engine.info.served_names[0],
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "kv_transfer_params": None,
    }


def _features(prompt: ChatPrompt) -> dict[str, Any]:
    return {
        "mm_placeholders": {
            "image": [{"offset": each.offset, "length": each.num_tokens} for each in prompt.pictures]
        },
        "mm_hashes": {"image": [each.content for each in prompt.pictures]},
    }
