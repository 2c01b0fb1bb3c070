"""POST /v1/chat/completions.

Owns: the way from body to reply. Each step is in a module of its own.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.chat.models import ChatCompletion, ChatCompletionChunk
from server.api.chat.protocol import CHAT_REFUSALS, ChatCompletionRequest
from server.api.chat.replies import ChatReply, ChatStream
from server.api.chat.turn import prepare_turn
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, documentation
from server.reply.generate.answering import new_head, new_reply_id, token_names, usage_report, whole
from server.reply.generate.calls import read_call
from server.reply.generate.replies import ReplyPlan
from server.reply.generate.sse import EventStream

_PATH = "/v1/chat/completions"
_DOCUMENTATION = documentation(ChatCompletion, request=ChatCompletionRequest, chunk=ChatCompletionChunk)

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={ChatCompletionRequest: CHAT_REFUSALS},
    events=(ChatCompletionChunk,),
    batch_paths=frozenset({_PATH}),
    operations={_PATH: "chat"},
)


@router.post(_PATH, **_DOCUMENTATION)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    reply_id = new_reply_id("chatcmpl")
    body, origin = await read_call(request, ChatCompletionRequest, CHAT_REFUSALS, reply_id=reply_id)
    edge = edge_of(request)
    turn = await prepare_turn(edge, body, origin)
    plan = ReplyPlan(
        head=new_head(origin, edge.engine.info),
        num_prompt_tokens=(len(turn.prompt_ids),),
        n=turn.request.n,
        has_logprobs=bool(body.logprobs),
        usage=usage_report(body),
        token_names=token_names(body),
        prompts=(turn.prompt_ids,) if body.return_token_ids else (),
        has_prediction=body.prediction is not None,
        num_prompt_logprobs=body.prompt_logprobs,
        journal=origin.journal if body.include_metrics and turn.request.n == 1 else None,
    )
    is_read_whole = not body.stream and turn.reading.counts_by_tokens
    outputs = edge.engine.generate_all([turn.request], is_read_whole=is_read_whole)
    if body.stream:
        stream = ChatStream(plan, turn.reading)
        return EventStream(outputs, stream, edge)
    return await whole(request, outputs, ChatReply(plan, turn.reading))
