"""Fields of a request that a gateway sets in headers, since it does not rewrite bodies.

Owns: the list of these fields. A header wins over the body, and meets the same bounds.
Never: the bounds (protocol.py).
"""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestRejected

TENANT_HEADER = "x-tokenyard-tenant"
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
