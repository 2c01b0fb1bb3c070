"""GET /v1/models and /v1/models/{model}; the routes that load and unload models and adapters.

Those of models are as llama.cpp's router has them, those of adapters as vLLM has them.

Owns: the description of the served model, and the bodies and answers, in plain text, of the routes of
adapters. These are off without --lora-directory, and need a key that may administer, if there are keys.
Never: takes a path: a folder is named, and must lie in the directory (engine/adapters/registry.py).
"""

from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.errors import EngineUnavailable, RequestRejected
from engine.models.yard import YardPlace, YardState
from engine.types import ModelInfo
from server.edge.access.sent_key import key_of
from server.edge.error_replies import ModelNotFound
from server.edge.http.edge import Edge
from server.edge.http.endpoint import (
    ERRORS,
    Endpoint,
    ReplyModel,
    documentation,
    documentation_of_one,
    in_json,
    json_reply,
)
from server.edge.http.json_body import read_request
from server.edge.http.served_models import choose_model, models_of, not_served
from server.edge.wire_model import WireModel
from server.reply.generate.protocol import Name


class NamedModel(WireModel):
    """The body of POST /models/load and /models/unload."""

    model: Name


router, hand_router = APIRouter(), APIRouter()
ENDPOINT = Endpoint(router=router)
BY_HAND = Endpoint(router=hand_router, requests={NamedModel: ()})


class ModelCapabilities(ReplyModel):
    vision: bool
    """Whether requests may have pictures."""


class ModelStatus(ReplyModel):
    value: Literal["unloaded", "loading", "loaded", "leaving", "failed"]
    progress: float | None = None
    """Loaded share, 0 to 1, while it is loaded."""
    reason: str | None = None
    """The cause of the last failure."""


class Model(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The first served name, of which the others are aliases; of a profile or an adapter, its own."""
    parent: str | None
    """The model of a profile or an adapter; null for the model itself, and for a key that does not see it."""
    permission: list[Any]
    """Always empty."""
    max_model_len: int | None
    """Null for a model that was never loaded."""
    capabilities: ModelCapabilities
    status: ModelStatus | None = None
    """There for models that come and go."""


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[Model]


@hand_router.get("/models", include_in_schema=False)
@router.get("/v1/models", **documentation(ModelList))
async def list_models(request: Request) -> Response:
    """List the names that requests may use."""
    listed = models_of(request).listed(key_of(request.scope))
    found = [_model(request, name, info, edge) for edge, info, names in listed for name in names]
    return json_reply({"object": "list", "data": found})


@router.get("/v1/models/{model:path}", **documentation_of_one(Model, "model"))
async def retrieve_model(request: Request) -> Response:
    """Describe the model of one served name; names may contain slashes."""
    name = request.path_params["model"]
    edge = choose_model(request, name)
    try:
        info: ModelInfo | None = edge.engine.info
    except EngineUnavailable:
        if edge.place is None:
            raise
        info = None
    return json_reply(_model(request, name, info, edge))


class Accepted(ReplyModel):
    success: Literal[True]


@hand_router.post("/models/load", **documentation(Accepted, request=NamedModel))
async def load_model(request: Request) -> Response:
    """Load a model that comes and goes. The answer does not wait for it: the list shows how far it is."""
    (await _named_place(request)).come()
    return json_reply({"success": True})


@hand_router.post("/models/unload", **documentation(Accepted, request=NamedModel))
async def unload_model(request: Request) -> Response:
    """Unload a model that comes and goes, once no request uses it."""
    place = await _named_place(request)
    if place.rule.is_pinned:
        raise RequestRejected(f"model: {place.name} is pinned, and never leaves", param="model")
    place.leave()
    return json_reply({"success": True})


async def _named_place(request: Request) -> YardPlace:
    """Find the model that the body names. Raises ModelNotFound, RequestRejected."""
    body = await read_request(request, NamedModel, {}, from_headers={})
    edge, models, key = choose_model(request, body.model), models_of(request), key_of(request.scope)
    if not models.shows(edge, key):
        raise not_served(body.model, [each for _, _, names in models.listed(key) for each in names])
    if (place := edge.place) is None:
        raise RequestRejected(f"model: {body.model!r} is always loaded", param="model")
    return place


def _status(edge: Edge, *, shows_model: bool) -> dict[str, Any]:
    if edge.place is None:
        return {}
    shown: dict[str, Any] = {"value": "failed" if edge.place.is_failed else edge.place.state.value}
    if edge.place.fault and shows_model:
        shown["reason"] = edge.place.fault
    if edge.place.state is YardState.LOADING:
        shown["progress"] = round(edge.engine.health().progress, 3)
    return {"status": shown}


def _model(request: Request, name: str, info: ModelInfo | None, edge: Edge) -> dict[str, Any]:
    """Describe a model or a variant; `info` is None if the model was never loaded."""
    adapter, names = info and info.adapter_named(name), edge.engine.names
    is_variant, first_name = name in names.variants, names.served[0]
    shows_model = models_of(request).shows(edge, key_of(request.scope))
    return {
        "id": name,
        "object": "model",
        "created": adapter.created_s if adapter else info.created_s if info else 0,
        "owned_by": "tokenyard",
        # As vLLM: the model that an alias stands for, none that it was tuned from, nothing to permit.
        "root": name if is_variant else first_name,
        "parent": first_name if is_variant and shows_model else None,
        "permission": [],
        "max_model_len": info and info.max_model_len,
        "capabilities": {"vision": info is not None and edge.takes_pictures},
        **_status(edge, shows_model=shows_model),
    }


class LoadAdapterRequest(WireModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name
    """Name of a folder in the server's directory of adapters."""
    base_model_name: Name | None = None
    """The model that it belongs to; needed where several take adapters."""
    load_inplace: bool | None = None
    """Replace the adapter of this name; requests that run finish with the old one."""


class UnloadAdapterRequest(WireModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name


adapter_router = APIRouter()
ADAPTERS = Endpoint(router=adapter_router, requests={LoadAdapterRequest: (), UnloadAdapterRequest: ()})


def _described(model: type[WireModel], done: str) -> dict[str, Any]:
    body = {"required": True, "content": in_json(model)}
    text = {"description": done, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"responses": {200: text, **ERRORS}, "openapi_extra": {"requestBody": body}}


@adapter_router.post("/v1/load_lora_adapter", **_described(LoadAdapterRequest, "Requests may name it."))
async def load_adapter(request: Request) -> Response:
    """Load an adapter, or load it again."""
    body = await read_request(request, LoadAdapterRequest, {}, from_headers={})
    models, key = models_of(request), key_of(request.scope)
    engine = models.for_adapter(body.lora_name, body.base_model_name, key).engine
    await engine.load_adapter(body.lora_name, body.lora_path, replaces=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@adapter_router.post(
    "/v1/unload_lora_adapter", **_described(UnloadAdapterRequest, "No request may name it now.")
)
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter; requests that run finish with it."""
    body = await read_request(request, UnloadAdapterRequest, {}, from_headers={})
    if not choose_model(request, body.lora_name).engine.unload_adapter(body.lora_name):
        raise ModelNotFound(f"the adapter {body.lora_name!r} is not loaded here")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
