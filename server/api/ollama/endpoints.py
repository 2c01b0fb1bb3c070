"""POST /api/chat and /api/generate, and the model described: GET /api/tags and /api/ps, POST /api/show.

Owns: the way from body to reply, and the description of the served model.
Never: rendering or generating: that is the chat path, step for step.
"""

import secrets
import time
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from engine.types import ModelInfo
from engine.version import VERSION
from server.api.chat.reasoning_styles import find_style
from server.api.chat.replies import ChatStream
from server.api.chat.turn import prepare_turn
from server.api.ollama.input import chat_request_of, served_name
from server.api.ollama.lines import LineFraming, LineShape, LineStream, WholeLine, error_body
from server.api.ollama.models import (
    OllamaError,
    OllamaLoadedList,
    OllamaModelList,
    OllamaModelPage,
    OllamaReply,
    OllamaVersion,
)
from server.api.ollama.protocol import (
    PROMPT_REFUSALS,
    TURN_REFUSALS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from server.edge.http.edge import Edge, edge_of
from server.edge.http.endpoint import Endpoint, documentation, errors_as, reference
from server.edge.http.json_body import read_request
from server.reply.generate.answering import new_head, whole
from server.reply.generate.calls import Origin, read_call
from server.reply.generate.model_checks import check_model
from server.reply.generate.replies import ReplyPlan, UsageReport
from server.reply.generate.sse import EventStream
from server.reply.response_templates.template import Role
from server.reply.response_templates.template_choice import find_template
from server.reply.tool_calls.dialects import find_dialect

_CHAT, _GENERATE, _SHOW = "/api/chat", "/api/generate", "/api/show"
_TAGS, _LOADED, _VERSION = "/api/tags", "/api/ps", "/api/version"
_NEVER = "2318-04-10T00:00:00Z"
"""A time that clients read as never."""
_STREAM_NOTE = "Unless `stream` is false: lines of JSON, each of this shape; the last one has `done`: true."


def _documentation(reply: type[BaseModel], *, request: type[BaseModel] | None = None) -> dict[str, Any]:
    found = documentation(reply, request=request)
    found["responses"] |= errors_as(OllamaError)
    if reply is OllamaReply:
        success = found["responses"][200]
        success["description"] = _STREAM_NOTE
        success["content"]["application/x-ndjson"] = {"schema": reference(reply)}
    return found


router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={
        OllamaChatRequest: TURN_REFUSALS,
        OllamaGenerateRequest: PROMPT_REFUSALS,
        OllamaShowRequest: (),
    },
    operations={_CHAT: "chat", _GENERATE: "generate_content"},
    error_shapes=dict.fromkeys((_CHAT, _GENERATE, _SHOW, _TAGS, _LOADED, _VERSION), error_body),
)


@router.post(_CHAT, **_documentation(OllamaReply, request=OllamaChatRequest))
async def chat_in_lines(request: Request) -> Response:
    """Answer a conversation in Ollama's words: a line of JSON for each piece, unless `stream` is false."""
    body, origin = await read_call(request, OllamaChatRequest, TURN_REFUSALS, reply_id=_reply_id())
    return await _answer(request, body, origin, is_empty=not body.messages)


@router.post(_GENERATE, **_documentation(OllamaReply, request=OllamaGenerateRequest))
async def generate_in_lines(request: Request) -> Response:
    """Answer one prompt, by the chat template."""
    body, origin = await read_call(request, OllamaGenerateRequest, PROMPT_REFUSALS, reply_id=_reply_id())
    return await _answer(request, body, origin, is_empty=not body.prompt)


@router.get(_TAGS, **_documentation(OllamaModelList))
async def list_in_ollamas_words(request: Request) -> Response:
    """List the names under which the model is served."""
    info = edge_of(request).engine.info
    return _json({"models": _listed(info, {"modified_at": _time(info.created_s)})})


@router.get(_LOADED, **_documentation(OllamaLoadedList))
async def list_loaded_in_ollamas_words(request: Request) -> Response:
    """List the same names: the model stays loaded."""
    info = edge_of(request).engine.info
    facts = {"expires_at": _NEVER, "size_vram": 0, "context_length": info.max_model_len}
    return _json({"models": _listed(info, facts)})


@router.post(_SHOW, **_documentation(OllamaModelPage, request=OllamaShowRequest))
async def show_in_ollamas_words(request: Request) -> Response:
    """Describe the served model."""
    edge = edge_of(request)
    info = edge.engine.info
    body = await read_request(request, OllamaShowRequest, {}, from_headers={})
    check_model(served_name(body.model or body.name, info), info)
    return _json(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name} {value}" for name, value in info.default_sampling.items()),
            "template": info.chat_template,
            "details": _details(info),
            "model_info": {
                "general.architecture": info.model_type,
                "general.parameter_count": info.num_parameters,
                f"{info.model_type}.context_length": info.max_model_len,
            },
            "capabilities": _capabilities(edge, info),
            "modified_at": _time(info.created_s),
        }
    )


@router.get(_VERSION, **_documentation(OllamaVersion))
async def version_in_ollamas_words() -> Response:
    """The version of this server, which is not Ollama's."""
    return _json({"version": VERSION})


async def _answer(
    request: Request, body: OllamaChatRequest | OllamaGenerateRequest, origin: Origin, *, is_empty: bool
) -> Response:
    edge = edge_of(request)
    info = edge.engine.info
    shape = LineShape(model=body.model or info.served_names[0], is_chat=isinstance(body, OllamaChatRequest))
    if is_empty:  # clients ask so for the model to be loaded
        check_model(served_name(body.model, info), info)
        return _json({**shape.line({"content": ""}, time.time()), "done": True, "done_reason": "load"})
    turn = await prepare_turn(edge, chat_request_of(body, info), origin)
    plan = ReplyPlan(
        head=new_head(origin, info),
        num_prompt_tokens=(len(turn.prompt_ids),),
        n=1,
        has_logprobs=False,
        usage=UsageReport(at_end=True),
    )
    chat = ChatStream(plan, turn.reading)
    stream = LineStream(shape, chat, clock=time.monotonic, unix_time_s=time.time)
    outputs = edge.engine.generate_all([turn.request])
    if body.stream is not False:
        return EventStream(outputs, stream, edge, framing=LineFraming())
    return await whole(request, outputs, WholeLine(stream))


def _listed(info: ModelInfo, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each served name."""
    described = {"size": 0, "digest": "", "details": _details(info), **facts}
    return [{"name": name, "model": name, **described} for name in info.names]


def _reply_id() -> str:
    return f"ollama-{secrets.token_hex(12)}"


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.model_type,
        "families": [info.model_type],
        "parameter_size": f"{info.num_parameters / 1e9:.1f}B",
        "quantization_level": info.dtype,
    }


def _capabilities(edge: Edge, info: ModelInfo) -> list[str]:
    if info.pooling is not None:
        return ["embedding"]
    found = ["completion"]
    template = find_template(edge.parsers, info)
    if find_dialect(edge.parsers.tool_calls, info.chat_template) is not None:
        found.append("tools")
    has_style = find_style(edge.parsers.reasoning, info) is not None
    if has_style if template is None else template.field_of(Role.REASONING) is not None:
        found.append("thinking")
    return found


def _time(unix_time_s: int) -> str:
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat().replace("+00:00", "Z")


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
