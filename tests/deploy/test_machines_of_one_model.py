"""The manifests of one model on several machines: LeaderWorkerSet's, and those of a Ray cluster."""

import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.options.engine_config import resolve
from engine.options.options import DECLARATIONS, Options
from engine.options.sources import read_options
from engine.ray_cluster.nodes import share_of
from tests.deploy.manifests import KUBERNETES, KUBERNETES_VERSIONS, build, check, read_file, the_only
from tests.deploy.test_dockerfile import ENVIRONMENT
from tests.deploy.test_kubernetes import DEPLOYMENT, GOODBYE_S, container_of, needs_kustomize


@pytest.fixture
def deployment() -> dict[str, Any]:
    (item,) = read_file(DEPLOYMENT)
    return item


NODES = KUBERNETES / "nodes"
RAY = KUBERNETES / "ray"


def node_pods() -> dict[str, dict[str, Any]]:
    """Pods of the LeaderWorkerSet and of the RayCluster, by their role."""
    (item,) = read_file(NODES / "leaderworkerset.yaml")
    templates = item["spec"]["leaderWorkerTemplate"]
    (cluster,) = read_file(RAY / "raycluster.yaml")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    pods = {role: templates[f"{role}Template"] for role in ("leader", "worker")}
    return pods | {"ray head": cluster["spec"]["headGroupSpec"]["template"], "ray worker": group["template"]}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("role", ["leader", "worker", "ray head", "ray worker"])
def test_pods_of_nodes_are_pods_as_restricted_as_those_of_the_base(
    deployment: dict[str, Any], role: str, version: str
) -> None:
    pod = node_pods()[role]
    labels = pod["metadata"]["labels"]
    around = {**deployment["spec"], "selector": {"matchLabels": labels}, "template": pod}
    check({**deployment, "spec": around}, version)
    ours, base = pod["spec"], deployment["spec"]["template"]["spec"]
    for name in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert ours[name] == base[name]
    (container,) = ours["containers"]
    assert container["securityContext"] == container_of(deployment)["securityContext"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        each["name"] for each in ours["volumes"]
    }
    environment = {each["name"].removeprefix("TOKENYARD_").lower() for each in container["env"]}
    assert environment - {"tmpdir", "ray_usage_stats_enabled"} <= DECLARATIONS.keys()
    keys = [each for each in container["env"] if each["name"] == "TOKENYARD_CLUSTER_KEY"]
    assert len(keys) == (0 if "ray" in role else 1)
    assert all("secretKeyRef" in key["valueFrom"] for key in keys)


