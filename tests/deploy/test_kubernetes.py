"""The Kubernetes manifests: valid, consistent with the server's options, and safe to roll."""

import copy
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from engine.options.options import DECLARATIONS, Options
from engine.options.schema import file_schema
from engine.options.sources import read_options
from server.edge.http import health_listener
from server.endpoints import OPEN_PATHS
from tests.deploy import promql
from tests.deploy.exported import faults, series
from tests.deploy.manifests import (
    KUBERNETES,
    KUBERNETES_VERSIONS,
    KUSTOMIZE,
    build,
    check,
    read_file,
    the_only,
)

OVERLAYS = sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
OPTION_FILES = sorted(KUBERNETES.rglob("tokenyard.yaml"))
NOT_OBJECTS = {"kustomization.yaml", "tokenyard.yaml", "endpoint-picker-config.yaml"}
OBJECT_FILES = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in NOT_OBJECTS)
DEPLOYMENT = KUBERNETES / "base" / "deployment.yaml"
GOODBYE_S = 5
"""Most seconds that the server takes to send the last replies once the drain is over."""

needs_kustomize = pytest.mark.skipif(KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed")


def name_of(path: Path) -> str:
    return str(path.relative_to(KUBERNETES))


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


@pytest.fixture
def deployment() -> dict[str, Any]:
    (item,) = read_file(DEPLOYMENT)
    return item


# Shapes.


@pytest.mark.parametrize("path", OBJECT_FILES, ids=name_of)
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_object_is_what_its_kind_allows(path: Path, version: str) -> None:
    for item in read_file(path):
        check(item, version)


def test_the_check_notices_a_misspelt_field(deployment) -> None:
    wrong = copy.deepcopy(deployment)
    container_of(wrong)["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong, KUBERNETES_VERSIONS[-1])
    (scaled,) = read_file(KUBERNETES / "overlays" / "autoscaled" / "scaledobject.yaml")
    scaled["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError):
        check(scaled, KUBERNETES_VERSIONS[-1])


@needs_kustomize
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_what_kustomize_builds_is_valid(folder: Path, version: str) -> None:
    for item in build(folder):
        check(item, version)


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=name_of)
def test_a_kustomization_names_only_what_is_there_and_all_of_it(path: Path) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {
        "apiVersion",
        "kind",
        "labels",
        "resources",
        "components",
        "images",
        "configMapGenerator",
        "patches",
    }
    assert content.keys() <= known
    named = [*content.get("resources", ()), *content.get("components", ())]
    named += [file for each in content.get("configMapGenerator", ()) for file in each["files"]]
    for name in named:
        assert (path.parent / name).exists(), name
    beside = {file.name for file in path.parent.glob("*.yaml")} - {"kustomization.yaml"}
    assert beside == {name for name in named if "/" not in name}
    for patch in content.get("patches", ()):
        assert patch["target"]["kind"] in {"Deployment", "LeaderWorkerSet", "NetworkPolicy"}
        assert all(step["op"] in {"add", "remove", "replace"} for step in yaml.safe_load(patch["patch"]))


@needs_kustomize
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_every_reference_inside_an_overlay_leads_somewhere(folder: Path) -> None:
    objects = build(folder)
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    for item in objects:
        if item["kind"] != "Deployment":
            continue
        pod = item["spec"]["template"]["spec"]
        assert ("ServiceAccount", pod["serviceAccountName"]) in names
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        for mount in container_of(item)["volumeMounts"]:
            assert mount["name"] in volumes
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()
    pods = the_only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert the_only(objects, "Service")["spec"]["selector"].items() <= pods
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert the_only(objects, kind)["spec"][key]["matchLabels"].items() <= pods


# Options, variables, ports.


@pytest.mark.parametrize("path", OPTION_FILES, ids=name_of)
def test_the_options_are_options_of_the_server(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), file_schema())
    read_options({"config": str(path)}, {})


def environment_of(deployment: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in container_of(deployment)["env"]}


def test_the_variables_are_options_of_the_server(deployment) -> None:
    ours = {
        name.removeprefix("TOKENYARD_").lower() for name in environment_of(deployment) if name != "TMPDIR"
    }
    assert ours <= DECLARATIONS.keys() | {"config"}


@needs_kustomize
def test_a_model_from_a_volume_is_named_by_a_variable_of_ours_and_lies_where_it_says() -> None:
    deployment = the_only(build(KUBERNETES / "overlays" / "gpu"), "Deployment")
    (model,) = [
        each["value"] for each in container_of(deployment)["env"] if each["name"] == "TOKENYARD_MODEL"
    ]
    mounts = [mount["mountPath"] for mount in container_of(deployment)["volumeMounts"]]
    assert any(model.startswith(f"{mount}/") for mount in mounts)
    assert "model" in DECLARATIONS


@needs_kustomize
def test_a_keys_file_comes_from_a_secret_that_only_the_server_may_read(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    shown = {
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "cpu", overlay)],
        "components": [os.path.relpath(KUBERNETES / "components" / "keys-file", overlay)],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(shown))
    deployment = the_only(build(overlay), "Deployment")
    check(deployment, KUBERNETES_VERSIONS[-1])
    container, pod = container_of(deployment), deployment["spec"]["template"]["spec"]
    (file,) = [each["value"] for each in container["env"] if each["name"] == "TOKENYARD_API_KEYS_FILE"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "keys-file"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "keys-file"]
    assert file.startswith(f"{mount['mountPath']}/")
    assert "subPath" not in mount, "it would never change"
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert "api_keys_file" in DECLARATIONS


