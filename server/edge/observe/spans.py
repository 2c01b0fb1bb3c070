"""A span of each request, for a collector of traces, and the trace that its header `traceparent` names.

Owns: the interface, an implementation that records nothing, and the strict reading of the header: a malformed
one counts as none.
Never: OpenTelemetry (otel_spans.py), which is only imported where it is asked for; `tracestate`, which only
matters to a proxy.
Source: W3C Trace Context, sections 3.2 and 3.3.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.journal import Journal

_HEADER = b"traceparent"
# Version 00 ends there; what a later version adds begins with a hyphen, and is not read.
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_VERSION = b"ff"
_SAMPLED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The parent that a span would have."""

    trace_id: str
    """32 hexadecimal digits, not all zero."""
    parent_id: str
    """16 hexadecimal digits, not all zero."""
    is_sampled: bool
    """The caller records this trace, and may expect others to."""


def trace_context_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Read the header; None if it is absent, malformed, or there twice."""
    values = [value for name, value in headers if name == _HEADER]
    match = _FORM.fullmatch(values[0].strip(b" \t")) if len(values) == 1 else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == _NO_VERSION or (version == b"00" and rest is not None):
        return None
    if not int(trace_id, 16) or not int(parent_id, 16):
        return None
    return TraceContext(
        trace_id=trace_id.decode("ascii"),
        parent_id=parent_id.decode("ascii"),
        is_sampled=bool(int(flags, 16) & _SAMPLED),
    )


class Span(Protocol):
    """The span of one request, from its head to its last byte."""

    @property
    def trace_id(self) -> str:
        """Id of the trace that it is part of; empty if it is not traced."""
        ...

    def end(self, journal: Journal, *, status: int, error_code: str) -> None:
        """Hand it on; returns at once. `error_code` is empty if all went well."""
        ...


class Spans(Protocol):
    """A factory of spans, one for each request."""

    def begin(self, method: str, route: str, context: TraceContext | None) -> Span: ...


class NoSpan:
    """A span that is not recorded; it keeps the caller's trace id for the log."""

    def __init__(self, context: TraceContext | None) -> None:
        self.trace_id = context.trace_id if context else ""

    def end(self, journal: Journal, *, status: int, error_code: str) -> None:
        """Records nothing."""


class NoSpans:
    """Spans without a collector."""

    def begin(self, method: str, route: str, context: TraceContext | None) -> Span:  # noqa: ARG002 -- Spans'
        return NoSpan(context)
