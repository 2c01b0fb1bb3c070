"""POST /invocations, the one path at which SageMaker calls a container.

Owns: the choice of the endpoint by the fields of the body.
Never: an answer of its own.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import RequestRejected
from server.api.chat.chat import create_chat_completion
from server.api.completions.completions import create_completion
from server.api.pooling.embeddings import create_embeddings
from server.edge.http.endpoint import ERRORS, Endpoint
from server.edge.http.json_body import parse_object

_BY_FIELD: Final[Mapping[str, Callable[[Request], Awaitable[Response]]]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
}
_DOCUMENTATION: dict[str, Any] = {
    "responses": {200: {"description": "As the endpoint that knows the fields of the body."}, **ERRORS},
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    },
}

router = APIRouter()
ENDPOINT = Endpoint(router=router)


@router.post("/invocations", **_DOCUMENTATION)
async def invoke(request: Request) -> Response:
    """Answer as a chat completion, a completion or embeddings: by `messages`, `prompt` or `input`."""
    body = parse_object(await request.body())
    for field, endpoint in _BY_FIELD.items():
        if body.get(field) is not None:
            return await endpoint(request)
    names = ", ".join(_BY_FIELD)
    raise RequestRejected(f"the body needs one of {names}", param="messages", code="missing_field")
