"""Fields of a request that a gateway sets in headers, since it does not rewrite bodies.

Owns: the list of these fields. A header wins over the body, and meets the same bounds.
Never: the bounds (protocol.py).
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestRejected
from engine.types import QueueForecast

TENANT_HEADER = "x-tokenyard-tenant"
FORECAST_HEADER = "x-tokenyard-forecast"
MAX_TENANT_CHARS = 256
_MAX_NUMBER_CHARS = 64
_FIELDS = {
    # The name without a prefix, which other gateways set. Ours comes after it, and so wins.
    "x-priority": "priority",
    "x-tokenyard-priority": "priority",
    "x-tokenyard-timeout": "timeout",
    "x-tokenyard-queue-timeout": "queue_timeout",
    "x-tokenyard-first-token-timeout": "first_token_timeout",
}


def fields_from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Values by field name. Raises RequestRejected for a value that is not a number."""
    found: dict[str, Any] = {}
    for header, field in _FIELDS.items():
        text = headers.get(header)
        if text is not None:
            found[field] = _number(header, text)
    return found


def asks_for_forecast(headers: Mapping[str, str]) -> bool:
    """Raises RequestRejected for anything but 0 and 1."""
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
    """Raises RequestRejected for a name that is too long."""
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
