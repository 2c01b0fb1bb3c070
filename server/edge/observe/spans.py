"""A span of each request, for a collector of traces.

Owns: the interface, and an implementation that records nothing.
Never: OpenTelemetry (otel_spans.py), which is only imported where it is asked for.
"""

from typing import Protocol

from engine.journal import Journal
from server.edge.observe.trace_context import TraceContext


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
    """Begins spans."""

    def begin(self, method: str, route: str, context: TraceContext | None) -> Span: ...


class NoSpan:
    """Keeps the caller's trace id, for the log."""

    def __init__(self, context: TraceContext | None) -> None:
        self.trace_id = context.trace_id if context else ""

    def end(self, journal: Journal, *, status: int, error_code: str) -> None:
        """Records nothing."""


class NoSpans:
    """Spans without a collector."""

    def begin(self, method: str, route: str, context: TraceContext | None) -> Span:  # noqa: ARG002 -- Spans'
        return NoSpan(context)
