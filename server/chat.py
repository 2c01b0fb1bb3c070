"""POST /v1/chat/completions.

Owns: the order of the steps. Each step lives elsewhere.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answering import new_head, new_origin, start, stream, usage_report, whole
from server.chat_replies import ChatReply, ChatStream
from server.edge import edge_of
from server.json_body import read_request
from server.openapi import CHAT_DOCUMENTATION
from server.protocol import ChatCompletionRequest
from server.refusals import CHAT_REFUSALS
from server.replies import ReplyPlan
from server.translate import chat_messages, chat_options, chat_request

router = APIRouter()


@router.post("/v1/chat/completions", **CHAT_DOCUMENTATION)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    edge = edge_of(request)
    body = await read_request(request, ChatCompletionRequest, CHAT_REFUSALS)
    info = edge.engine.info
    messages = chat_messages(body, info)
    prompt_ids = await edge.engine.encode_chat(messages, chat_options(body))
    origin = new_origin("chatcmpl", request)
    plan = ReplyPlan(
        head=new_head(origin, info),
        num_prompt_tokens=(len(prompt_ids),),
        n=body.n or 1,
        has_logprobs=bool(body.logprobs),
        usage=usage_report(body),
    )
    outputs = start(edge, [chat_request(body, prompt_ids, info, origin)])
    if body.stream:
        return stream(request, outputs, ChatStream(plan))
    return await whole(request, outputs, ChatReply(plan))
