"""Counters of the edge: replies by route and status, ignored fields, connections given up.

Owns: counters with labels from fixed sets only; no client can make a new series.
"""

from collections import deque
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

_RECENT_ERRORS = 50
OWN_LIMIT = "own"


class RecentError(NamedTuple):
    """One error reply; of a bounded size, and of the client's words only names of fields and its id."""

    time_s: float
    """Seconds since the epoch."""
    method: str
    route: str
    status: int
    code: str
    param: str
    """The field at fault; empty if it is none."""
    message: str
    request_id: str


class HttpMetrics:
    """The counters, created once per engine registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.requests = counter(
            "tokenyard:http_requests",
            "HTTP requests answered, by method, route and status; 499: the client left first; limit is"
            " own for a 504 of a request that asked for less time than the operator allows, else empty.",
            "method",
            "route",
            "status",
            "limit",
        )
        self.errors = counter(
            "tokenyard:request_errors",
            "Errors sent to clients, in replies and in streams, by code.",
            "code",
        )
        self.unknown_fields = counter(
            "tokenyard:unknown_request_fields",
            "Fields in request bodies that this server does not know and ignored.",
        )
        self.ignored_fields = counter(
            "tokenyard:ignored_request_fields",
            "Hints and tools in request bodies that this server has no use for and ignored, by field.",
            "field",
        )
        self.refused_connections = counter(
            "tokenyard:refused_connections",
            "Connections closed at once because every place was taken, the reserve for probes too.",
        )
        self.slow_client_aborts = counter(
            "tokenyard:slow_client_aborts",
            "Streams given up because the client stopped reading.",
        )
        self.state_writes_waiting = Gauge(
            "tokenyard:state_writes_waiting",
            "Writes to --state-folder that failed, by a full disk say, and are tried again.",
            registry=registry,
        )
        self.background_faults = counter(
            "tokenyard:background_faults",
            "Faults in work that no client waits for, by the part that failed and was given up.",
            "part",
        )

        self.recent_errors: deque[RecentError] = deque(maxlen=_RECENT_ERRORS)
        """The last error replies, oldest first, for the web page."""

    def count_request(self, method: str, route: str, status: int, *, limit: str = "") -> None:
        """Count a request; method and route are of fixed sets.

        `limit` is OWN_LIMIT for one that failed by its own: by the status alone it would be our fault.
        """
        self.requests.labels(method, route, str(status), limit).inc()

    def count_background_fault(self, part: str) -> None:
        """Count a fault in the work on batches or responses; `part` is of a fixed set."""
        self.background_faults.labels(part).inc()

    def count_error(self, code: str) -> None:
        """Count an error; `code` is one of the catalogue, so that its rows bound the series."""
        self.errors.labels(code).inc()
