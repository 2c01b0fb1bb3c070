"""Wire requests for vectors and scores to engine requests.

Owns: the endpoints that the model can serve, the cutting of texts, the bound on the tokens of one request.
"""

from collections.abc import Sequence

from engine.errors import ContextLengthExceeded, RequestRejected, WrongTask
from engine.types import (
    ModelInfo,
    PoolingFacts,
    PoolingParams,
    PoolingRequest,
    PoolingTask,
    TextCut,
    TokenizedText,
)
from server.api.pooling.protocol import EmbeddingRequest, PoolingFields
from server.edge.http.edge import Engine
from server.reply.generate.calls import Origin
from server.reply.generate.model_checks import check_num_chars, check_token_ids
from server.reply.generate.protocol import Prompt

MAX_TOKENS = 300_000
"""Tokens of all inputs of a request together, as OpenAI bounds them."""
_OTHER_ENDPOINT = {
    PoolingTask.EMBED: "this model makes embeddings; use /v1/embeddings",
    PoolingTask.SCORE: "this model scores pairs of texts; use /v1/score or /v1/rerank",
}


def pooling_of(info: ModelInfo) -> PoolingFacts:
    """Return what the model pools. Raises WrongTask for one that generates."""
    if info.pooling is None:
        raise WrongTask(
            "this model generates text; start the server with one that makes embeddings or scores"
        )
    return info.pooling


def check_embeds(body: EmbeddingRequest, info: ModelInfo) -> None:
    """Raise WrongTask for a model that scores, RequestRejected for more dimensions than it has."""
    pooling = pooling_of(info)
    if pooling.task is not PoolingTask.EMBED:
        raise WrongTask(_OTHER_ENDPOINT[pooling.task])
    if body.dimensions is not None and body.dimensions > pooling.num_dimensions:
        raise RequestRejected(
            f"dimensions must be at most {pooling.num_dimensions}, the size of this model's embeddings",
            param="dimensions",
        )


def text_cut(body: PoolingFields, info: ModelInfo, *, param: str) -> TextCut:
    """Bound of the texts in the field `param`. Raises RequestRejected."""
    asked = body.truncate_prompt_tokens
    if asked == 0 or (asked is not None and asked > info.max_model_len):
        raise RequestRejected(
            f"truncate_prompt_tokens must be -1, or from 1 to {info.max_model_len}",
            param="truncate_prompt_tokens",
        )
    return TextCut(param=param, max_tokens=info.max_model_len if asked == -1 else asked)


async def tokenize_inputs(engine: Engine, inputs: Sequence[Prompt], cut: TextCut) -> list[TokenizedText]:
    """Texts and token ids, in the order of the inputs. Raises RequestRejected, Overloaded."""
    texts = [each for each in inputs if isinstance(each, str)]
    _check_num_chars(texts, engine.info, cut)
    encoded = iter(await engine.encode_texts(texts, cut) if texts else ())
    return [
        next(encoded) if isinstance(each, str) else TokenizedText(each[: cut.max_tokens]) for each in inputs
    ]


async def tokenize_pairs(
    engine: Engine, pairs: Sequence[tuple[str, str]], cut: TextCut
) -> list[TokenizedText]:
    """Each pair as one prompt. Raises RequestRejected, Overloaded."""
    for pair in pairs:
        _check_num_chars(pair, engine.info, cut)
    return await engine.encode_pairs(pairs, cut)


def names_of(param: str, num: int) -> list[str]:
    """Names of the texts of a field, for errors."""
    return [param] if num == 1 else [f"{param}[{place}]" for place in range(num)]


def pooling_requests(
    body: PoolingFields, texts: Sequence[TokenizedText], info: ModelInfo, origin: Origin, *, names: list[str]
) -> list[PoolingRequest]:
    """Build one engine request for each text; `names` are for errors. Raises RequestRejected."""
    num_tokens = sum(len(text.token_ids) for text in texts)
    if num_tokens > MAX_TOKENS:
        raise RequestRejected(
            f"one request may have {MAX_TOKENS} tokens in all, not {num_tokens}; send several",
            param=names[-1].partition("[")[0],
        )
    pooling = pooling_of(info)
    dimensions = body.dimensions if isinstance(body, EmbeddingRequest) else None
    requests = []
    for place, (text, name) in enumerate(zip(texts, names, strict=True)):
        _check_tokens(text.token_ids, info, param=name)
        params = PoolingParams(
            task=pooling.task,
            num_dimensions=dimensions,
            prompt=pooling.prompt,
            second_text_start=text.second_text_start,
        )
        requests.append(
            PoolingRequest(
                request_id=f"{origin.reply_id}-{place}",
                prompt_token_ids=text.token_ids,
                params=params,
                terms=origin.terms,
                max_tenant_tokens=origin.max_tenant_tokens,
                journal=origin.journal,
            )
        )
    origin.allowance.take_prompt(sum(len(text.token_ids) for text in texts))
    return requests


def _check_tokens(token_ids: tuple[int, ...], info: ModelInfo, *, param: str) -> None:
    if not token_ids:
        raise RequestRejected("the input has no tokens: this model needs at least one", param=param)
    if len(token_ids) > info.max_model_len:
        raise ContextLengthExceeded(
            f"the input has {len(token_ids)} tokens; this model reads {info.max_model_len} at most"
            " (truncate_prompt_tokens cuts it)",
            param=param,
        )
    check_token_ids(token_ids, info, param=param)


def _check_num_chars(texts: Sequence[str], info: ModelInfo, cut: TextCut) -> None:
    """Check the longest text; a text that is cut fits."""
    if cut.max_tokens is None:
        check_num_chars(max(map(len, texts), default=0), info, param=cut.param)
