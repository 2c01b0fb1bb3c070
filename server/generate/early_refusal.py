"""Calls for which there is no place are refused before they are paid for.

Owns: when the queue is asked: before the body is read, and again once it has told how urgent the call is.
Never: whether there is a place (engine/frontend/active_requests.py), which has the last word after
tokenization.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from server.access.auth import key_of
from server.generate.protocol import ServiceFields
from server.generate.translate import priority_of
from server.http.edge import edge_of
from server.http.header_fields import fields_from_headers
from server.http.json_body import read_request

FieldsT = TypeVar("FieldsT", bound=ServiceFields)


async def read_if_room(
    request: Request, model: type[FieldsT], refusals: Mapping[str, tuple[Any, ...]]
) -> FieldsT:
    """As `read_request`, for calls that the queue takes. Raises Overloaded and NotPermitted as well."""
    engine = edge_of(request).engine
    engine.require_room(_best_priority(request))
    body = await read_request(request, model, refusals)
    engine.require_room(priority_of(body, key_of(request.scope)))
    return body


def _best_priority(request: Request) -> int | None:
    """The most urgent that the call can turn out to be, by all but its body; None: there is no bound."""
    asked = fields_from_headers(request.headers).get("priority")
    if isinstance(asked, int):
        return asked
    key = key_of(request.scope)
    return key.most_urgent_priority if key else None
