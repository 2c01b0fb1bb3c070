"""GET /admin/requests and POST /admin/reset_prefix_cache.

Off unless the operator asks for it (--enable-admin), and then behind the API keys, if there are any: it
names the requests and tenants of all clients.
"""

from typing import Any, Literal

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http.edge import edge_of
from server.http.endpoint import ERRORS, Endpoint, ReplyModel, documentation

router = APIRouter()
ENDPOINT = Endpoint(router=router)
_RESET_DOCUMENTATION: dict[str, Any] = {"responses": {204: {"description": "It is empty."}, **ERRORS}}


class LiveSequence(ReplyModel):
    request_id: str | None
    choice: int = 0
    sequence_id: int
    state: Literal["running", "waiting", "swapped"]
    place: int
    priority: int
    rank: list[float | None]
    """null stands for infinity: a time limit that is not set."""
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    num_bypasses: int
    age_s: float
    wait_reason: str


class LiveSequences(ReplyModel):
    requests: list[LiveSequence]


@router.get("/admin/requests", **documentation(LiveSequences))
async def list_live_requests(request: Request) -> Response:
    """The running line, then the waiting line, each in the order in which it is served."""
    reports = await edge_of(request).engine.explain()
    return Response(orjson.dumps({"requests": reports}), media_type="application/json")


@router.post("/admin/reset_prefix_cache", status_code=204, **_RESET_DOCUMENTATION)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    edge_of(request).engine.reset_prefix_cache()
    return Response(status_code=204)
