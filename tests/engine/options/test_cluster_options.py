"""Place of a node, by flags or by the environment of torchrun or LeaderWorkerSet, and refusals."""

import sys

import pytest

from engine.options.declaration import OptionError
from engine.options.engine_config import resolve
from engine.options.engine_split import ClusterConfig
from engine.options.sources import read_options
from engine.processes.engine_processes import config_of
from engine.processes.supervisor import device_environment
from worker.ranks.device_ranks import device_of_rank

KEY = "k" * 32
BASE = {"pipeline_parallel_size": "2", "cluster_key": KEY}
FLAGS = {"nnodes": "2", "node_rank": "1", "master_addr": "10.0.0.1"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "10.0.0.1"}
SECOND_OF_TWO = ClusterConfig(num_nodes=2, node=1, host="10.0.0.1", port=29600, key=KEY)


def cluster_of(given: dict[str, str], environment: dict[str, str]) -> ClusterConfig | None:
    config, _ = resolve(read_options(given, {}), environment=environment)
    assert config.worker.num_nodes == (config.cluster.num_nodes if config.cluster else 1)
    return config.cluster


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (FLAGS, {}),
        ({}, TORCHRUN),
        ({}, LWS),
        ({}, {**LWS, "WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "other"}),
        (FLAGS, {"WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "other"}),
        (FLAGS, {"RANK": "3"}),
        ({"node_rank": "1"}, {**TORCHRUN, "RANK": "0"}),
    ],
)
def test_a_node_knows_its_place(flags: dict[str, str], environment: dict[str, str]) -> None:
    assert cluster_of(BASE | flags, environment) == SECOND_OF_TWO


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "8", "RANK": "3"}, {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}]
)
def test_a_machine_is_alone_without_all_of_it(environment: dict[str, str]) -> None:
    assert cluster_of({}, environment) is None


@pytest.mark.parametrize(
    ("given", "environment", "line"),
    [
        (
            {**FLAGS, "node_rank": "2"},
            {},
            "--nnodes 2 with --node-rank 2: nodes count from 0; give 1 at most",
        ),
        ({"nnodes": "2", "node_rank": "1"}, {}, "--master-addr is not known"),
        ({"node_rank": "1"}, {}, "--node-rank: there is one node; give --nnodes too"),
        ({**FLAGS, "pipeline_parallel_size": "3"}, {}, "give --pipeline-parallel-size 2 or a multiple of it"),
        (
            {**FLAGS, "pipeline_parallel_size": "1", "tensor_parallel_size": "3"},
            {},
            "--tensor-parallel-size 3: each node computes as many stages, or as large a part of one; give",
        ),
        ({**FLAGS, "data_parallel_size": "2"}, {}, "one engine has all nodes"),
        ({**FLAGS, "master_addr": "::1"}, {}, "--master-addr ::1: nodes meet over IPv4"),
        ({**FLAGS, "cluster_key": "short"}, {}, "32 characters or more, TOKENYARD_CLUSTER_KEY"),
        ({}, {}, "--cluster-key: there is one node; give --nnodes too, or leave it out"),
        ({}, {"RANK": "3", "WORLD_SIZE": "2"}, "WORLD_SIZE and RANK without MASTER_ADDR: "),
        ({"nnodes": "2", "master_addr": "10.0.0.1"}, {"RANK": "0"}, "RANK without WORLD_SIZE: "),
        ({}, {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, "set LWS_LEADER_ADDRESS too, or give"),
        ({}, {**LWS, "LWS_WORKER_INDEX": ""}, "LWS_LEADER_ADDRESS without LWS_WORKER_INDEX: "),
        ({}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "run torchrun with --nproc-per-node 1"),
        ({}, {**LWS, "LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE=two: it is no number"),
    ],
)
def test_a_wrong_place_is_refused_in_one_line(
    given: dict[str, str], environment: dict[str, str], line: str
) -> None:
    with pytest.raises(OptionError) as refusal:
        cluster_of(BASE | given, environment)
    assert line in str(refusal.value)
    assert "short" not in str(refusal.value), "a secret is not shown"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"pipeline_parallel_size": "1"}, "there is one rank; give --pipeline-parallel-size 2, say"),
        ({"node_rank": "0"}, "ray with --node-rank: Ray starts all nodes but this one"),
        ({"device": "cuda:1"}, "ray with --device cuda:1: Ray chooses the GPUs"),
        ({"nnodes": "3"}, "give --pipeline-parallel-size 3 or a multiple of it"),
        ({"data_parallel_size": "2"}, "one engine has all nodes"),
        ({"master_addr": "::1"}, "--master-addr ::1: nodes meet over IPv4"),
        ({"cluster_key": "short"}, "--cluster-key: it has fewer than 32 characters; leave it out"),
        ({}, "ray: the package ray is not installed; pip install 'tokenyard[ray]', on all nodes"),
    ],
)
def test_ray_is_refused_in_one_line_what_it_cannot_place(
    given: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError) as refusal:
        cluster_of(BASE | {"distributed_executor": "ray"} | given, TORCHRUN)
    assert line in str(refusal.value)


