"""Whole, streamed, generated, listed and refused, by Ollama's client."""

import json
import os

from ollama import Client, ResponseError

client = Client(host=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"))
model, options = "tokenyard-demo:latest", {"temperature": 0}
messages = [{"role": "user", "content": "Count from 3 to 8."}]
whole = client.chat(model=model, messages=messages, options=options)
chunks = list(client.chat(model=model, messages=messages, options=options, stream=True))
generated = client.generate(model=model, prompt=messages[0]["content"], options=options)
try:
    client.chat(model="other", messages=messages)
except ResponseError as error:
    status = error.status_code
print(
    json.dumps(
        {
            "whole": whole.message.content,
            "streamed": "".join(chunk.message.content for chunk in chunks),
            "generated": generated.response,
            "num_tokens": [whole.eval_count, chunks[-1].eval_count],
            "models": [each.model for each in client.list().models],
            "capabilities": client.show(model).capabilities,
            "status": status,
        }
    )
)
