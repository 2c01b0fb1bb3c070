"""Updates by adapters on an interpreted GPU: what their definition says, for each token by itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from tests.worker.gpu.interpreted_gpu import open_gpu
from tests.worker.gpu.test_gpu_worker import SETTINGS, steps_of
from tests.worker.plan_driver import PlanDriver
from worker.adapters.files import LowRank
from worker.adapters.product_plan import ProductPlan
from worker.devices.device import open_device
from worker.gpu import graphs, triton_layer, unfused
from worker.gpu.triton_adapters import GpuStepAdapters, TritonUpdates
from worker.model.linear import Cut, Linear, PlainWeight, Segment
from worker.worker import Worker
from worker.worker_config import AdapterFolder, AdapterLimits, WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
LIMITS = AdapterLimits(max_in_step=2, max_in_memory=2, max_rank=20)
few = settings(max_examples=12, deadline=None, derandomize=True)


@few
@given(
    st.sampled_from(list(TOLERANCE)),
    st.lists(st.integers(-1, 2), min_size=1, max_size=20),
    st.sampled_from([16, 40, 300]),
    st.lists(st.sampled_from([8, 70]), min_size=1, max_size=3),
    st.data(),
)
def test_each_token_gets_the_update_of_its_adapter(
    dtype: torch.dtype, slots: list[int], num_inputs: int, sizes: list[int], data: st.DataObject
) -> None:
    torch.manual_seed(num_inputs)
    device = open_device(WorkerConfig(model_path=""))
    step = GpuStepAdapters(device, dtype=dtype, max_num_seqs=len(slots), max_rank=20)
    segments = tuple(Segment(size) for size in sizes)
    of_codes = torch.zeros((1, 1), dtype=torch.bfloat16).expand(sum(sizes), num_inputs)
    linear = Linear(PlainWeight(of_codes), None, segments)  # whose dtype says nothing of the rows
    names = tuple(f"m{place}" for place in range(len(sizes)))
    order_N = torch.cat([torch.randperm(size) + sum(sizes[:place]) for place, size in enumerate(sizes)])
    cut = Cut(segments, torch.arange(sum(sizes)), slice(0, num_inputs))
    updates = TritonUpdates("layer", ProductPlan.of(names, cut, order_N), linear, step, 3)
    expected_TN = torch.randn(len(slots), sum(sizes)).to(dtype)
    x_TK = torch.randn(len(slots), num_inputs).to(dtype)
    out_TN = expected_TN.clone()
    expected_TN = expected_TN.double()
    for slot in range(3):
        own = {}
        for place, size in enumerate(sizes):
            rank = data.draw(st.sampled_from([0, 1, 16, 20]))
            if rank:
                down = (torch.randn(rank, num_inputs) / num_inputs**0.5).to(dtype)
                own[f"layer.m{place}"] = LowRank(down, torch.randn(size, rank).to(dtype), 0.5)
        updates.put(slot, own)
        tokens = torch.tensor([each == slot for each in slots])
        whole_TN = torch.zeros(len(slots), sum(sizes), dtype=torch.float64)
        for place, size in enumerate(sizes):
            if (update := own.get(f"layer.m{place}")) is not None:
                first = sum(sizes[:place])
                whole_TN[:, first : first + size] = update.multiply(x_TK.double())
        expected_TN[tokens] += 2.0 * whole_TN[:, order_N][tokens]
    step.begin_rows(torch.tensor(slots, dtype=torch.int32).numpy(), torch.arange(len(slots)).numpy())
    step.take_rows(torch.arange(len(slots), dtype=torch.int32))
    updates.add(out_TN, x_TK, 2.0)
    error = (out_TN.double() - expected_TN).norm() / expected_TN.norm()
    assert error < TOLERANCE[dtype]
    alone_1N = (expected_TN * 0)[-1:].to(dtype)
    again_TN = (expected_TN * 0).to(dtype)
    updates.add(again_TN, x_TK)
    step.take_rows(torch.tensor([len(slots) - 1], dtype=torch.int32))
    updates.add(alone_1N, x_TK[-1:].clone())
    assert torch.equal(alone_1N[0], again_TN[-1]), "a row is not what its neighbours make of it"


def mixed(worker: Any, *orders: list[str], is_ahead: bool) -> list[list[int]]:
    """Greedy tokens of a row for each adapter of an order, in chunks beside decodes; rows are used again."""
    driver = AheadDriver(worker, BLOCK_SIZE, depth=2) if is_ahead else PlanDriver(worker, BLOCK_SIZE)
    found = []
    for order in orders:
        rows = [
            driver.add([5, 9, 33, 17, 80][: 3 + place % 3], adapter=each) for place, each in enumerate(order)
        ]
        driver.step(dict.fromkeys(rows))
        late = driver.add([7] * 9, adapter=order[0])
        driver.step(dict.fromkeys(rows) | {late: 4})
        for _ in range(3):
            driver.step(dict.fromkeys([*rows, late]))
        if isinstance(driver, AheadDriver):
            driver.collect_all()
        found += [driver.generated(row) for row in (*rows, late)]
        driver.release_all()
    return found


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.night), "llama, not fused"])
def test_the_gpus_worker_draws_the_tokens_that_the_cpus_draws_with_adapters(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforce_eager = "not fused" in family
    monkeypatch.setattr(graphs, "_MIXED", (16,))
    if enforce_eager:
        monkeypatch.setattr(triton_layer, "LARGEST_ROW", 16)
    base = make_checkpoint(family.partition(",")[0], tmp_path / "base", num_hidden_layers=1)
    adapters = [write_adapter(tmp_path / f"a{seed}", base, rank=3 * seed, seed=seed) for seed in (1, 2)]
    named = tuple(AdapterFolder(each.name, str(each)) for each in adapters)
    on_cpu, facts = load_worker(base, adapter_limits=LIMITS, adapters=named)
    identities = [*(each.identity for each in facts.adapters), ""]
    orders = (identities, identities[::-1])
    expected = mixed(on_cpu, *orders, is_ahead=False)
    config = WorkerConfig(
        model_path=str(base), adapter_limits=LIMITS, adapters=named, enforce_eager=enforce_eager, **SETTINGS
    )
    worker = Worker(config, open_gpu)
    worker.load(lambda _progress: None)
    assert mixed(worker, *orders, is_ahead=True) == expected
    assert steps_of(worker).describe().startswith("0 steps") is enforce_eager
    assert len({str(each) for each in expected[:3]}) == 3


def test_codes_outside_of_fused_layers_take_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_layer, "LARGEST_ROW", 16)
    folder, plain = write_quantized("llama", "int4", tmp_path, num_hidden_layers=1)
    adapter = write_adapter(tmp_path / "a", plain, rank=3)
    named = (AdapterFolder("a", str(adapter)),)
    on_cpu, facts = load_worker(folder, adapter_limits=LIMITS, adapters=named)
    identities = [facts.adapters[0].identity, ""]
    expected = mixed(on_cpu, identities, is_ahead=False)
    settings = {"adapter_limits": LIMITS, "adapters": named, "enforce_eager": True, **SETTINGS}
    worker = Worker(WorkerConfig(model_path=str(folder), **settings), open_gpu)
    worker.load(lambda _progress: None)
    assert mixed(worker, identities, is_ahead=True) == expected
    assert expected[0] != expected[1]


def test_a_gpu_with_adapters_tries_no_products_that_fold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(unfused, "choose_products", lambda products, _device: tried.append(products))
    base = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=1)
    config = WorkerConfig(model_path=str(base), enforce_eager=True, **SETTINGS)
    Worker(replace(config, adapter_limits=LIMITS), open_gpu).load(lambda _progress: None)
    assert not tried
    Worker(config, open_gpu).load(lambda _progress: None)
    assert tried


def test_a_gpu_without_kernels_computes_no_adapters(tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base", num_hidden_layers=1)
    config = WorkerConfig(model_path=str(base), adapter_limits=LIMITS, gpu_kernels="off", **SETTINGS)
    with pytest.raises(StartupError, match="adapters on a GPU need its kernels"):
        Worker(config, open_gpu).load(lambda _progress: None)


def kernel(name: str) -> Kernel:
    pointers = {
        "_shrink_kernel": (("x_ptr", "down_ptr"), ("scales_ptr", "shrunk_ptr"), ("ranks_ptr",)),
        "_expand_kernel": (("up_ptr", "out_ptr"), ("shrunk_ptr",), ("ranks_ptr", "blocks_ptr")),
    }[name]
    constants = {"MAX_RANK": 64, "TOKENS": 16, "RANKS": 16}
    constants |= {"INPUTS": 128, "PRECISION": "tf32"} if name == "_shrink_kernel" else {"OUTPUTS": 64}
    counts = ("num_inputs", "part_inputs") if name == "_shrink_kernel" else ("num_outputs", "num_parts")
    return Kernel(
        function=f"worker.gpu.kernels.adapter_updates:{name}",
        signature={
            **dict.fromkeys(pointers[0], "*bf16"),
            **dict.fromkeys(pointers[1], "*fp32"),
            **dict.fromkeys((*pointers[2], "rows_ptr", "slots_ptr"), "*i32"),
            **dict.fromkeys(("num_tokens", "num_modules", *counts), "i32"),
            **({} if name == "_shrink_kernel" else {"multiplier": "fp32"}),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants,
        unaligned=("num_tokens", "num_modules", "num_parts"),
    )


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    names = ("_shrink_kernel", "_expand_kernel")
    return dict(zip(names, compile_kernels([kernel(name) for name in names]), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", ["_shrink_kernel", "_expand_kernel"])
def test_a_hopper_gpu_computes_updates_without_spilling_and_with_wide_loads(
    compiled: dict[str, Compiled], name: str
) -> None:
    found = compiled[name]
    assert found.local_bytes == 0
    assert found.shared_bytes <= SHARED_BYTES_LIMIT
    assert found.widest_load_bytes == 16
    assert found.uses_tensor_cores or name == "_expand_kernel"
