"""GET /v1/models and /v1/models/{model}.

Owns: how the served model introduces itself. Never: which model that is.
"""

from typing import Any, Literal

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import ModelInfo
from server.edge.error_replies import ModelNotFound
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, ReplyModel, documentation, documentation_of_one

router = APIRouter()
ENDPOINT = Endpoint(router=router)


class Model(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The first served name, of which the others are aliases; of an adapter, its own."""
    parent: str | None
    """The model that an adapter belongs to; null for the model itself."""
    permission: list[Any]
    """Always empty."""
    max_model_len: int


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[Model]


@router.get("/v1/models", **documentation(ModelList))
async def list_models(request: Request) -> Response:
    """List the names under which the model is served."""
    info = edge_of(request).engine.info
    return _json({"object": "list", "data": [_model(name, info) for name in info.names]})


@router.get("/v1/models/{model:path}", **documentation_of_one(Model, "model"))
async def retrieve_model(request: Request) -> Response:
    """Describe one served name; names may contain slashes."""
    info = edge_of(request).engine.info
    name = request.path_params["model"]
    if name not in info.names:
        raise ModelNotFound(f"the model {name!r} is not served here")
    return _json(_model(name, info))


def _model(name: str, info: ModelInfo) -> dict[str, Any]:
    adapter = info.adapter_named(name)
    return {
        "id": name,
        "object": "model",
        "created": info.created_s if adapter is None else adapter.created_s,
        "owned_by": "tokenyard",
        # As vLLM: the model that an alias stands for, none that it was tuned from, nothing to permit.
        "root": info.served_names[0] if adapter is None else name,
        "parent": None if adapter is None else info.served_names[0],
        "permission": [],
        "max_model_len": info.max_model_len,
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
