"""Bytes of a body to a validated request, or to one sentence that names the fault.

Owns: media type, JSON syntax beyond doubt (no NaN, no surrogates, no duplicate keys, no deep nesting), and
the wording of validation errors.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from engine.errors import Overloaded, OverloadReason, RequestRejected
from server.edge.error_replies import UnsupportedMediaType
from server.edge.http.edge import UnknownFields, edge_of
from server.edge.http.ignored import note_ignored
from server.edge.http.served_models import choose_for_ollama, choose_model
from server.edge.refusals import hints_of, refuse_unsupported

MAX_DEPTH = 96
"""Arguments of a reply come back, which may be 64 deep. More costs recursion in all that walks a body."""
_INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that the streams of others go on meanwhile."""
MAX_ITEMS = 320 * 1024
"""Items of all lists and objects of a body: the 300,000 tokens of a request for embeddings fit."""
MAX_MEMBERS = 64 * 1024
"""Members of all objects of a body. They are dearer than items of lists: the parser builds 300,000 in 0.07 to
0.1 s, the validator 100,000 small messages in 0.2 s, and both hold the interpreter's lock all the while."""
_MAX_NAMED_FAULTS = 1000
"""Faults of a body of which the first is named: the validator lists all for it, 65,000 of them in 0.15 s."""
_MAX_LARGE_UNDER_WAY = 16
_LONGEST_REST_S = 0.005
"""Most that the thread for large bodies rests behind each part of its work on a body, for no longer than that
took. Parser and validator hold the interpreter's lock for up to 20 ms each, and the event loop, which gives
the lock up with every call of the system, waited as long several times for one token. In a rest it has whole
turns."""
_OF_OLLAMA = "/api/"
"""Paths whose bodies are JSON whatever their media type says: Ollama asks for none, and its own examples send
that of a form. Pages of other origins are kept away by their origin."""
_large = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")
_num_large_under_way = 0

_WORDS_OF_JSON = (
    (re.compile(r"^(Input|String|List|Dictionary) should "), "must "),
    (re.compile(r" after validation\b"), ""),
    (re.compile(r"\ba valid dictionary( or instance of \w+)?$"), "an object"),
    (re.compile(r"\ba valid list$"), "a list"),
)
"""The validator's messages are for authors of Python; here they go to clients that send JSON."""

ModelT = TypeVar("ModelT", bound=BaseModel)
ReadT = TypeVar("ReadT")


async def read_request(
    request: Request,
    model: type[ModelT],
    refusals: Mapping[str, tuple[Any, ...]],
    *,
    from_headers: Mapping[str, Any],
) -> ModelT:
    """Read, parse and validate; `from_headers` are fields that win over the body's.

    From then on the request's edge is that of the model which the body names.
    Raises RequestRejected, UnsupportedMediaType, BodyTooLarge, BodyTimeout, ModelNotFound.
    """
    is_of_ollama = request.scope["path"].startswith(_OF_OLLAMA)
    if not is_of_ollama:
        _check_media_type(request.headers.getlist("content-type"))
    _check_encoding(request.headers.get("content-encoding"))
    edge = edge_of(request)
    raw = await request.body()

    def read(rest: "_Rest | None") -> tuple[ModelT, int, list[str]]:
        body = {**parse_object(raw), **from_headers}
        if rest is not None:
            rest.take()
        return *_validated(body, model, refusals, edge.unknown_fields), hints_of(body, refusals)

    parsed, num_unknown, hints = read(None) if len(raw) <= _INLINE_BYTES else await _in_large_lane(read)
    if num_unknown:
        edge.metrics.unknown_fields.inc(num_unknown)
    note_ignored(request, hints)
    choose = choose_for_ollama if is_of_ollama else choose_model
    choose(request, getattr(parsed, "model", None))
    return parsed


async def _in_large_lane(read: "Callable[[_Rest], ReadT]") -> ReadT:
    """Read a large body in the one thread for these. Raises Overloaded if too many wait; errors of `read`."""
    global _num_large_under_way
    if _num_large_under_way >= _MAX_LARGE_UNDER_WAY:
        raise Overloaded(
            "too many large requests are being read; try again later",
            retry_after_s=1.0,
            reason=OverloadReason.TEXTS,
        )
    _num_large_under_way += 1
    try:
        return await asyncio.get_running_loop().run_in_executor(_large, _Rest().between, read)
    finally:
        _num_large_under_way -= 1


