"""The catalogue of errors that clients receive, by code.

Owns: for each code its HTTP status, OpenAI type, and the advice about trying again.
docs/errors.md is written from here.
Source: OpenAI's error object; x-should-retry and retry-after-ms, which its SDKs obey.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Retry(Enum):
    """Advice to the client about sending the same request again."""

    NEVER = "no"
    """It would end the same way."""
    NOW = "yes"
    LATER = "after `Retry-After`"


@dataclass(frozen=True, slots=True)
class Entry:
    status: int
    type: str
    retry: Retry
    meaning: str
    """Text for docs/errors.md."""
    header: tuple[str, str] | None = None
    fixed_text: str = ""
    """Text in place of the error's own: details of a fault of ours are for the log."""


HANG_UP: Final = ("connection", "close")
"""Close the connection: its further bytes are never read, or should go to another server."""
_WHO_ARE_YOU: Final = ("www-authenticate", 'Bearer realm="tokenyard"')

_CALLER = "invalid_request_error"
_SERVER = "server_error"


def _wrong(meaning: str) -> Entry:
    return Entry(400, _CALLER, Retry.NEVER, meaning)


def _fault(retry: Retry, meaning: str, shown: str) -> Entry:
    return Entry(500, _SERVER, retry, meaning, fixed_text=shown)


CATALOGUE: Final[Mapping[str, Entry]] = {
    "invalid_json": _wrong(
        "not JSON, or not beyond doubt: duplicate keys, NaN, Infinity, half of a surrogate pair, a byte order"
        " mark, bytes that are not UTF-8, more than 96 levels"
    ),
    "missing_field": _wrong("a required field is absent"),
    "invalid_value": _wrong(
        "a type, a bound, or a contradiction; `param` says where, `message` what is right"
    ),
    "unsupported_parameter": _wrong("a field, or a value of it, that this server or model has no use for"),
    "unknown_parameter": _wrong("a field that this server does not know, under `--strict-fields`"),
    "context_length_exceeded": _wrong(
        "prompt, or prompt and `max_tokens`, exceed the context window or the KV cache"
    ),
    "wrong_task": _wrong("the model is served for something else: text, embeddings or scores"),
    "storage_full": _wrong("too many files, bytes or open batches in the state folder; delete or wait"),
    "previous_response_not_found": _wrong("no stored response of this id, for this key"),
    "invalid_grammar": _wrong("a grammar, schema or expression that is wrong, or too expensive"),
    "adapter_loaded": _wrong("an adapter of this name is loaded; `load_inplace` loads it again"),
    "no_chat_template": _wrong("the checkpoint has none; use `/v1/completions`"),
    "invalid_request": Entry(
        400,
        _CALLER,
        Retry.NEVER,
        "the request could not be read: not HTTP/1.1, or with two lengths of its body",
        header=HANG_UP,
    ),
    "invalid_api_key": Entry(
        401, _CALLER, Retry.NEVER, "no key, or not one of the server's", header=_WHO_ARE_YOU
    ),
    "not_permitted": Entry(
        403, "permission_error", Retry.NEVER, "this key may not ask for this priority, or not administer"
    ),
    "origin_not_allowed": Entry(
        403, "permission_error", Retry.NEVER, "a web page of another origin asks a server without keys"
    ),
    "host_not_allowed": Entry(
        403, "permission_error", Retry.NEVER, "a server without keys is called by a name that is not its own"
    ),
    "model_not_found": Entry(404, _CALLER, Retry.NEVER, "no model of this name"),
    "object_not_found": Entry(404, _CALLER, Retry.NEVER, "no file or batch of this id, for this key"),
    "response_not_found": Entry(404, _CALLER, Retry.NEVER, "no stored response of this id, for this key"),
    "not_found": Entry(404, _CALLER, Retry.NEVER, "nothing at this path"),
    "method_not_allowed": Entry(405, _CALLER, Retry.NEVER, "see the `Allow` header"),
    "request_timeout": Entry(
        408,
        _CALLER,
        Retry.NOW,
        "the head was not complete after 10 seconds, or the body stood still, or trickled, for 30",
        header=HANG_UP,
    ),
    "request_too_large": Entry(
        413, _CALLER, Retry.NEVER, "the body exceeds `--max-body-size`", header=HANG_UP
    ),
    "unsupported_media_type": Entry(
        415, _CALLER, Retry.NEVER, "send `Content-Type: application/json`, not compressed"
    ),
    "rate_limit_exceeded": Entry(
        429,
        "rate_limit_error",
        Retry.LATER,
        "this key has as many requests under way, or prompt tokens waiting, or has used as many requests or"
        " tokens in the last minute, as it may",
    ),
    "head_too_large": Entry(
        431, _CALLER, Retry.NEVER, "request line and headers exceed 64 KiB", header=HANG_UP
    ),
    "server_overloaded": Entry(429, "rate_limit_error", Retry.LATER, "too many requests wait"),
    "client_closed": Entry(499, _CALLER, Retry.NOW, "in logs and metrics only: the client left first"),
    "model_error": _fault(
        Retry.NEVER, "the model failed on this request alone", "the model failed on this request"
    ),
    "engine_restarted": _fault(
        Retry.NOW,
        "the engine process died with this request in flight, and no other was started",
        "the engine stopped while it worked on this request",
    ),
    "engine_died_twice": _fault(
        Retry.NEVER,
        "so did the next engine process, to which it was handed",
        "the engine stopped twice while it held this request",
    ),
    "engine_error": _fault(
        Retry.NEVER, "a fault of ours; quote the request id", "the engine failed on this request"
    ),
    "internal_error": _fault(
        Retry.NEVER, "a fault of ours; quote the request id", "the server failed on this request"
    ),
    "not_ready": Entry(503, _SERVER, Retry.LATER, "the model is loading, or the engine is being replaced"),
    "model_broken": Entry(
        503, _SERVER, Retry.NEVER, "the model cannot be loaded before the server is started again"
    ),
    "low_memory": Entry(
        503,
        _SERVER,
        Retry.LATER,
        "more of the memory is in use than `--max-memory-use` allows, or there is none for this request",
    ),
    "too_many_connections": Entry(
        503, _SERVER, Retry.LATER, "every place is taken; probes are still answered", header=HANG_UP
    ),
    "shutting_down": Entry(
        503, _SERVER, Retry.LATER, "the server is draining: another one will serve", header=HANG_UP
    ),
    "deadline_exceeded": Entry(
        504, "timeout_error", Retry.NEVER, "a time limit ran out before there was any token"
    ),
}
"""A code is for programs and does not change."""