def test_the_key_comes_from_a_secret_and_from_nowhere_else(deployment) -> None:
    (key,) = [each for each in container_of(deployment)["env"] if each["name"] == "TOKENYARD_API_KEY"]
    assert "secretKeyRef" in key["valueFrom"]
    assert "value" not in key
    text = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    assert "ALLOW_UNAUTHENTICATED" not in text
    assert "allow-unauthenticated" not in text


def test_all_speak_of_the_same_port(deployment) -> None:
    ports = {port["name"]: port["containerPort"] for port in container_of(deployment)["ports"]}
    (health_port,) = [
        each["value"] for each in container_of(deployment)["env"] if each["name"] == "TOKENYARD_HEALTH_PORT"
    ]
    assert ports == {"http": Options().port, "health": int(health_port)}
    (service,) = read_file(KUBERNETES / "base" / "service.yaml")
    assert [each["targetPort"] for each in service["spec"]["ports"]] == ["http"]
    (policy,) = read_file(KUBERNETES / "base" / "networkpolicy.yaml")
    clients, probes = policy["spec"]["ingress"]
    assert clients["ports"] == [{"port": "http"}]
    assert probes == {"ports": [{"port": "health"}]}, "from anywhere: no label names the node"
    (pool,) = read_file(KUBERNETES / "overlays" / "gateway" / "inferencepool.yaml")
    assert pool["spec"]["targetPorts"] == [{"number": Options().port}]
    (monitor,) = read_file(KUBERNETES / "components" / "monitoring" / "podmonitor.yaml")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["http"]


# Probes and the drain.


