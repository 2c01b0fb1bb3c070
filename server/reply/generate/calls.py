"""The way in of an HTTP request: headers, room in the queue, body, terms of service.

Owns: when the queue is asked for room: before the body is read, and again once the body has named a priority.
The headers are read here, once: fields that a gateway sets in them, since it does not rewrite bodies, win
over the body's and meet the same bounds.
Never: whether there is room (engine/frontend/active_requests.py has the last word, after tokenization).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from engine.errors import RequestRejected
from engine.journal import Journal
from engine.options.api_keys import ApiKey
from engine.types import QueueForecast, ServiceTerms, TimeLimits
from server.edge.access.auth import open_allowance
from server.edge.access.rate_limits import Allowance, no_limits
from server.edge.access.sent_key import KEY_NAME, key_of
from server.edge.error_replies import NotPermitted
from server.edge.http.disconnect import stay_connected
from server.edge.http.edge import edge_of
from server.edge.http.ignored import note_ignored
from server.edge.http.json_body import read_request
from server.edge.http.served_models import lease_model
from server.edge.observe.request_ids import add_reply_headers, journal_of
from server.reply.generate.protocol import ServiceFields

FieldsT = TypeVar("FieldsT", bound=ServiceFields)
TENANT_HEADER = "x-tokenyard-tenant"
FORECAST_HEADER = "x-tokenyard-forecast"
MAX_TENANT_CHARS = 256
_MAX_NUMBER_CHARS = 64
Note = Callable[[Iterable[str]], object]
"""Takes names of what a request asks for in vain. Raises RequestRejected under --strict-fields."""
_FIELDS = {
    # The name without a prefix, which other gateways set. Ours comes after it, and so wins.
    "x-priority": "priority",
    "x-tokenyard-priority": "priority",
    "x-tokenyard-timeout": "timeout",
    "x-tokenyard-queue-timeout": "queue_timeout",
    "x-tokenyard-first-token-timeout": "first_token_timeout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The part of an engine request that comes from the call as a whole: from its headers, key and terms."""

    reply_id: str
    """The id of the reply; engine request ids are made from it."""
    terms: ServiceTerms
    model: str | None = None
    """The name that the call asks for."""
    max_tenant_tokens: int | None = None
    """Prompt tokens that the key may have waiting; None: no limit."""
    journal: Journal = field(default_factory=Journal, compare=False)
    """The record of the request, for logs and traces."""
    allowance: Allowance = field(default_factory=no_limits, compare=False)
    """Its part of the tokens and requests that the key may use a minute."""

    receive: Receive = field(default=stay_connected, compare=False)
    """The connection of the client, which may leave while its request is prepared."""
    note: Note = field(default=list, compare=False)

    def beyond_request(self) -> "Origin":
        """The same with a record of its own, and without the client: both end with the HTTP request."""
        journal = Journal()
        journal.reply_id = self.reply_id
        return replace(self, journal=journal, receive=stay_connected)

    def settle(self) -> None:
        """Count its output so far against the limits of its key."""
        self.allowance.settle(self.journal.num_output_tokens)


async def read_call(
    request: Request, model: type[FieldsT], refusals: Mapping[str, tuple[Any, ...]], *, reply_id: str
) -> tuple[FieldsT, Origin]:
    """Read headers and body. Raises Overloaded, NotPermitted, and the errors of `read_request`."""
    key = key_of(request.scope)
    allowance = open_allowance(request.scope, request.app.state.keys.rates)
    add_reply_headers(request.scope, allowance.headers)
    allowance.take_request()
    from_headers = fields_from_headers(request.headers)
    edge_of(request).engine.require_any_room(_best_priority(from_headers, key))
    body = await read_request(request, model, refusals, from_headers=from_headers)
    # With keys, the key is the tenant: another name in a header brings no further share.
    tenant: str | None = request.scope.get(KEY_NAME) or tenant_from_headers(request.headers)
    terms = service_terms(body, key, tenant)
    engine = edge_of(request).engine
    if asks_for_forecast(request.headers):
        forecast = forecast_headers(engine.forecast(terms))
        add_reply_headers(request.scope, lambda: forecast)
    if body.needs_model:
        await lease_model(request, is_patient=body.default_priority > 0, is_stream=body.streams_events)
    journal = journal_of(request.scope)
    journal.reply_id = reply_id
    journal.tenant = tenant or ""
    engine.require_room(terms.priority, journal)
    return body, Origin(
        reply_id=reply_id,
        terms=terms,
        model=body.model,
        max_tenant_tokens=key.max_queued_tokens if key else None,
        journal=journal,
        allowance=allowance,
        receive=request.receive,
        note=partial(note_ignored, Request(request.scope)),  # without the body, for work beyond the request
    )


