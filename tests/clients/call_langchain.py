"""Streamed and whole, by LangChain's OpenAI client."""

import json

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="tokenyard-demo", temperature=0, max_tokens=30, stream_usage=True)
whole = model.invoke("Count from 3 to 8.")
chunks = list(model.stream("Count from 3 to 8."))
total = chunks[0]
for chunk in chunks[1:]:
    total += chunk
print(
    json.dumps(
        {
            "whole": whole.content,
            "streamed": total.content,
            "num_chunks": len(chunks),
            "whole_tokens": whole.usage_metadata["output_tokens"],
            "streamed_tokens": total.usage_metadata["output_tokens"],
        }
    )
)