def test_nodes_divide_the_stages_and_reach_each_other_where_the_first_listens() -> None:
    (policy,) = read_file(NODES / "networkpolicy.yaml")
    (service,) = read_file(NODES / "service.yaml")
    pods = node_pods()
    (leader,) = pods["leader"]["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert named == {"http": Options().port, "health": 8001, "nodes": Options().cluster_port}
    *_, nodes = policy["spec"]["ingress"]
    to_nodes, _ = policy["spec"]["egress"]
    assert nodes["from"] == to_nodes["to"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert (nodes["ports"], to_nodes["ports"]) == ([{"port": "nodes"}], [{"port": named["nodes"]}])
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert all(labels.items() <= pods[role]["metadata"]["labels"].items() for role in ("leader", "worker"))
    index = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"] == labels | index
    assert pods["leader"]["spec"]["terminationGracePeriodSeconds"] >= 10 + 45 + GOODBYE_S + 10
    assert {"startupProbe", "livenessProbe", "readinessProbe"}.isdisjoint(
        pods["worker"]["spec"]["containers"][0]
    )


@pytest.mark.parametrize(("role", "index"), [("leader", 0), ("worker", 1)])
def test_each_pod_of_nodes_starts_with_the_variables_of_its_image_and_its_place(
    role: str, index: int, tiny_model: Path
) -> None:
    (item,) = read_file(NODES / "leaderworkerset.yaml")
    (container,) = node_pods()[role]["spec"]["containers"]
    environment = ENVIRONMENT | {each["name"]: each.get("value", "k" * 32) for each in container["env"]}
    environment |= {"TOKENYARD_MODEL": str(tiny_model)}
    environment |= {"LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": "tokenyard-nodes-0.tokenyard-nodes"}
    environment["LWS_GROUP_SIZE"] = str(item["spec"]["leaderWorkerTemplate"]["size"])
    config, _ = resolve(read_options({}, environment), environment=environment)
    assert config.cluster is not None
    assert config.cluster.node == index


def test_the_pods_of_ray_have_as_many_processors_as_the_server_asks_ray_for(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", jsonschema)  # an extra, which needs to be there only
    (cluster,) = read_file(RAY / "raycluster.yaml")
    head, (group,) = cluster["spec"]["headGroupSpec"], cluster["spec"]["workerGroupSpecs"]
    (container,) = head["template"]["spec"]["containers"]
    environment = ENVIRONMENT | {each["name"]: each.get("value", "k" * 32) for each in container["env"]}
    environment |= {"TOKENYARD_MODEL": str(tiny_model)}
    config, server = resolve(read_options({}, environment), environment={})
    assert config.ray is not None
    assert config.ray.num_nodes == 1 + group["replicas"]
    assert (
        server.shutdown_timeout_s + server.drain_delay_s + GOODBYE_S
        < (head["template"]["spec"]["terminationGracePeriodSeconds"])
    )
    num_processors = str(share_of(config, config.ray.num_nodes).taken.num_processors)
    for each in (head, group):
        (container,) = each["template"]["spec"]["containers"]
        assert each["rayStartParams"]["num-cpus"] == container["resources"]["limits"]["cpu"] == num_processors
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["command"][-1]
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (service,) = read_file(RAY / "service.yaml")
    labels = head["template"]["metadata"]["labels"] | {"ray.io/node-type": "head"}
    assert service["spec"]["selector"] == labels


@needs_kustomize
def test_pods_with_gpus_have_one_for_each_rank_and_reach_each_other_by_nccl(
    deployment: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(KUBERNETES / "nodes-gpu")
    item = the_only(built, "LeaderWorkerSet", "tokenyard-nodes")["spec"]["leaderWorkerTemplate"]
    for role in ("leader", "worker"):
        pod = item[f"{role}Template"]
        around = {**deployment["spec"], "selector": {"matchLabels": pod["metadata"]["labels"]}}
        check({**deployment, "spec": {**around, "template": pod}}, KUBERNETES_VERSIONS[-1])
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "tokenyard:cuda"
        num_gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
        environment = {each["name"]: each.get("value", "k" * 32) for each in container["env"]}
        environment |= {"TOKENYARD_MODEL": str(tiny_model), "LWS_LEADER_ADDRESS": "first"}
        environment |= {"LWS_GROUP_SIZE": str(item["size"]), "LWS_WORKER_INDEX": str(int(role == "worker"))}
        config, _ = resolve(read_options({}, environment), environment=environment)
        assert config.worker.num_gpus_of_a_node == num_gpus == 2
    policy = the_only(built, "NetworkPolicy", "tokenyard-nodes")["spec"]
    among_pods = [{"podSelector": policy["podSelector"]}]
    assert {"from": among_pods} in policy["ingress"]
    assert {"to": among_pods} in policy["egress"]


@needs_kustomize
def test_what_kustomize_builds_of_nodes_names_the_image() -> None:
    built = the_only(build(NODES), "LeaderWorkerSet", "tokenyard-nodes")
    templates = built["spec"]["leaderWorkerTemplate"]
    images = [templates[f"{role}Template"]["spec"]["containers"][0]["image"] for role in ("leader", "worker")]
    assert images == ["tokenyard:cpu"] * 2