def test_probes_ask_the_port_that_no_load_can_delay(deployment) -> None:
    container = container_of(deployment)
    probes = [container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert [probe["port"] for probe in probes] == ["health"] * 3
    assert {probe["path"].encode() for probe in probes} <= health_listener._QUESTIONS.keys()
    assert not any("scheme" in probe for probe in probes), "it speaks no TLS"


def test_probes_ask_pages_that_need_no_key(deployment) -> None:
    container = container_of(deployment)
    asked = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert asked == {
        "startupProbe": "/health/ready",
        "readinessProbe": "/health/ready",
        "livenessProbe": "/health/live",
    }
    assert set(asked.values()) <= OPEN_PATHS


def test_nobody_is_killed_while_it_still_loads(deployment) -> None:
    probe = container_of(deployment)["startupProbe"]
    patience_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience_s >= 1800
    assert deployment["spec"]["progressDeadlineSeconds"] > patience_s


@pytest.mark.parametrize("path", OPTION_FILES, ids=name_of)
def test_there_is_time_to_drain_before_the_kill(path: Path, deployment) -> None:
    options = read_options({"config": str(path)}, {})
    needed_s = options.drain_delay + options.shutdown_timeout + GOODBYE_S
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= needed_s + 10


@pytest.mark.parametrize("path", OPTION_FILES, ids=name_of)
def test_it_serves_on_until_every_proxy_has_noticed(path: Path, deployment) -> None:
    probe = container_of(deployment)["readinessProbe"]
    delay_s = read_options({"config": str(path)}, {}).drain_delay
    assert delay_s >= probe["periodSeconds"] * probe["failureThreshold"]


@needs_kustomize
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_a_roll_out_and_a_drained_node_leave_somebody_to_serve(folder: Path) -> None:
    objects = build(folder)
    rolling = the_only(objects, "Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert sorted(rolling.values()) == [0, 1]
    assert the_only(objects, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


# Security.


@needs_kustomize
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda path: path.name)
def test_it_obeys_the_restricted_pod_security_standard(folder: Path) -> None:
    for item in build(folder):
        if item["kind"] != "Deployment":
            continue
        pod, container = item["spec"]["template"]["spec"], container_of(item)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["enableServiceLinks"] is False
        assert "limits" in container["resources"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_the_server_has_no_token_and_writes_only_where_it_may(deployment) -> None:
    pod = deployment["spec"]["template"]["spec"]
    (account,) = read_file(KUBERNETES / "base" / "serviceaccount.yaml")
    assert pod["automountServiceAccountToken"] is False
    assert account["automountServiceAccountToken"] is False
    variables = {each["name"]: each.get("value") for each in container_of(deployment)["env"]}
    writable = {
        mount["mountPath"] for mount in container_of(deployment)["volumeMounts"] if not mount.get("readOnly")
    }
    assert writable == {variables["TMPDIR"], "/dev/shm"}


def test_the_server_asks_nobody_for_anything(deployment) -> None:
    (policy,) = read_file(KUBERNETES / "base" / "networkpolicy.yaml")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []


def test_images_are_pinned_where_we_build_them_and_come_from_no_registry_by_name() -> None:
    for path in OBJECT_FILES:
        for item in read_file(path):
            if item["kind"] == "Deployment":
                assert "/" not in container_of(item)["image"]
    for path in KUSTOMIZATIONS:
        for image in yaml.safe_load(path.read_text()).get("images", ()):
            assert image["newTag"] in {"cpu", "cuda", "cpu-ray"}


# What scales and routes by our metrics.


def test_keda_scales_by_metrics_that_are_exported_and_never_by_cpu() -> None:
    (scaled,) = read_file(KUBERNETES / "overlays" / "autoscaled" / "scaledobject.yaml")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    read = [selector.metric for query in queries for selector in promql.read(query).selectors]
    assert read == [
        "tokenyard:num_requests_waiting",
        "tokenyard:kv_cache_usage_perc",
        "tokenyard:predicted_first_token_seconds_bucket",
        "tokenyard:first_token_target_seconds",
    ]
    for query in queries:
        assert not faults(promql.read(query))


@needs_kustomize
def test_the_autoscaled_deployment_leaves_the_number_of_replicas_to_keda() -> None:
    objects = build(KUBERNETES / "overlays" / "autoscaled")
    assert "replicas" not in the_only(objects, "Deployment")["spec"]
    target = the_only(objects, "ScaledObject")["spec"]["scaleTargetRef"]["name"]
    assert target == the_only(objects, "Deployment")["metadata"]["name"]


def test_scrapes_get_the_job_name_that_rules_and_dashboard_select() -> None:
    (monitor,) = read_file(KUBERNETES / "components" / "monitoring" / "podmonitor.yaml")
    labels = read_file(DEPLOYMENT)[0]["spec"]["template"]["metadata"]["labels"]
    assert labels[monitor["spec"]["jobLabel"]] == "tokenyard"
    assert monitor["spec"]["podMetricsEndpoints"][0]["path"] == "/metrics"


def test_the_endpoint_picker_reads_gauges_that_are_exported() -> None:
    config = yaml.safe_load((KUBERNETES / "overlays" / "gateway" / "endpoint-picker-config.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    extractor = plugins["core-metrics-extractor"]
    (engine,) = extractor["engineConfigs"]
    label = read_file(DEPLOYMENT)[0]["spec"]["template"]["metadata"]["labels"][extractor["engineLabelKey"]]
    assert label == engine["name"] == extractor["defaultEngine"]
    specs = {key: value for key, value in engine.items() if key.endswith("Spec") and value}
    assert set(specs.values()) <= series().keys()
    assert series()[specs["cacheInfoSpec"]].keys() >= {"block_size", "num_gpu_blocks"}
    assert plugins["metrics-data-source"]["path"] == "/metrics"
    profiled = {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]}
    assert profiled <= plugins.keys()


@needs_kustomize
def test_the_route_leads_to_the_pool_and_the_pool_to_pods_and_picker() -> None:
    objects = build(KUBERNETES / "overlays" / "gateway")
    route, pool = the_only(objects, "HTTPRoute"), the_only(objects, "InferencePool")
    (rule,) = route["spec"]["rules"]
    assert [backend["name"] for backend in rule["backendRefs"]] == [pool["metadata"]["name"]]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1"]
    labels = the_only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    picker = pool["spec"]["endpointPickerRef"]
    service = the_only(objects, "Service", picker["name"])
    assert [port["port"] for port in service["spec"]["ports"]] == [picker["port"]["number"]]
    arguments = container_of(the_only(objects, "Deployment", picker["name"]))["args"]
    assert f"--pool-name={pool['metadata']['name']}" in arguments
    assert f"--grpc-port={picker['port']['number']}" in arguments


@needs_kustomize
def test_the_precise_picker_finds_kv_events_where_replicas_publish_them_and_alone() -> None:
    folder = KUBERNETES / "overlays" / "gateway-precise"
    objects = build(folder)
    options = read_options({"config": str(folder / "tokenyard.yaml")}, {})
    config = yaml.safe_load((folder / "endpoint-picker-config.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    producer = plugins["precise-prefix-cache-producer"]
    assert producer["tokenProcessorConfig"]["blockSizeTokens"] == options.block_size
    ports = producer["kvEventsConfig"]["podDiscoveryConfig"]
    assert ports == {"socketPort": options.kv_events_port, "replaySocketPort": options.kv_events_port + 1}
    named = {
        each["name"]: each["containerPort"] for each in container_of(the_only(objects, "Deployment"))["ports"]
    }
    assert [named["kv-events"], named["kv-replay"]] == list(ports.values())
    *_, rule = the_only(objects, "NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == ["kv-events", "kv-replay"]
    (reader,) = [each["podSelector"]["matchLabels"] for each in rule["from"]]
    picker = the_only(objects, "Deployment", "tokenyard-endpoint-picker")
    assert reader == picker["spec"]["template"]["metadata"]["labels"]
    used = {each["pluginRef"] for profile in config["schedulingProfiles"] for each in profile["plugins"]}
    for source in config["dataLayer"]["sources"]:
        used |= {source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])}
    assert plugins.keys() - used == {"token-producer"}
    replicas = the_only(objects, "Service", "tokenyard")["spec"]["ports"]
    assert plugins["token-producer"]["vllm"]["url"] == f"http://tokenyard:{replicas[0]['port']}"
    assert used <= plugins.keys()
    assert plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"] in plugins
