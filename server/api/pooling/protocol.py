"""Requests for embeddings, scores and rankings, as OpenAI, vLLM, Jina and Cohere document them."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints

from server.edge.wire_model import WireModel, shown_as, wrong_shape
from server.reply.generate.protocol import (
    INT32_MAX,
    MAX_TEXT_CHARS,
    Prompt,
    ServiceFields,
    Text,
    TokenIdList,
    as_prompts,
)

MAX_INPUTS = 2048
"""OpenAI's bound; documents of one ranking too."""

_OTHER_SERVERS: Final[dict[str, tuple[Any, ...]]] = {
    "activation": (),
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "embedding_types": (["float"],),
    "endianness": ("native", "little"),
    "input_type": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "normalize": (),
    "softmax": (),
    "truncation_side": ("right",),
    "use_activation": (),
}
EMBEDDING_REFUSALS: Final = _OTHER_SERVERS
SCORE_REFUSALS: Final = {
    **_OTHER_SERVERS,
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
    "rank_fields": (),
}
"""Fields refused by name, unless set to one of these values, or to null."""


def _as_inputs(value: Any) -> tuple[Prompt, ...]:
    inputs = as_prompts(value, most=MAX_INPUTS, noun="inputs")
    if "" in inputs:
        raise wrong_shape("an input must not be an empty string")
    return inputs


def _as_texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_documents(value: Any) -> Any:
    """Jina and Cohere allow objects whose only member is a text."""
    if not isinstance(value, list):
        raise wrong_shape("must be a list of strings")
    return [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in value]


_Input = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT_CHARS)]
_InputShapes = (
    _Input
    | Annotated[list[_Input], Field(min_length=1, max_length=MAX_INPUTS)]
    | TokenIdList
    | Annotated[list[TokenIdList], Field(min_length=1, max_length=MAX_INPUTS)]
)
Inputs = Annotated[tuple[Prompt, ...], PlainValidator(_as_inputs, json_schema_input_type=_InputShapes)]
_TextList = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Texts = Annotated[_TextList, BeforeValidator(_as_texts, json_schema_input_type=Text | _TextList)]


class _TextObject(WireModel):
    text: Text


Documents = Annotated[
    _TextList,
    BeforeValidator(
        _as_documents,
        json_schema_input_type=Annotated[
            list[Text | _TextObject], Field(min_length=1, max_length=MAX_INPUTS)
        ],
    ),
]


class PoolingFields(ServiceFields):
    """Fields that all these endpoints share."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Cut texts at their end to that many tokens, special ones included; -1: to the model's window."""


class EmbeddingRequest(PoolingFields):
    """The body of POST /v1/embeddings."""

    model_config = shown_as(input=["A yard of tokens.", "A crane."])

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is that of the float32 numbers, little-endian."""
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Keep that many of the first dimensions, and normalize again."""


class ScoreRequest(PoolingFields):
    """The body of POST /v1/score: one text with each of several, or several with as many."""

    model_config = shown_as(text_1="What is a yard?", text_2=["A place with tracks.", "A fish."])

    text_1: Texts
    text_2: Texts


class RerankRequest(PoolingFields):
    """The body of POST /v1/rerank."""

    model_config = shown_as(query="What is a yard?", documents=["A fish.", "A place with tracks."])

    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Absent: all of them."""
    return_documents: bool | None = None
    """On by default."""
