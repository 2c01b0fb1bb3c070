"""POST /v1/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.api.completions.protocol import COMPLETION_REFUSALS, CompletionRequest
from server.api.completions.replies import CompletionPlan, CompletionReply, CompletionStream
from server.api.completions.requests import (
    EncodedPrompt,
    check_completion,
    encode_prompts,
    wanted_completion,
)
from server.edge.http.edge import Engine, edge_of
from server.edge.http.endpoint import Endpoint, ReplyModel, documentation
from server.reply.generate.answering import new_head, new_reply_id, token_names, usage_report, whole
from server.reply.generate.calls import read_call
from server.reply.generate.engine_requests import engine_requests
from server.reply.generate.replies import ReplyHead, ReplyPlan
from server.reply.generate.reply_models import FinishReasonName, PromptLogprobs, ReplyFrame, Usage
from server.reply.generate.sse import EventStream


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, in both lists."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ReplyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    """Null only in the chunks of a stream."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice; null for the end-of-sequence token."""
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ReplyFrame):
    """A whole reply, or a chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


_PATH = "/v1/completions"

router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={CompletionRequest: COMPLETION_REFUSALS},
    batch_paths=frozenset({_PATH}),
    operations={_PATH: "text_completion"},
)


@router.post(_PATH, **documentation(Completion, request=CompletionRequest, chunk=Completion))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    reply_id = new_reply_id("cmpl")
    body, origin = await read_call(request, CompletionRequest, COMPLETION_REFUSALS, reply_id=reply_id)
    edge, engine = edge_of(request), edge_of(request).engine
    check_completion(body, engine.info)
    prompts = await encode_prompts(engine, body)
    wanted = wanted_completion(body)
    prompt_ids = {f"{reply_id}-{place}": prompt.token_ids for place, prompt in enumerate(prompts)}
    requests = await engine_requests(engine, body, prompt_ids, wanted, origin)
    plan = _plan(body, prompts, new_head(origin, engine.info), engine)
    if body.include_metrics and plan.shared.num_choices == 1:
        plan = replace(plan, shared=replace(plan.shared, journal=origin.journal))
    outputs = engine.generate_all(requests, is_read_whole=not body.stream)
    if body.stream:
        stream = CompletionStream(plan)
        return EventStream(outputs, stream, edge)
    return await whole(request, outputs, CompletionReply(plan))


def _plan(
    body: CompletionRequest, prompts: Sequence[EncodedPrompt], head: ReplyHead, engine: Engine
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
        first_tokens=tuple(engine.token_text(prompt.token_ids[0]) for prompt in prompts) if body.echo else (),
    )
