"""--otlp-traces-endpoint is checked before anything slow, and says what is missing."""

import sys

import pytest

from engine.options import edge_config
from engine.options.declaration import OptionError
from engine.options.edge_config import check_traces_endpoint

URL = "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:4318/v1/traces",
        "grpc://h:4317/x",
        "http://",
        "http:///v1/traces",
        "http://h:x/v1",
        "http://h",
        "http://h/",
    ],
)
def test_what_is_no_full_address_is_refused(url) -> None:
    with pytest.raises(OptionError, match="/v1/traces"):
        check_traces_endpoint(url)


def test_a_password_in_it_is_refused_and_not_repeated() -> None:
    with pytest.raises(OptionError, match="OTEL_EXPORTER_OTLP_TRACES_HEADERS") as refused:
        check_traces_endpoint("http://me:secret@h:4318/v1/traces")
    assert "secret" not in str(refused.value)


def test_without_the_extra_it_is_told_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setattr(edge_config, "_OF_TRACES", ("pytest", "no-such-package"))
    with pytest.raises(OptionError, match=r"not installed.*tokenyard\[otel\]"):
        check_traces_endpoint(URL)


def test_with_it_or_without_an_endpoint_all_is_well_and_nothing_is_imported() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")
    before = set(sys.modules)  # importorskip has imported some
    check_traces_endpoint(None)
    check_traces_endpoint(URL)
    assert not [name for name in set(sys.modules) - before if name.startswith("opentelemetry")]
