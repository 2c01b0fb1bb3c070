"""POST /v1/completions.

Owns: the order of the steps. Each step lives elsewhere.
"""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answering import new_head, new_origin, start, stream, usage_report, whole
from server.completion_replies import CompletionReply, CompletionStream
from server.edge import Edge, edge_of
from server.json_body import read_request
from server.openapi import COMPLETION_DOCUMENTATION
from server.protocol import CompletionRequest, Prompt
from server.refusals import COMPLETION_REFUSALS
from server.replies import ReplyPlan
from server.translate import completion_prompts, completion_requests

router = APIRouter()


@router.post("/v1/completions", **COMPLETION_DOCUMENTATION)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    edge = edge_of(request)
    body = await read_request(request, CompletionRequest, COMPLETION_REFUSALS)
    info = edge.engine.info
    prompts = completion_prompts(body, info)
    prompt_ids = await asyncio.gather(*(_encode(edge, prompt) for prompt in prompts))
    origin = new_origin("cmpl", request)
    requests = completion_requests(body, prompt_ids, info, origin)
    plan = ReplyPlan(
        head=new_head(origin, info),
        num_prompt_tokens=tuple(len(ids) for ids in prompt_ids),
        n=body.n or 1,
        has_logprobs=body.logprobs is not None,
        usage=usage_report(body),
        echoes=tuple(prompt for prompt in prompts if isinstance(prompt, str)) if body.echo else (),
    )
    outputs = start(edge, requests)
    if body.stream:
        return stream(request, outputs, CompletionStream(plan))
    return await whole(request, outputs, CompletionReply(plan))


async def _encode(edge: Edge, prompt: Prompt) -> tuple[int, ...]:
    return await edge.engine.encode(prompt) if isinstance(prompt, str) else prompt
