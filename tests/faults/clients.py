"""Requests of the fault tests' clients, and counts of the answers."""

from openai import AsyncOpenAI


async def num_tokens_whole(client: AsyncOpenAI, max_tokens: int) -> int:
    """Tokens of an answer that comes at once."""
    answer = await client.completions.create(
        model="tiny", prompt="Once", max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )
    assert answer.usage
    return answer.usage.completion_tokens


async def num_tokens_streamed(client: AsyncOpenAI, max_tokens: int, *, model: str = "tiny") -> int:
    """Tokens of a stream that is read to its end; 0 if its usage is missing."""
    num_tokens = 0
    chunks = await client.completions.create(
        model=model,
        prompt="Once",
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return num_tokens