def _best_priority(from_headers: Mapping[str, Any], key: ApiKey | None) -> int | None:
    """Lower bound of the call's priority, from header and key; None: there is no bound."""
    asked = from_headers.get("priority")
    if isinstance(asked, int):
        return asked
    return key.most_urgent_priority if key else None


def service_terms(body: ServiceFields, key: ApiKey | None, tenant: str | None) -> ServiceTerms:
    """Priority, tenant and time limits of a request. A null is no limit."""
    salt = body.cache_salt or ""
    return ServiceTerms(
        priority=_priority(body, key),
        tenant=(body.user or "") if tenant is None else tenant,
        # With a prefix that no other key has, a salt chosen by a client stays inside its own.
        cache_salt=f"{key.cache_salt}/{salt}" if key and key.cache_salt else salt,
        time_limits=TimeLimits(
            queue_s=_or_no_limit(body.queue_timeout),
            first_token_s=_or_no_limit(body.first_token_timeout),
            total_s=_or_no_limit(body.timeout),
        ),
    )


def _priority(body: ServiceFields, key: ApiKey | None) -> int:
    """The priority asked for, or the default. Raises NotPermitted for one that the key may not ask for."""
    ceiling = key.most_urgent_priority if key else None
    asked = body.default_priority if body.priority is None else body.priority
    if ceiling is None:
        return asked
    if body.priority is not None and body.priority < ceiling:
        raise NotPermitted(
            f"priority: this key may ask for {ceiling} or more, which is less urgent", param="priority"
        )
    return max(asked, ceiling)


def _or_no_limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def fields_from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Values by field name. Raises RequestRejected for a value that is not a number."""
    found: dict[str, Any] = {}
    for header, name in _FIELDS.items():
        text = headers.get(header)
        if text is not None:
            found[name] = _number(header, text)
    return found


def asks_for_forecast(headers: Mapping[str, str]) -> bool:
    """Tell whether the header asks for a forecast. Raises RequestRejected for anything but 0 and 1."""
    asked = headers.get(FORECAST_HEADER, "0")
    if asked not in ("0", "1"):
        raise RequestRejected(f"{FORECAST_HEADER} must be 1 or 0", param=FORECAST_HEADER)
    return asked == "1"


def forecast_headers(forecast: QueueForecast) -> dict[str, str]:
    """Headers of the reply; without the time where nothing is known of it."""
    headers = {
        "x-tokenyard-sequences-ahead": str(forecast.num_ahead),
        "x-tokenyard-wait-reason": forecast.wait_reason,
    }
    if forecast.expected_start_s is not None:
        headers["x-tokenyard-expected-start"] = f"{forecast.expected_start_s:.3f}"
    return headers


def tenant_from_headers(headers: Mapping[str, str]) -> str | None:
    """Return the tenant that a header names. Raises RequestRejected for a name that is too long."""
    tenant = headers.get(TENANT_HEADER)
    if tenant is not None and len(tenant) > MAX_TENANT_CHARS:
        raise RequestRejected(
            f"{TENANT_HEADER} must have at most {MAX_TENANT_CHARS} characters", param=TENANT_HEADER
        )
    return tenant


def _number(header: str, text: str) -> float:
    try:
        # Not longer, since a number needs no more, and brackets without end would exhaust the parser.
        number = json.loads(text) if len(text) <= _MAX_NUMBER_CHARS else None
    except ValueError:
        number = None
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise RequestRejected(f"the header {header} must be a number", param=header)
    return number
