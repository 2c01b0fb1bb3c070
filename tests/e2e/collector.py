"""A collector of traces: takes OTLP over HTTP on the loopback address, and keeps the spans."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


def plain(value: Any) -> Any:
    """An attribute's value as Python has it."""
    kind = value.WhichOneof("value")
    return (
        [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


class Collector:
    """Use `close` to be a collector that went away."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                message = ExportTraceServiceRequest()
                message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                collector.take(message)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, message: ExportTraceServiceRequest) -> None:
        for of_resource in message.resource_spans:
            self.resources.append({each.key: plain(each.value) for each in of_resource.resource.attributes})
            for scope in of_resource.scope_spans:
                self.spans += scope.spans

    def attributes_of(self, request_id: str) -> dict[str, Any] | None:
        span = self.span_of(request_id)
        return span and {each.key: plain(each.value) for each in span.attributes}

    def span_of(self, request_id: str) -> Any:
        """Span of a request; None until it is there."""
        for span in list(self.spans):
            for attribute in span.attributes:
                if attribute.key == "tokenyard.request_id" and attribute.value.string_value == request_id:
                    return span
        return None

    def close(self) -> None:
        """May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
