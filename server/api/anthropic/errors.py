"""Errors in Anthropic's shape.

Owns: the type for each status.
Never: the decision that something is wrong.
Source: Anthropic's page of errors.
"""

from typing import Any, Final

from server.edge.error_replies import ErrorReply

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ErrorReply) -> dict[str, Any]:
    """The error object; the same in a reply and as an event of a stream."""
    otherwise = "api_error" if error.status >= 500 else "invalid_request_error"
    detail = {"type": _TYPES.get(error.status, otherwise), "message": error.message}
    return {"type": "error", "error": detail}