def test_a_port_of_nodes_without_nodes_is_refused() -> None:
    with pytest.raises(OptionError, match="--cluster-port 29601: there is one node"):
        cluster_of({"cluster_port": "29601"}, {})


def test_an_address_for_clients_needs_a_key_where_clients_come_and_on_no_other_node() -> None:
    given = BASE | FLAGS | {"host": "0.0.0.0"}
    assert cluster_of(given, {}) == SECOND_OF_TWO
    with pytest.raises(OptionError, match=r"--host 0\.0\.0\.0 without an API key"):
        cluster_of(given | {"node_rank": "0"}, {})


def test_the_secret_is_in_no_text_of_the_configuration() -> None:
    config, _ = resolve(read_options(BASE | FLAGS, {}), environment={})
    assert KEY not in repr(config)


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"data_parallel_size": "3"}, "--data-parallel-size 3: each engine takes a GPU, and there are 2"),
        (
            {"data_parallel_size": "2", "device": "cuda:1"},
            "--device cuda:1: each engine has a GPU of its own",
        ),
        ({"tensor_parallel_size": "4"}, "--tensor-parallel-size 4: each rank takes a GPU, and there are 2"),
        (
            {"tensor_parallel_size": "2", "pipeline_parallel_size": "2"},
            "--pipeline-parallel-size 2 and --tensor-parallel-size 2: each rank takes a GPU",
        ),
        (
            {"pipeline_parallel_size": "2", "data_parallel_size": "2"},
            "--data-parallel-size 2: each engine takes 2 GPUs, and there are 2",
        ),
        ({"tensor_parallel_size": "2", "gpu_kernels": "off"}, "--gpu-kernels off: only layers of the GPU"),
        (
            {"tensor_parallel_size": "2", "cpu_kernels": "off", "device": "cpu"},
            "--cpu-kernels off: only layers of the CPU",
        ),
        (
            {"tensor_parallel_size": "2", "activations": "fp8"},
            "--tensor-parallel-size 2 with --activations fp8: it rounds inputs by the largest of a row",
        ),
        (
            {"tensor_parallel_size": "2", "quantization": "int8", "device": "cpu"},
            "--tensor-parallel-size 2 with --quantization int8 on a CPU: it rounds inputs",
        ),
    ],
)
def test_a_division_that_devices_do_not_allow_is_refused_in_one_line(
    given: dict[str, str], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(OptionError, match=refusal) as refused:
        resolve(read_options(given, {}), environment={})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(("device", "is_shared"), [("auto", False), ("cuda", False), ("cuda:1", True)])
def test_ranks_have_a_gpu_each_unless_one_is_named(
    device: str, is_shared: bool, division: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    worker = resolve(read_options({division: "2", "device": device}, {}), environment={})[0].worker
    assert worker.device == ("cuda:1" if is_shared else "cuda")
    assert worker.num_devices == (1 if is_shared else 2)
    assert worker.enforce_eager == is_shared, "no graph records the way through the host"


def test_ranks_of_a_node_have_its_gpus_and_the_first_counts_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    given = BASE | FLAGS | {"pipeline_parallel_size": "4", "device": "cuda"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    worker = resolve(read_options(given | {"node_rank": "0"}, {}), environment={})[0].worker
    assert (worker.num_devices, worker.num_gpus_of_a_node) == (4, 2)
    assert [device_of_rank(worker, rank) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    resolve(read_options(given, {}), environment={})
    with pytest.raises(OptionError, match="each rank takes a GPU, 2 on each node, and there are 1"):
        resolve(read_options(given | {"node_rank": "0"}, {}), environment={})


def test_engines_have_the_gpus_of_their_ranks_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,1,0")
    given = {"pipeline_parallel_size": "2", "data_parallel_size": "2"}
    config, _ = resolve(read_options(given, {}), environment={})
    seen = [device_environment(config_of(config, engine)) for engine in range(2)]
    assert seen == [{"CUDA_VISIBLE_DEVICES": "4,7"}, {"CUDA_VISIBLE_DEVICES": "1,0"}]
