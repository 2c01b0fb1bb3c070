"""The Helm chart: the same objects as the tested kustomize base, and values that are checked."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.options.options import DECLARATIONS
from engine.options.schema import file_schema
from engine.options.sources import read_options
from tests.deploy import promql
from tests.deploy.exported import faults
from tests.deploy.helm_subset import render
from tests.deploy.manifests import (
    KUBERNETES,
    KUBERNETES_VERSIONS,
    ROOT,
    check,
    read_file,
    read_objects,
    the_only,
)

CHART = ROOT / "deploy" / "helm" / "tokenyard"
TEMPLATES = sorted((CHART / "templates").glob("*.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
RELEASE = {"Name": "tokenyard", "Namespace": "inference"}
HELM = shutil.which("helm")


def all_on() -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    values["replicas"] = None
    values["model"]["claimName"] = "models"
    values["nodeSelector"] = {"disk": "fast"}
    values["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    values["keysFile"]["secretName"], values["tls"]["secretName"] = "more-keys", "certificate"
    values["tls"]["clientCa"]["secretName"] = "authorities"
    values["monitoring"]["clientCertificateSecretName"] = "prometheus-certificate"
    values["monitoring"]["enabled"] = values["autoscaling"]["enabled"] = True
    return values


def all_off() -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    values["networkPolicy"] = {"enabled": False}
    values["apiKeys"]["secretName"], values["keysFile"]["secretName"] = "", "more-keys"
    return values


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for path in TEMPLATES for item in read_objects(render(path, values, RELEASE))]


CASES = {"as it comes": VALUES, "all on": all_on(), "all off": all_off()}


@pytest.mark.parametrize("case", CASES)
def test_values_fit_their_schema_and_templates_make_valid_objects(case: str) -> None:
    jsonschema.validate(CASES[case], SCHEMA)
    made = objects(CASES[case])
    for item in made:
        for version in KUBERNETES_VERSIONS:
            check(item, version)
    kinds = {item["kind"] for item in made}
    assert ("NetworkPolicy" in kinds) == (case != "all off")
    assert ({"PodMonitor", "ScaledObject"} <= kinds) == (case == "all on")


def without(item: Any, *names: str) -> Any:
    """The same without entries of these names, at any depth."""
    if isinstance(item, dict):
        return {key: without(value, *names) for key, value in item.items() if key not in names}
    return [without(each, *names) for each in item] if isinstance(item, list) else item


def kind_and_name(item: dict[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def test_the_deployment_is_that_of_the_kustomize_base() -> None:
    """Names, labels and what the overlays decide apart."""
    (base,) = read_file(KUBERNETES / "base" / "deployment.yaml")
    chart = the_only(objects(VALUES), "Deployment")
    differ = ("metadata", "matchLabels", "resources", "image", "imagePullPolicy", "configMap")
    differ += ("nodeSelector", "tolerations")
    assert without(chart, *differ) == without(base, *differ)


def test_files_of_secrets_are_mounted_where_the_variables_say_for_the_server_alone() -> None:
    (container,) = the_only(objects(all_on()), "Deployment")["spec"]["template"]["spec"]["containers"]
    volumes = the_only(objects(all_on()), "Deployment")["spec"]["template"]["spec"]["volumes"]
    files = {each["name"]: each.get("value", "") for each in container["env"]}
    places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert files["TOKENYARD_API_KEYS_FILE"] == f"{places['keys-file']}/{VALUES['keysFile']['secretKey']}"
    assert files["TOKENYARD_TLS_CERT"] == f"{places['tls']}/tls.crt"
    assert files["TOKENYARD_TLS_KEY"] == f"{places['tls']}/tls.key"
    assert files["TOKENYARD_TLS_CLIENT_CA"] == f"{places['client-ca']}/ca.crt"
    secrets = {each["name"]: each["secret"] for each in volumes if "secret" in each}
    assert {name: secret["secretName"] for name, secret in secrets.items()} == {
        "keys-file": "more-keys",
        "tls": "certificate",
        "client-ca": "authorities",
    }
    assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}
    assert {name.removeprefix("TOKENYARD_").lower() for name in files if name != "TMPDIR"} <= {
        *DECLARATIONS,
        "config",
    }


def test_with_tls_prometheus_asks_by_https_and_probes_need_none() -> None:
    made = objects(all_on())
    (scraped,) = the_only(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["scheme"] == "https"
    (container,) = the_only(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["port"] == "health"


def test_under_mtls_prometheus_shows_a_certificate_and_probes_ask_the_port_that_needs_none() -> None:
    made = objects(all_on())
    (scraped,) = the_only(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["tlsConfig"]["cert"]["secret"] == {"name": "prometheus-certificate", "key": "tls.crt"}
    assert scraped["tlsConfig"]["keySecret"] == {"name": "prometheus-certificate", "key": "tls.key"}
    (container,) = the_only(made, "Deployment")["spec"]["template"]["spec"]["containers"]
    probes = [value for name, value in container.items() if name.endswith("Probe")]
    assert [probe["httpGet"]["port"] for probe in probes] == ["health"] * 3
    assert not any("scheme" in probe["httpGet"] for probe in probes)
    without_mtls = all_on()
    without_mtls["tls"]["clientCa"]["secretName"] = ""
    (scraped,) = the_only(objects(without_mtls), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["tlsConfig"] == {"insecureSkipVerify": True}


@pytest.mark.parametrize("missing", ["the server's certificate", "Prometheus's certificate"])
def test_mtls_without_what_it_needs_is_refused(missing: str) -> None:
    wrong = all_on()
    if missing == "the server's certificate":
        wrong["tls"]["secretName"] = ""
    else:
        wrong["monitoring"]["clientCertificateSecretName"] = ""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)
    wrong["tls"]["clientCa"]["secretName"] = ""
    jsonschema.validate(wrong, SCHEMA)


def test_a_chart_without_any_key_is_refused() -> None:
    wrong = all_off()
    wrong["keysFile"]["secretName"] = ""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


def test_there_is_time_to_drain_before_the_kill(tmp_path: Path) -> None:
    file = tmp_path / "tokenyard.yaml"
    file.write_text(yaml.safe_dump(VALUES["options"]))
    options = read_options({"config": str(file)}, {})
    assert options.drain_delay >= 10
    assert VALUES["terminationGracePeriodSeconds"] >= options.drain_delay + options.shutdown_timeout + 15


def test_the_options_are_options_of_the_server() -> None:
    (options,) = [item["data"]["tokenyard.yaml"] for item in objects(VALUES) if item["kind"] == "ConfigMap"]
    assert yaml.safe_load(options) == VALUES["options"]
    jsonschema.validate(VALUES["options"], file_schema())


def test_new_options_start_a_rolling_update() -> None:
    def checksum(values: dict[str, Any]) -> str:
        template = the_only(objects(values), "Deployment")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/options"]

    changed = copy.deepcopy(VALUES)
    changed["options"]["max-num-seqs"] = 7
    assert checksum(changed) != checksum(VALUES)


def test_keda_reads_what_is_exported_and_decides_the_number_alone() -> None:
    made = objects(all_on())
    (trigger,) = the_only(made, "ScaledObject")["spec"]["triggers"]
    assert not faults(promql.read(trigger["metadata"]["query"]))
    assert "replicas" not in the_only(made, "Deployment")["spec"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("image", "tag"), "latest"),
        (("replicas",), 0),
        (("options", "api-key"), "secret"),
        (("options", "host"), "0.0.0.0"),
        (("options", "health-port"), 9000),
        (("options", "tls-client-ca"), "/ca.crt"),
        (("tls", "clientCa"), {"secretName": "authorities", "secretKey": "a/b"}),
        (("keysFile", "secretKey"), "../keys.yaml"),
        (("networkPolicy", "fromNamespaces"), []),
        (("replica",), 1),
        (("autoscaling", "maxReplicas"), "8"),
    ],
)
def test_wrong_values_are_refused(path: tuple[str, ...], value: Any) -> None:
    wrong = copy.deepcopy(VALUES)
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "{{ .Values.nothing }}",
        '{{ include "x" . }}',
        "{{ .Values.replicas | upper }}",
        "{{- if .Values.replicas }}",
    ],
)
def test_the_stand_in_refuses_what_it_does_not_know(text: str, tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text(text)
    with pytest.raises((ValueError, KeyError)):
        render(template, VALUES, RELEASE)


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
def test_helm_makes_the_same_of_it(tmp_path: Path) -> None:
    assert HELM is not None
    subprocess.run([HELM, "lint", "--strict", CHART], check=True, timeout=60)
    for values in CASES.values():
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        command = [
            HELM,
            "template",
            RELEASE["Name"],
            CHART,
            "--namespace",
            RELEASE["Namespace"],
            "--values",
            file,
        ]
        made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        ours = without(objects(values), "checksum/options")
        assert sorted(without(read_objects(made), "checksum/options"), key=kind_and_name) == sorted(
            ours, key=kind_and_name
        )
