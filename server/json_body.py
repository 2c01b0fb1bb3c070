"""From the bytes of a body to a validated request, or to the one sentence that says what is wrong.

Owns: media type, JSON syntax beyond doubt (no NaN, no surrogates, no duplicate keys, no deep nesting), and
the wording of validation errors.
Never: how many bytes there may be (body_limit.py), what the fields mean (translate.py).
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from engine.errors import RequestRejected
from server.edge import edge_of
from server.errors import UnsupportedMediaType
from server.header_fields import fields_from_headers
from server.refusals import refuse_unsupported

MAX_DEPTH = 32
"""A chat message is four levels deep. Deep nesting costs recursion in everything that walks it."""
_INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread, so that the streams of others go on meanwhile."""

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_request(
    request: Request, model: type[ModelT], refusals: Mapping[str, tuple[Any, ...]]
) -> ModelT:
    """Read, parse and validate. Raises RequestRejected, UnsupportedMediaType, BodyTooLarge, BodyTimeout."""
    _check_media_type(request.headers.get("content-type"))
    from_headers = fields_from_headers(request.headers)
    raw = await request.body()
    if len(raw) <= _INLINE_BYTES:
        body, parsed = _parse(raw, from_headers, model, refusals)
    else:
        body, parsed = await asyncio.to_thread(_parse, raw, from_headers, model, refusals)
    num_unknown = sum(name not in model.model_fields and name not in refusals for name in body)
    if num_unknown:
        edge_of(request).metrics.unknown_fields.inc(num_unknown)
    return parsed


def _check_media_type(content_type: str | None) -> None:
    media_type = (content_type or "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("the request body must be JSON: send Content-Type: application/json")


def _parse(
    raw: bytes,
    from_headers: dict[str, Any],
    model: type[ModelT],
    refusals: Mapping[str, tuple[Any, ...]],
) -> tuple[dict[str, Any], ModelT]:
    body = parse_object(raw) | from_headers
    refuse_unsupported(body, refusals)
    try:
        # OpenAI's clients send null for what they do not ask for.
        return body, model.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _rejection(first) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse one JSON object. Raises RequestRejected with code invalid_json."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    if not isinstance(body, dict):
        raise _not_json("the body must be a JSON object")
    _check_depth(body)
    # orjson keeps the last of two equal keys, others the first: a body must mean one thing to everybody.
    json.loads(raw, object_pairs_hook=_without_duplicates)
    return body


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child for container in level for child in _children(container) if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _not_json(f"it is nested more than {MAX_DEPTH} levels deep")


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) != len({key for key, _ in pairs}):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise _not_json(f"the key {twice[:64]!r} appears twice in one object")


def _not_json(reason: str) -> RequestRejected:
    return RequestRejected(f"the request body is not valid JSON: {reason}", code="invalid_json")


def _rejection(error: ErrorDetails) -> RequestRejected:
    """Say where it is and what would be right. The value itself is not repeated: it can be huge."""
    param = _path(error["loc"])
    if error["type"] == "missing":
        return RequestRejected(f"{param} is required", param=param, code="missing_field")
    reason = error["msg"].replace("Input should be", "must be", 1)
    return RequestRejected(f"{param}: {reason}", param=param, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        # A key out of the caller's own object may be long.
        path += f"[{step}]" if isinstance(step, int) else f"{'.' if path else ''}{step[:64]}"
    return path or "body"
