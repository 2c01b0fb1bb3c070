"""POST /tokenize and POST /detokenize: text to tokens, and back; GET /tokenizer_info.

Owns: the shapes of both, which are vLLM's.
Never: how messages are rendered: that is the chat path, so that counts agree with a chat's usage.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from engine.text.tokenizer import SpecialTokens
from server.api.chat.protocol import ChatCompletionRequest, Messages, ReasoningFields
from server.api.chat.tool_protocol import Tools
from server.api.chat.turn import prompt_of
from server.edge.http.edge import Engine, edge_of
from server.edge.http.endpoint import Endpoint, ReplyModel, documentation, json_reply
from server.edge.http.json_body import read_request
from server.edge.http.served_models import choose_by_query
from server.edge.wire_model import WireModel, shown_as
from server.reply.generate.long_reply import reply_of
from server.reply.generate.model_checks import check_token_ids
from server.reply.generate.protocol import MAX_PROMPT_TOKENS, Name, TemplateKwargs, Text

TOKENIZE_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {"chat_template": ()}
"""Fields refused by name, unless set to one of these values, or to null."""

_CHAT_FIELDS = (
    "thinking",
    "reasoning",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "tools",
)


class TokenizeRequest(ReasoningFields):
    """The body of POST /tokenize: a prompt, or messages, as they would be generated from."""

    model_config = shown_as(prompt="Once upon a time")

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Around a prompt, on by default; around messages off, since a chat template brings its own."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None
    """Return each token as the tokenizer spells it, too."""


_ANY_TEXT = "a"
_PLACES = ("name_or_path", "auto_map")
"""Entries that name folders of the machine where the checkpoint was made, or code."""
MAX_DECODED_TOKENS = 64 * 1024
"""To decode 64 Ki tokens takes 0.03 s, in which the tokenizer holds the interpreter's lock."""
_PIECE_TOKENS = 8 * 1024
"""Tokens that are written to a reply at once, so that others have their turn between two pieces: a text of
4 MiB has a hundred times as many, whose strings take 0.05 s to write as JSON and to free."""


class DetokenizeRequest(WireModel):
    """The body of POST /detokenize."""

    model_config = shown_as(tokens=[5, 6, 7])

    model: Name | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


class Tokenization(ReplyModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """Tokens as the tokenizer spells them."""


class Detokenization(ReplyModel):
    prompt: str


class TokenizerInfo(ReplyModel):
    """The checkpoint's tokenizer_config.json, and the chat template that is used."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str | None = None
    chat_template: str | None


router = APIRouter()
ENDPOINT = Endpoint(router=router, requests={TokenizeRequest: TOKENIZE_REFUSALS, DetokenizeRequest: ()})


@router.post("/tokenize", **documentation(Tokenization, request=TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of rendered messages."""
    body = await read_request(request, TokenizeRequest, TOKENIZE_REFUSALS, from_headers={})
    engine = edge_of(request).engine
    info = engine.info
    token_ids = await _encode(request, body)
    before = {"count": len(token_ids), "max_model_len": info.max_model_len}
    pieces = [orjson.dumps(before)[:-1] + b',"tokens":', *await _written(token_ids, _themselves)]
    strings = await _written(token_ids, engine.vocabulary_strings) if body.return_token_strs else [b"null"]
    return reply_of([*pieces, b',"token_strs":', *strings, b"}"])


async def _written(
    token_ids: Sequence[int], items_of: Callable[[Sequence[int]], Awaitable[Sequence[Any]]]
) -> list[bytes]:
    """Write a list of JSON, piece by piece."""
    pieces = [b"["]
    for start in range(0, len(token_ids), _PIECE_TOKENS):
        await asyncio.sleep(0)  # others have their turn
        items = orjson.dumps(await items_of(token_ids[start : start + _PIECE_TOKENS]))
        pieces.append((b"," if start else b"") + items[1:-1])
    return [*pieces, b"]"]


async def _themselves(token_ids: Sequence[int]) -> Sequence[int]:
    return token_ids


@router.post("/detokenize", **documentation(Detokenization, request=DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = await read_request(request, DetokenizeRequest, {}, from_headers={})
    engine = edge_of(request).engine
    info = engine.info
    if len(body.tokens) > MAX_DECODED_TOKENS:
        raise RequestRejected(
            f"tokens: {len(body.tokens)} are more than {MAX_DECODED_TOKENS}; send them in parts",
            param="tokens",
        )
    check_token_ids(body.tokens, info, param="tokens")
    return json_reply({"prompt": await engine.decode(body.tokens, SpecialTokens.KEEP)})


@router.get("/tokenizer_info", **documentation(TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """The configuration of the tokenizer, for clients that tokenize by themselves."""
    engine = choose_by_query(request).engine
    info = engine.info
    config = await engine.tokenizer_config()
    shown = {name: value for name, value in config.items() if name not in _PLACES}
    return json_reply({**shown, "chat_template": info.chat_template or None})


async def _encode(request: Request, body: TokenizeRequest) -> tuple[int, ...]:
    engine = edge_of(request).engine
    if body.messages is not None:
        return await _encode_chat(request, body)
    if body.prompt is None:
        raise RequestRejected("prompt or messages is required", param="prompt", code="missing_field")
    for name in _CHAT_FIELDS:
        if getattr(body, name) is not None:
            raise RequestRejected(f"{name} is for messages, not for a prompt", param=name)
    if body.add_special_tokens is False:
        return await engine.encode_plain(body.prompt)
    return await engine.encode(body.prompt)


async def _encode_chat(request: Request, body: TokenizeRequest) -> tuple[int, ...]:
    if body.prompt is not None:
        raise RequestRejected("prompt and messages exclude each other", param="prompt")
    fields = {name: getattr(body, name) for name in _CHAT_FIELDS}
    chat = ChatCompletionRequest(messages=body.messages or [], model=body.model, **fields)
    token_ids = (await prompt_of(request, chat)).token_ids
    engine = edge_of(request).engine
    return await _with_special_tokens(engine, token_ids) if body.add_special_tokens else token_ids


async def _with_special_tokens(engine: Engine, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Put the special tokens around a prompt that the tokenizer puts around any text."""
    plain, whole = await engine.encode_plain(_ANY_TEXT), await engine.encode(_ANY_TEXT)
    starts = range(len(whole) - len(plain) + 1)
    start = next(at for at in starts if whole[at : at + len(plain)] == plain)
    return (*whole[:start], *token_ids, *whole[start + len(plain) :])
