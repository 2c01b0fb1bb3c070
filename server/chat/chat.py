"""POST /v1/chat/completions.

Owns: the order of the steps. Each step lives elsewhere.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.chat.chat_replies import ChatReply, ChatStream
from server.chat.chat_turn import prepare_turn
from server.generate.answering import new_head, new_origin, start, stream, token_names, usage_report, whole
from server.generate.early_refusal import read_if_room
from server.generate.protocol import ChatCompletionRequest
from server.generate.replies import ReplyPlan
from server.http.edge import edge_of
from server.openapi import CHAT_DOCUMENTATION
from server.refusals import CHAT_REFUSALS

router = APIRouter()


@router.post("/v1/chat/completions", **CHAT_DOCUMENTATION)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    edge = edge_of(request)
    body = await read_if_room(request, ChatCompletionRequest, CHAT_REFUSALS)
    origin = new_origin("chatcmpl", request)
    turn = await prepare_turn(edge, body, origin)
    plan = ReplyPlan(
        head=new_head(origin, edge.engine.info),
        num_prompt_tokens=(len(turn.prompt_ids),),
        n=body.n or 1,
        has_logprobs=bool(body.logprobs),
        usage=usage_report(body),
        token_names=token_names(body),
        prompts=(turn.prompt_ids,) if body.return_token_ids else (),
        num_prompt_logprobs=body.prompt_logprobs,
    )
    outputs = start(edge, [turn.request])
    if body.stream:
        return stream(request, outputs, ChatStream(plan, turn.reading))
    return await whole(request, outputs, ChatReply(plan, turn.reading))
