"""GET /admin/requests and POST /admin/reset_prefix_cache.

Off unless the operator asks for it (--enable-admin), and then behind the API keys, if there are any: it
names the requests and tenants of all clients.
"""

from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.types import ReportPage
from server.edge.http.disconnect import while_connected
from server.edge.http.endpoint import ERRORS, Endpoint, ReplyModel, documentation, json_reply
from server.edge.http.served_models import choose_by_query
from server.edge.refusals import whole_number

router = APIRouter()
ENDPOINT = Endpoint(router=router)

# The engine answers between two steps: no page may cost it more than some milliseconds.
_MAX_PAGE = 250
"""A report on 250 sequences takes 2 ms, in which no step is computed."""
_MAX_FIRST = 10_000

_RESET_DOCUMENTATION: dict[str, Any] = {"responses": {204: {"description": "It is empty."}, **ERRORS}}


class LiveSequence(ReplyModel):
    request_id: str | None
    """Id of the answer, as chatcmpl-...; null in the moment after its end."""
    x_request_id: str | None
    trace_id: str | None
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
    blocks_by_group: dict[str, int]
    """Blocks of num_blocks by groups of layers: `all`, `window-1024`, `chunk-8192`, `state`."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found when it first began."""
    num_lost_tokens: int = 0
    """Further ones, of which layers that keep all tokens had what they need."""
    lost_to: str = ""
    """The group that lacked what is read behind them; empty if none did."""
    num_kept_tokens: int = 0
    """Prompt tokens that later prompts find: up to the last restore point, where there are such."""
    engine: int | None = 0
    """Engine that has it; null while it waits for one."""
    expected_start_s: float | None = None
    """Seconds until it starts, as the last starts were apart; null if it runs, or nothing is known."""


class LiveSequences(ReplyModel):
    requests: list[LiveSequence]
    total: int
    """Live sequences, on other pages too."""


@router.get("/admin/requests", **documentation(LiveSequences))
async def list_live_requests(request: Request) -> Response:
    """The running line, then the waiting line, each in the order in which it is served: a page of them."""
    asked = choose_by_query(request).engine.explain(
        ReportPage(
            whole_number(request.query_params, "first", most=_MAX_FIRST, default=0),
            whole_number(request.query_params, "limit", most=_MAX_PAGE, default=_MAX_PAGE),
        )
    )
    reports, total = await while_connected(request.receive, asked)
    return json_reply({"requests": reports, "total": total})


@router.post("/admin/reset_prefix_cache", status_code=204, **_RESET_DOCUMENTATION)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    choose_by_query(request).engine.reset_prefix_cache()
    return Response(status_code=204)
