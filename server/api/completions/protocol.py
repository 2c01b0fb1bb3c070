"""The body of POST /v1/completions as OpenAI documents it, with the extensions of other local servers."""

from typing import Annotated, Final

from pydantic import Field

from server.edge.refusals import REFUSED_OF_OPENAI, REFUSED_OF_OTHER_SERVERS
from server.edge.wire_model import shown_as
from server.reply.generate.protocol import INT32_MAX, MAX_N, GenerationFields, NumLogprobs, Prompts, Text

COMPLETION_REFUSALS: Final = {
    **REFUSED_OF_OPENAI,
    **REFUSED_OF_OTHER_SERVERS,
}
"""Fields refused by name, unless set to one of these values, or to null."""


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    model_config = shown_as(prompt="Once upon a time", max_tokens=30)

    prompt: Prompts
    suffix: Text | None = None
    """Text after the one to be generated; for models that were trained to fill holes."""
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """0 with echo only: the prompt comes back with its logprobs."""
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Generate that many choices, and return the n with the highest log-probability per token."""
    add_special_tokens: bool | None = None
    """Put special tokens around text prompts, as the checkpoint asks for; on by default."""
