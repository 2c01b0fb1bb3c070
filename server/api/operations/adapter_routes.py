"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Owns: their bodies and answers, which are plain text. Off without --lora-directory, and then behind keys that
may administer, if there are any.
Never: takes a path: a folder is named, and must lie in the directory (engine/adapters/registry.py).
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from server.edge.error_replies import ModelNotFound
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import ERRORS, Endpoint, in_json
from server.edge.http.json_body import read_request
from server.edge.wire_model import WireModel
from server.reply.generate.protocol import Name

router = APIRouter()


class LoadAdapterRequest(WireModel):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Name
    """Name of a folder in the server's directory of adapters."""
    load_inplace: bool | None = None
    """Replace the adapter of this name; requests that run finish with the old one."""


class UnloadAdapterRequest(WireModel):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name


ENDPOINT = Endpoint(router=router, requests={LoadAdapterRequest: (), UnloadAdapterRequest: ()})


def _documentation(model: type[WireModel], done: str) -> dict[str, Any]:
    body = {"required": True, "content": in_json(model)}
    text = {"description": done, "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"responses": {200: text, **ERRORS}, "openapi_extra": {"requestBody": body}}


@router.post("/v1/load_lora_adapter", **_documentation(LoadAdapterRequest, "Requests may name it."))
async def load_adapter(request: Request) -> Response:
    """Load an adapter, or load it again."""
    body = await read_request(request, LoadAdapterRequest, {}, from_headers={})
    engine = edge_of(request).engine
    await engine.load_adapter(body.lora_name, body.lora_path, replaces=bool(body.load_inplace))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", **_documentation(UnloadAdapterRequest, "No request may name it now."))
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter; requests that run finish with it."""
    body = await read_request(request, UnloadAdapterRequest, {}, from_headers={})
    if not edge_of(request).engine.unload_adapter(body.lora_name):
        raise ModelNotFound(f"the adapter {body.lora_name!r} is not loaded here")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
