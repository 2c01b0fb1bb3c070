"""The dearest requests that are let in: grammars of small bodies, the largest bodies, the dearest replies.

Owns: their paths and bodies. Never: sends them (cli.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from campaigns.servers.own_server import SERVED_NAME

_NUM_CHOICES = 32
MOST_TOKENS_OF_OTHERS = 220
"""The prompt included, in a reply that others get."""
_BODY_BYTES = 4 * 2**20 - 1024
"""Just below what a body may have."""
_NUM_ITEMS = 320 * 1000
"""Just below the number of items that a body may have."""
_NUM_MEMBERS = 65 * 1000
"""Just below the number of members that its objects may have."""
_NUM_SHOWN, _SHOWN_TOKENS = 24, 2000
"""Prompts whose log-probabilities are shown, nearly as many as may be."""
_AT_ONCE = 4
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Clients who send the same request again and again."""

    path: str
    body: Callable[[], bytes]
    num_clients: int = 1


def _grammar(**constraint: Any) -> Crowd:
    fields = {"prompt": "x", "n": _NUM_CHOICES, "max_tokens": 200, "structured_outputs": constraint}
    return Crowd(path=_COMPLETIONS, body=lambda: _json(fields), num_clients=4)


_PROPERTIES = {f"name{i}": {"type": "string"} for i in range(300)}
GRAMMARS: dict[str, Crowd] = {
    "an ambiguous rule": _grammar(grammar='start: s\ns: "a" | s s | s s s'),
    "a worse one": _grammar(grammar="start: s\ns: /[a-z ]/ | s s | s s s | s s s s"),
    "counted repetitions": _grammar(regex="(.*a.{20}){5}"),
    "a schema of 300 properties": _grammar(json={"type": "object", "properties": _PROPERTIES}),
}


def _json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"model": SERVED_NAME, **fields})


def _raw(prefix: bytes, piece: bytes, suffix: bytes, *, most: int = 2**30) -> bytes:
    """Repeat a piece until the body is as large as it may be, or has it `most` times."""
    num = min(most, (_BODY_BYTES - len(prefix) - len(suffix)) // len(piece))
    return prefix + piece * num + suffix


def _members(num: int, *, between: bytes = b",") -> bytes:
    """Members with keys of their own; between the braces of two objects, each is an object of its own."""
    return between.join(b'"k%d":1' % place for place in range(num))


def _messages(num: int) -> list[dict[str, str]]:
    text = "word " * (_BODY_BYTES // num // 6)
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place in range(num)]


def _tools(num: int) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    return [
        {"type": "function", "function": {"name": f"tool{i}", "parameters": parameters}} for i in range(num)
    ]


def _batch_file() -> bytes:
    """Form of an upload with as many lines as a batch may have, which nobody ever sends."""
    head = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    lines = [f'{{"custom_id":"{i}","method":"POST","url":"/v1/x","body":{{}}}}\n' for i in range(50_000)]
    return f"{head}{''.join(lines)}\r\n--b--\r\n".encode()


BODIES: dict[str, Crowd] = {
    "a text of 4 MiB": Crowd(path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":"', b"word ", b'"}')),
    "one without spaces": Crowd(path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":"', b"a", b'"}')),
    "320,000 tokens": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"prompt":[', b"123,", b"7]}", most=_NUM_ITEMS)
    ),
    "320,000 empty lists": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"x":[', b"[],", b"[]]}", most=_NUM_ITEMS // 2)
    ),
    "160,000 empty objects": Crowd(
        path=_COMPLETIONS, body=lambda: _raw(b'{"x":[', b"{},", b"{}]}", most=_NUM_ITEMS // 2)
    ),
    "65,000 objects of a member": Crowd(
        path=_COMPLETIONS, body=lambda: b'{"x":[{%b}]}' % _members(_NUM_MEMBERS, between=b"},{")
    ),
    "an object of 65,000 members": Crowd(
        path=_COMPLETIONS, body=lambda: b'{"x":{%b}}' % _members(_NUM_MEMBERS)
    ),
    "one of 300,000, refused": Crowd(path=_COMPLETIONS, body=lambda: b'{"x":{%b}}' % _members(300_000)),
    "32,000 messages": Crowd(
        path=_CHAT, body=lambda: _json({"messages": [{"role": "user", "content": "x"}] * (_NUM_MEMBERS // 2)})
    ),
    "2,000 messages": Crowd(path=_CHAT, body=lambda: _json({"messages": _messages(2000)})),
    "1,000 messages, rendered": Crowd(path=_CHAT, body=lambda: _json({"messages": _messages(1000)})),
    "128 tools of 60 parameters": Crowd(
        path=_CHAT, body=lambda: _json({"messages": _messages(2)[:1], "tools": _tools(128)})
    ),
    "embeddings of 2,000 texts": Crowd(
        path="/v1/embeddings", body=lambda: _json({"input": ["word " * 400] * 2000})
    ),
    "a text to /tokenize": Crowd(
        path="/tokenize", body=lambda: _raw(b'{"return_token_strs":true,"prompt":"', b"word ", b'"}')
    ),
    "65,536 tokens to /detokenize": Crowd(
        path="/detokenize", body=lambda: _json({"tokens": [123] * (64 * 1024)})
    ),
    "responses of 300 items": Crowd(path="/v1/responses", body=lambda: _json({"input": _messages(300)})),
    "an upload of 50,000 lines": Crowd(path="/v1/files", body=_batch_file),
}
CROWDED_BODIES = {
    f"{_AT_ONCE} at once: {name}": replace(crowd, num_clients=_AT_ONCE) for name, crowd in BODIES.items()
}


def _reply(path: str, *fields: dict[str, Any]) -> Crowd:
    """Later fields win."""
    asked: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    for each in fields:
        asked |= each
    return Crowd(path=path, body=lambda: _json(asked))


_TOP: dict[str, Any] = {"logprobs": 20}
_MANY: dict[str, Any] = {"prompt": "x", "n": 128}
_HALF: dict[str, Any] = {"prompt": "x", "n": 64}
_OF_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "n": 128}
_PENALTIES: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}
_SHOWN: dict[str, Any] = {"prompt": [[123] * _SHOWN_TOKENS] * _NUM_SHOWN, "max_tokens": 0, "echo": True}
_SHOWN_ONE: dict[str, Any] = {**_SHOWN, "prompt": [123] * _SHOWN_TOKENS}
REPLIES: dict[str, Crowd] = {
    "128 choices, 20 logprobs": _reply(_COMPLETIONS, _MANY, _TOP),
    "128 choices, 20 logprobs, streamed": _reply(_COMPLETIONS, _MANY, _TOP, {"stream": True}),
    "a chat of 128 choices, 20 logprobs": _reply(_CHAT, _OF_CHAT, {"logprobs": True, "top_logprobs": 20}),
    "64 choices, 128 bad words": _reply(_COMPLETIONS, _HALF, {"bad_words": [f"word{i}" for i in range(128)]}),
    "64 choices, penalties": _reply(_COMPLETIONS, _HALF, _PENALTIES),
    "an echo": _reply(_COMPLETIONS, _SHOWN_ONE),
    "an echo, 20 logprobs": _reply(_COMPLETIONS, _SHOWN_ONE, _TOP),
    "24 echoes, 20 logprobs": _reply(_COMPLETIONS, _SHOWN, _TOP),
    "24 prompts, 20 logprobs of theirs": _reply(_COMPLETIONS, _SHOWN, {"prompt_logprobs": 20}),
}
"""Small requests whose replies are dear. An echo ends with its prompt, so that no sequence becomes long; the
one without logprobs shows what the prompt alone costs."""
