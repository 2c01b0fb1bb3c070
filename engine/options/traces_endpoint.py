"""The check of --otlp-traces-endpoint.

Owns: the rules for the address, and the check that OpenTelemetry is installed, before anything slow.
Never: imports OpenTelemetry (server/edge/observe/otel_spans.py does, if asked for).
"""

from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from engine.options.declaration import OptionError

_FLAG = "--otlp-traces-endpoint"
_NEEDED = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def check_traces_endpoint(url: str | None) -> None:
    """Check the address; None is no spans. Raises OptionError."""
    if url is None:
        return
    _check_url(url)
    if not all(map(_is_installed, _NEEDED)):
        raise OptionError(
            _FLAG, "OpenTelemetry is not installed", "pip install 'tokenyard[otel]', or leave the option out"
        )


def _check_url(url: str) -> None:
    """Check the address without repeating it, since it may hold a password."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host or parts.scheme not in ("http", "https"):
        raise OptionError(_FLAG, "it is not an address of HTTP", "write http://localhost:4318/v1/traces, say")
    if parts.username or parts.password:
        raise OptionError(
            _FLAG,
            "a password in it would be shown where options are shown",
            "set OTEL_EXPORTER_OTLP_TRACES_HEADERS for the collector's key",
        )
    if parts.path in ("", "/"):
        raise OptionError(
            _FLAG,
            "it has no path, and is used as it stands",
            "end it with /v1/traces, where collectors listen",
        )


def _is_installed(distribution: str) -> bool:
    """Look up the distribution's metadata: a search for the module would import its parents."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
