"""POST /completion and /infill, and GET /props, for plug-ins of editors that are made for llama.cpp's server.

Source: the README of llama.cpp's server; the requests of its plug-ins for Vim and VS Code.
"""

import time
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from server.api.completions.protocol import CompletionRequest
from server.api.completions.requests import fitting_completion
from server.api.llama_cpp.replies import EVENTS, LlamaProperties, LlamaReply, LlamaStream
from server.edge.http.edge import edge_of
from server.edge.http.endpoint import Endpoint, documentation, json_reply
from server.edge.http.json_body import built, without_nones
from server.edge.http.served_models import choose_by_query
from server.edge.refusals import in_words
from server.edge.wire_model import WireModel, shown_as
from server.reply.generate.answering import new_head, new_reply_id, whole
from server.reply.generate.calls import Origin, read_call
from server.reply.generate.protocol import (
    INT32_MAX,
    Name,
    Prompt,
    RepetitionPenalty,
    SamplingNumbers,
    ServiceFields,
    Stop,
    Text,
    TokenIdList,
    as_prompts,
)
from server.reply.generate.replies import Gathered, ReplyPlan
from server.reply.generate.sse import EventStream
from server.reply.generate.structured_output import MAX_GRAMMAR_BYTES, Schema

_MAX_SNIPPETS = 1024
LLAMA_REFUSALS: Final[dict[str, tuple[Any, ...]]] = {
    "image_data": ([],),
    "logit_bias": ([], {}),
    "lora": ([],),
    "n_probs": (0,),
    "return_tokens": (False,),
}
"""Fields refused by name, unless set to one of these values, or to null."""
_SAME_NAMES: Final = (*SamplingNumbers.model_fields, *ServiceFields.model_fields, "stop", "ignore_eos")
_NAMES: Final = (
    (r"structured_outputs must have .*", "grammar and json_schema exclude each other"),
    (r"structured_outputs\.json\b", "json_schema"),
    (r"structured_outputs(\.grammar)?\b", "grammar"),
    (r"\bmax_tokens\b", "n_predict"),
)
"""Names of a completion's fields to llama.cpp's."""


_Single = Field(min_length=1, max_length=1)
_OnePrompt = Text | TokenIdList | Annotated[list[Text], _Single] | Annotated[list[TokenIdList], _Single]


class LlamaFields(SamplingNumbers, ServiceFields):
    """Fields of both endpoints; others of llama.cpp's, which set up its samplers and slots, are ignored."""

    n_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    """Most tokens; below 0 or absent: what the context window leaves. 0: the prompt is only cached."""
    stream: bool | None = None
    repeat_penalty: RepetitionPenalty | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)] | None = None
    """GBNF, or Lark."""
    json_schema: Schema | None = None


class LlamaCompletionRequest(LlamaFields):
    """The body of POST /completion."""

    model_config = shown_as(prompt="Once upon a time", n_predict=30)

    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(partial(as_prompts, most=1, noun="prompt"), json_schema_input_type=_OnePrompt),
    ]
    """One text, or the token ids of one; either may stand in a list."""


class Snippet(WireModel):
    """A piece of another file."""

    filename: Name | None = None
    text: Text


class InfillRequest(LlamaFields):
    """The body of POST /infill; for models that were trained to fill holes."""

    model_config = shown_as(input_prefix="def add(a, b):\n", input_suffix="\n\nadd(1, 2)\n", n_predict=30)

    input_prefix: Text | None = None
    prompt: Text | None = None
    """The text between `input_prefix` and the hole."""
    input_suffix: Text | None = None
    input_extra: Annotated[list[Snippet], Field(max_length=_MAX_SNIPPETS, fail_fast=True)] | None = None
    """Put before the prefix."""


_COMPLETION, _INFILL = "/completion", "/infill"
_STREAM_NOTE = "With `stream`: server-sent events, each of this shape; the last one has `stop`: true."
router = APIRouter()
ENDPOINT = Endpoint(
    router=router,
    requests={LlamaCompletionRequest: LLAMA_REFUSALS, InfillRequest: LLAMA_REFUSALS},
    operations=dict.fromkeys((_COMPLETION, _INFILL), "text_completion"),
)


def _documentation(request: type[BaseModel]) -> dict[str, Any]:
    found = documentation(LlamaReply, request=request, chunk=LlamaReply)
    found["responses"][200]["description"] = _STREAM_NOTE
    return found


@router.post(_COMPLETION, **_documentation(LlamaCompletionRequest))
async def complete_for_editors(request: Request) -> Response:
    """Continue a text."""
    reply_id = new_reply_id("llama")
    body, origin = await read_call(request, LlamaCompletionRequest, LLAMA_REFUSALS, reply_id=reply_id)
    prompt = body.prompt[0]
    said = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    return await _answer(request, body, said, origin)


@router.post(_INFILL, **_documentation(InfillRequest))
async def fill_for_editors(request: Request) -> Response:
    """Fill a hole in a text."""
    body, origin = await read_call(request, InfillRequest, LLAMA_REFUSALS, reply_id=new_reply_id("llama"))
    extra = "".join(f"{each.filename or ''}\n{each.text}\n" for each in body.input_extra or ())
    prefix = extra + (body.input_prefix or "") + (body.prompt or "")
    # A suffix of nothing is a hole as well: at the end of a file.
    return await _answer(request, body, {"prompt": prefix, "suffix": body.input_suffix or "\n"}, origin)


@router.get("/props", **documentation(LlamaProperties))
async def show_properties(request: Request) -> Response:
    """The context window, the defaults of sampling and the chat template."""
    edge = choose_by_query(request)
    info = edge.engine.info
    params = info.sampling_of(request.query_params.get("model"))
    return json_reply(
        {
            "default_generation_settings": {"n_ctx": info.max_model_len, "params": params},
            "total_slots": 1,
            "model_alias": info.served_names[0],
            "chat_template": info.chat_template,
            "modalities": {"vision": edge.takes_pictures, "audio": False},
        }
    )


async def _answer(request: Request, body: LlamaFields, said: dict[str, Any], origin: Origin) -> Response:
    edge = edge_of(request)
    fields = {name: getattr(body, name) for name in _SAME_NAMES} | said
    if body.repeat_penalty is not None:
        fields["repetition_penalty"] = body.repeat_penalty
    if body.seed == -1:  # a random one
        del fields["seed"]
    if body.n_predict is not None and body.n_predict >= 0:
        fields["max_tokens"] = max(body.n_predict, 1)
    asked = {"grammar": body.grammar or None, "json": body.json_schema}
    fields["structured_outputs"] = without_nones(asked) or None
    of_infill = [(r"\bsuffix\b", "input_suffix")] if isinstance(body, InfillRequest) else []
    with in_words(*_NAMES, *of_infill):
        made = await fitting_completion(edge.engine, built(CompletionRequest, fields), origin)
    head = new_head(origin, edge.engine.info)
    plan = ReplyPlan(head=head, num_prompt_tokens=(len(made.prompt_token_ids),))
    stream = LlamaStream(plan, shows_text=body.n_predict != 0, clock=time.monotonic)
    outputs = edge.engine.generate_all([made])
    if body.stream:
        return EventStream(outputs, stream, edge, framing=EVENTS)
    return await whole(request, outputs, Gathered(stream, lambda: stream.reply))
