"""What an operator asks and orders: live requests, and an empty prefix cache.

Off unless the operator asks for it (--enable-admin), and then behind the API keys, if there are any: it
names the requests and tenants of everybody.
"""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.http.edge import edge_of
from server.openapi import ADMIN_DOCUMENTATION, RESET_DOCUMENTATION

router = APIRouter()


@router.get("/admin/requests", **ADMIN_DOCUMENTATION)
async def list_live_requests(request: Request) -> Response:
    """The running line, then the waiting line, each in the order in which it is served."""
    reports = await edge_of(request).engine.explain()
    return Response(orjson.dumps({"requests": reports}), media_type="application/json")


@router.post("/admin/reset_prefix_cache", status_code=204, **RESET_DOCUMENTATION)
async def reset_prefix_cache(request: Request) -> Response:
    """Let nothing that was cached so far be found again."""
    edge_of(request).engine.reset_prefix_cache()
    return Response(status_code=204)
