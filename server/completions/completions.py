"""POST /v1/completions.

Owns: the order of the steps. Each step lives elsewhere.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.completions.completion_replies import CompletionPlan, CompletionReply, CompletionStream
from server.generate.answering import new_head, new_origin, start, stream, token_names, usage_report, whole
from server.generate.early_refusal import read_if_room
from server.generate.prompts import EncodedPrompt, encode_bad_words, encode_prompts
from server.generate.protocol import CompletionRequest
from server.generate.replies import ReplyHead, ReplyPlan
from server.generate.structured_output import compiled_grammar, with_grammar
from server.generate.translate import completion_requests
from server.http.edge import Engine, edge_of
from server.openapi import COMPLETION_DOCUMENTATION
from server.refusals import COMPLETION_REFUSALS

router = APIRouter()


@router.post("/v1/completions", **COMPLETION_DOCUMENTATION)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    edge = edge_of(request)
    body = await read_if_room(request, CompletionRequest, COMPLETION_REFUSALS)
    info = edge.engine.info
    prompts = await encode_prompts(edge.engine, body, info)
    bad_words = await encode_bad_words(edge.engine, body)
    origin = new_origin("cmpl", request)
    prompt_ids = [prompt.token_ids for prompt in prompts]
    requests = completion_requests(body, prompt_ids, info, origin, bad_words=bad_words)
    num_choices = sum(each.n for each in requests)
    grammar = await compiled_grammar(edge.engine, body, num_choices=num_choices)
    plan = _plan(body, prompts, new_head(origin, info), edge.engine)
    outputs = start(edge, [with_grammar(each, grammar) for each in requests])
    if body.stream:
        return stream(request, outputs, CompletionStream(plan))
    return await whole(request, outputs, CompletionReply(plan))


def _plan(
    body: CompletionRequest, prompts: list[EncodedPrompt], head: ReplyHead, engine: Engine
) -> CompletionPlan:
    n = body.n or 1
    shared = ReplyPlan(
        head=head,
        num_prompt_tokens=tuple(len(prompt.token_ids) for prompt in prompts),
        n=body.best_of or n,
        has_logprobs=body.logprobs is not None,
        usage=usage_report(body),
        token_names=token_names(body),
        prompts=tuple(prompt.token_ids for prompt in prompts) if body.return_token_ids else (),
        num_prompt_logprobs=body.prompt_logprobs,
    )
    return CompletionPlan(
        shared=shared,
        num_kept=n,
        num_logprobs=body.logprobs or 0,
        generates=body.max_tokens != 0,
        echoes=tuple(prompt.echo for prompt in prompts) if body.echo else (),
        first_tokens=tuple(engine.token_text(prompt.token_ids[0]) for prompt in prompts),
    )
