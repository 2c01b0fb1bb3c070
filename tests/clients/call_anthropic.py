"""Whole, streamed, with a tool and refused, by Anthropic's SDK."""

import json
import os

from anthropic import Anthropic, APIStatusError

client = Anthropic(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key="none", max_retries=0)
asked = {
    "model": "tokenyard-demo",
    "max_tokens": 30,
    "extra_body": {"temperature": 0},
    "messages": [{"role": "user", "content": "Count from 3 to 8."}],
}
tool = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
}
one = {"type": "any", "disable_parallel_tool_use": True}
whole = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    pieces = list(stream.text_stream)
    streamed = stream.get_final_message()
with client.messages.stream(**{**asked, "max_tokens": 100}, tools=[tool], tool_choice=one) as stream:
    called = stream.get_final_message()
count = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
try:
    client.messages.create(**{**asked, "model": "other"})
except APIStatusError as error:
    refusal = [type(error).__name__, error.body["error"]["type"]]
print(
    json.dumps(
        {
            "whole": whole.content[0].text,
            "pieces": "".join(pieces),
            "streamed": streamed.content[0].text,
            "usage": [whole.usage.output_tokens, streamed.usage.output_tokens],
            "stop_reasons": [whole.stop_reason, streamed.stop_reason, called.stop_reason],
            "unit": called.content[0].input["unit"],
            "num_counted": count.input_tokens,
            "refusal": refusal,
        }
    )
)
