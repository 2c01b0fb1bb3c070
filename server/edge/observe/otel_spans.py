"""Spans for an OpenTelemetry collector, by OTLP over HTTP. Needs the extra `otel`; imported only with it.

Owns: the names of attributes and events, and bounds: a slow or absent collector costs spans only.
Source: OpenTelemetry's conventions for HTTP server spans and for generative AI. The latter are not stable, so
their names stand here and come from no package.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.util.types import AttributeValue

from engine.journal import Journal
from engine.version import VERSION
from server.edge.observe.spans import Span, TraceContext

log = logging.getLogger(__name__)

_MAX_PENDING = 2048
_BATCH = 512
_EVERY_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_GOODBYE_S = 2.0
_SERVER_ERROR = 500


class OtelSpans:
    """The tracer of the server; `operations` are `gen_ai.operation.name` by route."""

    def __init__(
        self,
        endpoint: str,
        *,
        operations: Mapping[str, str],
        count_lost: Callable[[float], None],
        model_name: str,
    ) -> None:
        # Said once by us instead of at every attempt by the library.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _CountingExporter(
            OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S), count_lost
        )
        self._processor = _BoundedProcessor(self._exporter, count_lost)
        # Attributes of the operator's own come from OTEL_RESOURCE_ATTRIBUTES.
        resource = Resource.create({"service.name": "tokenyard", "service.version": VERSION})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("tokenyard", VERSION)
        self._model_name = model_name
        self._operations = operations

    def begin(self, method: str, route: str, context: TraceContext | None) -> Span:
        """Begin the span of a request whose head has come."""
        attributes: dict[str, AttributeValue] = {"http.request.method": method, "http.route": route}
        if route in self._operations:
            attributes["gen_ai.operation.name"] = self._operations[route]
            attributes["gen_ai.provider.name"] = "tokenyard"
            attributes["gen_ai.request.model"] = self._model_name
        span = self._tracer.start_span(
            f"{method} {route}",
            context=trace.set_span_in_context(_remote(context)) if context else None,
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
        )
        return _OtelSpan(span)

    def close(self) -> None:
        """Send the pending spans; blocks for a moment, then drops the rest."""
        sending = threading.Thread(target=self._processor.force_flush, name="last spans", daemon=True)
        sending.start()
        sending.join(_GOODBYE_S)
        self._exporter.shutdown()  # whatever is still being sent ends by it
        ending = threading.Thread(target=self._processor.shutdown, name="no more spans", daemon=True)
        ending.start()
        ending.join(_GOODBYE_S)


class _OtelSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def end(self, journal: Journal, *, status: int, error_code: str) -> None:
        """Set all attributes and events from the journal, and hand the span on."""
        span = self._span
        if not span.is_recording():
            return
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("tokenyard.request_id", journal.request_id)
        if error_code:
            span.set_attribute("error.type", error_code)
            if status >= _SERVER_ERROR:
                span.set_status(trace.StatusCode.ERROR)
        if journal.model:
            span.set_attribute("gen_ai.request.model", journal.model)
        if journal.was_admitted:
            span.set_attributes(_attributes(journal))
        for event in journal.events:
            detail = {"tokenyard.finish_reason": event.detail} if event.detail else None
            span.add_event(event.stage.value, detail, timestamp=event.time_ns)
        span.end()


def _attributes(journal: Journal) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": journal.reply_id,
        "gen_ai.usage.input_tokens": journal.num_prompt_tokens,
        "gen_ai.usage.output_tokens": journal.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": journal.num_cached_tokens,
        "gen_ai.response.finish_reasons": [reason.value for reason in journal.finish_reasons],
        "tokenyard.priority": journal.priority or 0,
        "tokenyard.num_preemptions": journal.num_preemptions,
    }
    if journal.queue_s is not None:
        attributes["tokenyard.queue_time_s"] = journal.queue_s
    if journal.first_token_s is not None:
        attributes["tokenyard.time_to_first_token_s"] = journal.first_token_s
    if journal.abort_cause:
        attributes["tokenyard.abort_cause"] = journal.abort_cause
    return attributes


def _remote(context: TraceContext) -> trace.Span:
    """The caller's span, of which only the ids are known."""
    flags = trace.TraceFlags.SAMPLED if context.is_sampled else trace.TraceFlags.DEFAULT
    return trace.NonRecordingSpan(
        trace.SpanContext(
            trace_id=int(context.trace_id, 16),
            span_id=int(context.parent_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(flags),
        )
    )


class _CountingExporter(SpanExporter):
    """Counts spans that the collector did not take, and logs once that it does not, or does again."""

    def __init__(self, exporter: SpanExporter, count_lost: Callable[[float], None]) -> None:
        self._exporter = exporter
        self._count_lost = count_lost
        self._is_failing = False
        self.num_handled = 0
        """Spans that came out of the queue, exported or lost."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export; blocks the thread of the processor only."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.num_handled += len(spans)
            self._judge(result, len(spans))
        return result

    def _judge(self, result: SpanExportResult, num_spans: int) -> None:
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed:
            self._count_lost(num_spans)
        if has_failed and not self._is_failing:
            log.warning("the collector of traces does not answer: spans are dropped until it does")
        elif self._is_failing and not has_failed:
            log.info("the collector of traces answers again")
        self._is_failing = has_failed

    def shutdown(self) -> None:
        """Let exports under way fail soon."""
        self._exporter.shutdown()


class _BoundedProcessor(SpanProcessor):
    """The library's queue of spans with a bound of ours: the library does not count spans that it drops."""

    def __init__(self, exporter: _CountingExporter, count_lost: Callable[[float], None]) -> None:
        self._exporter = exporter
        self._count_lost = count_lost
        self._num_taken = 0
        self._batches = BatchSpanProcessor(
            exporter,
            max_queue_size=_MAX_PENDING,
            schedule_delay_millis=_EVERY_S * 1000,
            max_export_batch_size=_BATCH,
        )

    def on_end(self, span: ReadableSpan) -> None:
        """Called in the event loop: never waits."""
        if self._num_taken - self._exporter.num_handled >= _MAX_PENDING:
            self._count_lost(1)
            return
        self._num_taken += 1
        self._batches.on_end(span)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]
