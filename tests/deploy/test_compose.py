"""The compose file: what it mounts exists, what it sets are options, and nothing is open by default."""

import re
from typing import Any

import pytest
import yaml

from engine.options.options import DECLARATIONS
from engine.options.sources import read_options
from tests.deploy.manifests import ROOT

FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVER: dict[str, Any] = COMPOSE["services"]["tokenyard"]


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_every_file_that_is_mounted_is_there(name: str) -> None:
    for volume in COMPOSE["services"][name].get("volumes", ()):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
        else:
            assert source.startswith("${") or source in COMPOSE["volumes"], source


def test_the_variables_are_options_of_the_server() -> None:
    ours = {name: value for name, value in SERVER["environment"].items() if name.startswith("TOKENYARD_")}
    assert {name.removeprefix("TOKENYARD_").lower() for name in ours} <= DECLARATIONS.keys()
    read_options({}, {name: value for name, value in ours.items() if "$" not in value})


def test_nothing_has_a_password_of_its_own_and_nothing_is_open_to_other_machines() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    for name in ("TOKENYARD_API_KEY", "GRAFANA_PASSWORD"):
        assert re.search(rf"\$\{{{name}:\?[^}}]+\}}", text), name
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_images_of_others_are_named_by_version_and_digest_and_all_can_be_replaced() -> None:
    images = {name: service["image"] for name, service in COMPOSE["services"].items()}
    assert re.fullmatch(r"\$\{SERVER_IMAGE:-tokenyard:cpu\}", images.pop("tokenyard"))
    digest = r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}"
    assert all(re.fullmatch(rf"\$\{{\w+_IMAGE:-\w+/\w+{digest}\}}", image) for image in images.values())


def test_the_server_is_locked_in_and_has_time_to_drain() -> None:
    assert SERVER["read_only"] is True
    assert SERVER["tmpfs"] == ["/tmp"]
    assert SERVER["cap_drop"] == ["ALL"]
    drain_s = read_options(
        {}, {"TOKENYARD_SHUTDOWN_TIMEOUT": SERVER["environment"]["TOKENYARD_SHUTDOWN_TIMEOUT"]}
    )
    assert int(SERVER["stop_grace_period"].removesuffix("s")) >= drain_s.shutdown_timeout + 10


def test_the_health_checks_port_is_not_published() -> None:
    port = SERVER["environment"]["TOKENYARD_HEALTH_PORT"]
    assert read_options({}, {"TOKENYARD_HEALTH_PORT": port}).health_port == int(port)
    assert not any(published.endswith(f":{port}") for published in SERVER["ports"])


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus() -> None:
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yaml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "tokenyard"
    assert job["static_configs"] == [{"targets": ["tokenyard:8000"]}]
    assert all((ROOT / "deploy" / "prometheus" / name).exists() for name in prometheus["rule_files"])
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/tokenyard.json" in mounted