class _Rest:
    """Rests of the thread for large bodies, as long as the work on a body until then, within a bound."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def between(self, read: "Callable[[_Rest], ReadT]") -> ReadT:
        """Read a body and rest behind it, before its request goes on in the event loop."""
        self._began_s = time.perf_counter()
        try:
            return read(self)
        finally:
            self.take()

    def take(self) -> None:
        time.sleep(min(time.perf_counter() - self._began_s, _LONGEST_REST_S))


def _check_media_type(content_types: Sequence[str]) -> None:
    if len(content_types) > 1:
        raise UnsupportedMediaType("the request has two media types: send Content-Type once")
    media_type = (content_types[0] if content_types else "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("the request body must be JSON: send Content-Type: application/json")


def _check_encoding(encoding: str | None) -> None:
    """A kilobyte of gzip can be a gigabyte: nothing is ever unpacked."""
    if (encoding or "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("the request body must not be compressed: send no Content-Encoding")


def _validated(
    body: dict[str, Any], model: type[ModelT], refusals: Mapping[str, Any], unknown_fields: UnknownFields
) -> tuple[ModelT, int]:
    """Return the request, and the number of unknown fields at its top. Raises RequestRejected."""
    refuse_unsupported(body, refusals)
    # OpenAI's clients send null for fields that they do not use.
    known = {name: value for name, value in body.items() if value is not None and name not in refusals}
    try:
        parsed = model.model_validate(known, extra=unknown_fields.value)
    except ValidationError as error:
        raise rejection(error) from None
    return parsed, sum(name not in model.model_fields and name not in refusals for name in body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object. Raises RequestRejected with code invalid_json, MemoryError."""
    num_members = check_num_items(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if error.msg.startswith("Not enough memory"):
            raise MemoryError from None
        raise _not_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(body, dict):
        raise _not_json("the body must be a JSON object")
    if count_members(body) != num_members:
        # orjson keeps the last of two equal keys, others the first: a body must have one meaning.
        _refuse_duplicates(raw)
    return body


def check_num_items(raw: bytes) -> int:
    """Raise RequestRejected for a body of very many items or members, before any of them is built.

    Returns the number of members of all objects. Piece by piece, so that other threads have their turn.
    """
    num_items = num_members = is_text = start = 0
    while start < len(raw):
        end = start + _INLINE_BYTES
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = raw[start : end + 1]  # with the character that its last one escapes
        start += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[is_text::2])  # of texts, which have commas too
        is_text = (is_text + len(parts) - 1) % 2
        num_items += sum(map(outside.count, (b",", b"[", b"{")))
        num_members += outside.count(b":")
    if num_items > MAX_ITEMS:
        raise RequestRejected(
            f"the request body has more than {MAX_ITEMS} items in its lists and objects", code="invalid_value"
        )
    if num_members > MAX_MEMBERS:
        raise RequestRejected(
            f"the request body has more than {MAX_MEMBERS} members in its objects", code="invalid_value"
        )
    return num_members


def count_members(body: dict[str, Any]) -> int:
    """Count the members of all objects. Raises RequestRejected for a body that is nested too deep."""
    level: list[Any] = [body]
    num_members = 0
    for _ in range(MAX_DEPTH):
        num_members += sum(len(container) for container in level if isinstance(container, dict))
        level = [
            child for container in level for child in _children(container) if isinstance(child, dict | list)
        ]
        if not level:
            return num_members
    raise _not_json(f"it is nested more than {MAX_DEPTH} levels deep")


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _refuse_duplicates(raw: bytes) -> None:
    """Name a key that appears twice in one object, where it is found soon. Raises RequestRejected."""
    if len(raw) <= _INLINE_BYTES:
        with suppress(RecursionError):  # the two may be around a value that is nested very deep
            json.loads(raw, object_pairs_hook=_without_duplicates)
    raise _not_json("a key appears twice in one object")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) != len({key for key, _ in pairs}):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _not_json(f"the key {twice[:64]!r} appears twice in one object")


def _not_json(reason: str) -> RequestRejected:
    return RequestRejected(f"the request body is not valid JSON: {reason}", code="invalid_json")


def built(model: type[ModelT], fields: Mapping[str, Any]) -> ModelT:
    """Make a request of the fields that are not None. Raises RequestRejected."""
    try:
        return model.model_validate(without_nones(fields))
    except ValidationError as error:
        raise rejection(error) from None


def without_nones(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def rejection(error: ValidationError) -> RequestRejected:
    """Name the place of the fault and the right value. The value itself is not repeated: it can be huge."""
    if error.error_count() > _MAX_NAMED_FAULTS:
        return RequestRejected(
            f"the body has {error.error_count()} faults, unknown fields among them perhaps: too many to name",
            code="invalid_value",
        )
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return RequestRejected(f"{param} is required", param=param, code="missing_field")
    if first["type"] == "extra_forbidden":
        message = f"{param}: this server knows no such field, and is set to refuse it"
        return RequestRejected(message, param=param, code="unknown_parameter")
    if (
        first["type"].startswith("int_")
        and isinstance(first["input"], float)
        and abs(first["input"]) >= 2**63
    ):
        # The parser makes a float of an integer that is too large for it, so that no bound was looked at.
        first["msg"] = f"Input should be an integer within {-(2**63)} and {2**63 - 1}"
    reason = first["msg"]
    for pattern, words in _WORDS_OF_JSON:
        reason = pattern.sub(words, reason)
    return RequestRejected(f"{param}: {reason}", param=param, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        # A key out of the caller's own object may be long.
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step[:64]}"
    return path or "body"
