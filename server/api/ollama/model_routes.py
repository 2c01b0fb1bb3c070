"""The served model in Ollama's words: GET /api/tags, /api/ps and /api/version, POST /api/show.

Owns: its description, and the router of all Ollama's routes.
"""

import time
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from math import inf, isinf
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.models.yard import YardPlace
from engine.types import ModelInfo
from engine.version import VERSION
from server.api.chat.plan import model_reading
from server.api.ollama.input import served_name
from server.api.ollama.lines import time_text
from server.api.ollama.models import (
    OllamaError,
    OllamaLoadedList,
    OllamaModelList,
    OllamaModelPage,
    OllamaVersion,
)
from server.api.ollama.protocol import OllamaShowRequest, keep_alive_s
from server.edge.access.sent_key import key_of
from server.edge.http.edge import Edge, edge_of
from server.edge.http.endpoint import documentation, json_reply
from server.edge.http.json_body import read_request
from server.edge.http.served_models import choose_for_ollama, models_of

_SHOW, _TAGS, _LOADED, _VERSION = "/api/show", "/api/tags", "/api/ps", "/api/version"
_NEVER = "2318-04-10T00:00:00Z"
"""A time that clients read as never."""

router = APIRouter()


def keep_idle(request: Request, keep_alive: str | float | None) -> None:
    """Let the request's model stay idle for so long after it, if it is one that comes and goes.

    Raises RequestRejected.
    """
    seconds, place = keep_alive_s(keep_alive), own_place(request)
    if place is not None:
        place.keep_for(seconds)


def own_place(request: Request) -> YardPlace | None:
    """Return the place of the request's model; None if it always stays, or the key sees an adapter alone."""
    edge = edge_of(request)
    return edge.place if models_of(request).shows(edge, key_of(request.scope)) else None


documented = partial(documentation, errors=OllamaError)


@router.get(_TAGS, **documented(OllamaModelList))
async def list_in_ollamas_words(request: Request) -> Response:
    """List the names that requests may use."""
    listed = models_of(request).listed(key_of(request.scope))
    found = [
        _listed(info, names, {"modified_at": time_text(info.created_s if info else 0)})
        for _, info, names in listed
    ]
    return json_reply({"models": [*chain.from_iterable(found)]})


@router.get(_LOADED, **documented(OllamaLoadedList))
async def list_loaded_in_ollamas_words(request: Request) -> Response:
    """List the names of models that are loaded, with the time at which one leaves if it is not asked."""
    listed = models_of(request).listed(key_of(request.scope))
    found = [
        _listed(info, names, _loaded_facts(info, edge))
        for edge, info, names in listed
        if info and (edge.place is None or edge.place.is_loaded)
    ]
    return json_reply({"models": [*chain.from_iterable(found)]})


@router.post(_SHOW, **documented(OllamaModelPage, request=OllamaShowRequest))
async def show_in_ollamas_words(request: Request) -> Response:
    """Describe the served model."""
    body = await read_request(request, OllamaShowRequest, {}, from_headers={})
    edge = choose_for_ollama(request, body.model or body.name)
    info = edge.engine.info
    name = served_name(body.model or body.name, info)
    return json_reply(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{key} {value}" for key, value in info.sampling_of(name).items()),
            "template": info.chat_template,
            "details": _details(info),
            "model_info": {
                "general.architecture": info.model_type,
                "general.parameter_count": info.num_parameters,
                f"{info.model_type}.context_length": info.max_model_len,
            },
            "capabilities": _capabilities(edge, info),
            "modified_at": time_text(info.created_s),
        }
    )


@router.get(_VERSION, **documented(OllamaVersion))
async def version_in_ollamas_words() -> Response:
    """The version of this server, which is not Ollama's."""
    return json_reply({"version": VERSION})


def _loaded_facts(info: ModelInfo, edge: Edge) -> dict[str, Any]:
    on_device = 0 if info.device.startswith("cpu") else info.weight_bytes
    left_s = inf if edge.place is None else edge.place.expires_in_s
    expires_at = _NEVER if isinf(left_s) else time_text(time.time() + left_s)
    return {"expires_at": expires_at, "size_vram": on_device, "context_length": info.max_model_len}


def _listed(info: ModelInfo | None, names: Sequence[str], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each name; nothing else is known of a model that was never loaded."""
    served = info and (info.model_type, info.num_parameters, info.weight_bytes, info.dtype)
    digest = sha256(repr(served).encode()).hexdigest() if served else ""
    size = info.weight_bytes if info else 0
    described = {"size": size, "digest": digest, "details": _details(info), **facts}
    return [{"name": name, "model": name, **described} for name in names]


def _details(info: ModelInfo | None) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.model_type if info else "",
        "families": [info.model_type] if info else [],
        "parameter_size": f"{info.num_parameters / 1e9:.1f}B" if info else "",
        "quantization_level": info.dtype if info else "",
    }


def _capabilities(edge: Edge, info: ModelInfo) -> list[str]:
    if info.pooling is not None:
        return ["embedding"]
    found = ["completion"]
    if edge.takes_pictures:
        found.append("vision")
    reading = model_reading(edge.parsers, info)
    if reading.dialect is not None:
        found.append("tools")
    if reading.reads_thoughts:
        found.append("thinking")
    return found
