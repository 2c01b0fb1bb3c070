"""Streamed and whole, by LiteLLM."""

import json
import os

import litellm

CALL = {
    "model": "openai/tokenyard-demo",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "messages": [{"role": "user", "content": "Count from 3 to 8."}],
    "temperature": 0,
    "max_tokens": 30,
}
whole = litellm.completion(**CALL)
chunks = list(litellm.completion(**CALL, stream=True, stream_options={"include_usage": True}))
text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
try:
    litellm.completion(**{**CALL, "temperature": 99})
    error = "none"
except litellm.BadRequestError as refusal:
    error = str(refusal)
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": text,
            "whole_tokens": whole.usage.completion_tokens,
            "streamed_tokens": usage.completion_tokens,
            "error": error,
        }
    )
)
