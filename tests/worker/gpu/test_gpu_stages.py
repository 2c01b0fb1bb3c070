"""Stages on GPUs: tokens of one process on a CPU, with several plans on their way through the stages."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scheduler.config import PreemptionMode
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.worker.gpu import test_gpu_worker as whole
from tests.worker.gpu.gpu_ranks import AT_ONCE, OWN, SHARED, rank_0
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import DEVICE, LazyCuda
from tests.worker.ranks import histories
from tests.worker.ranks import test_divided_adapters as adapted
from tests.worker.ranks.divided import GRID, TWO_STAGES, DividedWorker
from tests.worker.ranks.histories import config_of, load_alone, serve
from worker.devices.device import CudaDevice
from worker.ranks.device_stage import DeviceSender, around_graph
from worker.worker import Worker
from worker.worker_config import WorkerConfig

pytestmark = [pytest.mark.night, pytest.mark.skipif(HAS_GPU, reason="stand-ins are needed")]


def config_for(divided: DividedWorker, folder: Path, device: str) -> WorkerConfig:
    return replace(
        config_of(folder),
        device=device,
        num_stages=divided.num_stages,
        num_ranks=divided.num_shards,
        max_num_batched_tokens=24,
        enforce_eager=device == SHARED,
    )


def test_what_a_graph_leaves_is_sent_as_it_was_although_later_ones_are_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device computes all that it may before it sends anything."""
    arrived: list[float] = []
    num_bytes: list[int] = []
    with LazyCuda() as cuda:
        device = CudaDevice(WorkerConfig(model_path=""), DEVICE)

        def isend(hidden: torch.Tensor, **_: Any) -> SimpleNamespace:
            num_bytes.append(torch.cuda.memory_allocated(DEVICE))
            content, way = cuda.shadow(hidden), torch.cuda.Stream()
            way.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(way):
                cuda.ask("send", lambda: arrived.append(float(content.mean())))
            return SimpleNamespace(wait=lambda: wait_for(way))

        def wait_for(way: torch.cuda.Stream) -> None:
            num_bytes.append(torch.cuda.memory_allocated(DEVICE))
            torch.cuda.current_stream().wait_stream(way)

        monkeypatch.setattr(dist, "isend", isend)
        sender = DeviceSender(max_graph_tokens=4)
        hidden = torch.ones(1, 3, 8, device=DEVICE)
        graph = device.capture(lambda: sender.send(hidden + 0.5))
        for number in range(5):
            hidden.fill_(number)
            with around_graph(None, sender)(3):
                graph.replay()
        device.wait()
    assert arrived == [1.5, 0.5, 1.5, 2.5, 3.5, 4.5], "the first one before it was recorded"
    assert len(set(num_bytes[1:])) == 1, "what was sent is freed before the next copy is made"


def test_without_graphs_no_place_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", lambda _hidden, **_: SimpleNamespace())
    with LazyCuda():
        torch.cuda.set_device(DEVICE)
        hidden = torch.ones(1, 3, 8, device=DEVICE)
        num_bytes = [torch.cuda.memory_allocated(DEVICE)]
        for max_graph_tokens in (0, 1024):
            sender = DeviceSender(max_graph_tokens)
            sender.send(hidden)
            num_bytes.append(torch.cuda.memory_allocated(DEVICE))
    assert num_bytes == [num_bytes[0], num_bytes[0], num_bytes[0] + 1024 * 8 * 4]


@pytest.mark.parametrize(
    ("division", "device", "mode"),
    [(TWO_STAGES, SHARED, PreemptionMode.RECOMPUTE), (GRID, OWN, PreemptionMode.SWAP)],
)
def test_stages_draw_the_tokens_of_one_process(
    tmp_path: Path, division: str, device: str, mode: PreemptionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, shared prefixes and preemptions: through the host, and by NCCL around graphs of two shards."""
    for name, number in {"_NUM_REQUESTS": 6, "_NUM_TOKENS_SERVED": 8, "_FEW_BLOCKS": 10}.items():
        monkeypatch.setattr(histories, name, number)
    folder = make_checkpoint("llama", tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    expected = serve(*load_alone(folder), mode)
    with rank_0(device, AT_ONCE, division) as (_, divided):
        facts = divided.load(config_for(divided, folder, device))
        assert (facts.num_stages, facts.runs_ahead) == (2, True)
        assert serve(divided, facts, mode) == expected
        assert divided._worker is not None
        assert bool(whole.steps_of(divided._worker)._num_replayed) == (device == OWN)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_stages_compute_the_adapters_and_the_rounded_weights_of_one_process(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base", intermediate_size=128)
    with_adapter = adapted.config_with(base, [write_adapter(tmp_path / "all", base, rank=16)])
    configs = [replace(with_adapter, quantization=rounded) for rounded in ("none", "int4")]
    workers = [Worker(config) for config in configs]
    identities = [[each.identity for each in worker.load(lambda _: None).adapters] for worker in workers]
    expected = [
        adapted.mixed(*each) for each in zip(workers, ([*each, ""] for each in identities), strict=True)
    ]
    found = []
    with rank_0(SHARED, AT_ONCE, TWO_STAGES) as (_, divided):
        for config, names in zip(configs, identities, strict=True):
            divided.load(replace(config, device=SHARED, num_stages=2, enforce_eager=True))
            found.append(adapted.mixed(divided, [*names, ""]))
    for ours, theirs in zip(found, expected, strict=True):
        check_alike(ours, theirs)
        assert len({str(each) for each in theirs[0]}) == len(identities[0]) + 1


def check_alike(found: list[Any], expected: list[Any]) -> None:
    """Raise AssertionError unless each row of each step has the same tokens and about their numbers."""
    for step, wanted in zip(found, expected, strict=True):
        for ours, theirs in zip(step, wanted, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(abs(ours[token] - theirs[token]) < 2e-4 for token in theirs)
