"""The files for HAProxy and nginx hold numbers against our own. That they work: tests/faults/."""

import re

import orjson
import pytest
import yaml

from engine.options.options import Options
from server.command.startup.http_servers import KEEP_ALIVE_S
from server.edge.error_catalogue import CATALOGUE
from server.edge.http.endpoint import ErrorReplyBody
from tests.deploy.manifests import KUBERNETES, ROOT

FOLDER = ROOT / "deploy" / "proxies"
HAPROXY, NGINX = ((FOLDER / name).read_text(encoding="utf-8") for name in ("haproxy.cfg", "nginx.conf"))
UNITS = {"ms": 0.001, "s": 1, "m": 60}


def directive(text: str, name: str) -> str:
    """Text that follows a directive which is there once, comments aside."""
    (value,) = re.findall(rf"^\s*{re.escape(name)}\s+(.*?);?$", text, flags=re.MULTILINE)
    return value


def seconds(value: str) -> float:
    """Seconds of a time as both programs write it."""
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", value).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def test_both_are_open_to_this_machine_alone_and_have_the_same_replicas() -> None:
    assert directive(HAPROXY, "bind") == directive(NGINX, "listen") == "127.0.0.1:8080"
    replicas = re.findall(r"^\s+server \w+ (\S+)$", HAPROXY, flags=re.MULTILINE)
    assert replicas == re.findall(r"^\s+server (\d\S+) ", NGINX, flags=re.MULTILINE)
    assert len(replicas) == 2


def test_a_stream_is_never_silent_for_as_long_as_they_wait() -> None:
    patience = [directive(HAPROXY, "timeout server"), directive(HAPROXY, "timeout client")]
    assert (
        min(map(seconds, [*patience, directive(NGINX, "proxy_read_timeout")])) > Options().stream_keep_alive
    )


def test_nginx_lets_a_body_through_that_the_server_has_to_refuse() -> None:
    assert int(directive(NGINX, "client_max_body_size").removesuffix("m")) * 2**20 > Options().max_body_size


def test_nginx_closes_a_kept_connection_before_the_server_does() -> None:
    assert seconds(directive(NGINX, "keepalive_timeout")) < KEEP_ALIVE_S


def test_a_replica_serves_on_for_longer_than_either_needs_to_notice() -> None:
    options = yaml.safe_load((KUBERNETES / "base" / "tokenyard.yaml").read_text())
    drain_delay_s = seconds(options["drain-delay"])
    check = re.search(r"inter (\w+) fastinter (\w+) fall (\d)", directive(HAPROXY, "default-server"))
    assert check
    assert seconds(check[1]) + seconds(check[2]) * (int(check[3]) - 1) < drain_delay_s
    assert all(seconds(value) < drain_delay_s for value in re.findall(r"fail_timeout=(\w+)", NGINX))


@pytest.mark.parametrize("text", [HAPROXY, NGINX], ids=["haproxy", "nginx"])
def test_what_they_answer_themselves_has_our_shape_and_a_code_of_ours(text: str) -> None:
    bodies = set(re.findall(r"'(\{.*\})'", text))
    assert len(bodies) == 1
    error = ErrorReplyBody.model_validate(orjson.loads(bodies.pop())).error
    assert (error.code, CATALOGUE[error.code].status) == ("not_ready", 503)
    assert CATALOGUE[error.code].type == error.type


def test_paths_that_are_closed_are_compared_as_the_server_reads_them() -> None:
    """`/%6detrics` is /metrics for the server; nginx decodes a path before it looks for a location."""
    assert re.findall(r"\{ path(\S*) /\S+ \}", HAPROXY) == [",url_dec"]
    assert re.findall(r"location\s+=\s+(/\S+)", NGINX) == ["/metrics"]
