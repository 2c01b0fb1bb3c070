"""GET /admin/requests: what every live request does, or waits for.

Off unless the operator asks for it (--enable-admin), and then behind the API keys, if there are any: it
names the requests and tenants of everybody.
"""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.edge import edge_of
from server.openapi import ADMIN_DOCUMENTATION

router = APIRouter()


@router.get("/admin/requests", **ADMIN_DOCUMENTATION)
async def list_live_requests(request: Request) -> Response:
    """The running line, then the waiting line, each in the order in which it is served."""
    reports = await edge_of(request).engine.explain()
    return Response(orjson.dumps({"requests": reports}), media_type="application/json")
