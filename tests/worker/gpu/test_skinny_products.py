"""Products of few rows, with what stands before and behind them, compute what torch defines."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from triton import TritonError

from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from tests.worker.gpu.test_attention_compiled import Recorder
from worker.devices.device import CpuDevice
from worker.gpu.kernels import skinny_products
from worker.gpu.kernels.skinny_products import (
    MOST_ROWS,
    Folds,
    SkinnyTiles,
    choose_skinny_tiles,
    multiply_skinny,
)
from worker.gpu.trials import skinny
from worker.gpu.trials.skinny import FoldedProduct, choose_products
from worker.model.layer_parts import GateActivation, RmsNorm
from worker.model.linear import Linear, PlainWeight
from worker.worker_config import WorkerConfig

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
few = settings(max_examples=25, deadline=None, derandomize=True)


def defined(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, folds: Folds) -> Tensor:
    rows = x_TK.float()
    if folds.norm is not None:
        rows = functional.rms_norm(rows, rows.shape[-1:], folds.norm.weight_H, folds.norm.epsilon)
    product = functional.linear(rows, weight_NK.float(), None if bias_N is None else bias_N.float())
    if folds.activation is GateActivation.NONE:
        return product
    gate, up = product.chunk(2, dim=-1)
    is_silu = folds.activation is GateActivation.SILU
    return (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    num_inputs = draw(st.sampled_from([16, 40, 64, 200]))
    norm = RmsNorm(torch.rand(num_inputs) + 0.5, 1e-5) if draw(st.booleans()) else None
    activation = draw(st.sampled_from(list(GateActivation)))
    folds = Folds(norm, activation)
    if norm is None and activation is GateActivation.NONE:
        folds = Folds(is_added=draw(st.booleans()), multiplier=draw(st.sampled_from([1.0, 0.25])))
        splits = draw(st.integers(1, 3))
    else:
        splits = 1
    num_outputs = draw(st.sampled_from([2, 18, 48]))
    has_bias = activation is GateActivation.NONE and not folds.is_added and draw(st.booleans())
    tiles = SkinnyTiles(outputs=16, inputs=32, splits=splits)
    return folds, num_inputs, num_outputs, has_bias, tiles


@few
@given(cases(), st.integers(1, MOST_ROWS), st.sampled_from(list(TOLERANCE)))
def test_a_product_of_few_rows_with_all_that_is_folded_in(case, num_rows, dtype):
    folds, num_inputs, num_outputs, has_bias, tiles = case
    torch.manual_seed(num_rows)
    x_TK, weight_NK = (
        torch.randn(num_rows, num_inputs).to(dtype),
        torch.randn(num_outputs, num_inputs).to(dtype),
    )
    bias_N = torch.randn(num_outputs).to(dtype) if has_bias else None
    expected_TN = defined(x_TK, weight_NK, bias_N, folds)
    before_TN = torch.randn(expected_TN.shape).to(dtype)
    out_TN = before_TN.clone() if folds.is_added else None
    arrivals = torch.zeros(num_outputs, dtype=torch.int32)
    found_TN = multiply_skinny(x_TK, weight_NK, bias_N, folds, tiles, out_TN=out_TN, arrivals=arrivals)
    if folds.is_added:
        assert found_TN is out_TN
        expected_TN = before_TN.float() + folds.multiplier * expected_TN
    error = (found_TN.float() - expected_TN).abs().max() / expected_TN.abs().max()
    assert error < TOLERANCE[dtype]
    assert not arrivals.any(), "the next launch finds them zero"


@pytest.mark.parametrize(
    ("shape", "folds", "programs"),
    [
        ((6144, 4096), Folds(norm=RmsNorm(torch.ones(4096), 1e-5)), (192, 1)),  # queries, keys and values
        ((4096, 4096), Folds(is_added=True), (256, 1)),
        ((28672, 4096), Folds(activation=GateActivation.SILU), (448, 1)),
        ((1024, 3072), Folds(is_added=True), (64, 3)),
        ((6144, 1024), Folds(activation=GateActivation.SILU), (96, 1)),  # half of the processors will do
    ],
)
def test_each_processor_has_a_program(shape, folds, programs):
    weight_NK = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    tiles = choose_skinny_tiles(weight_NK, folds, num_processors=132)
    num_outputs = shape[0] // (2 if folds.activation is not GateActivation.NONE else 1)
    assert (-(-num_outputs // tiles.outputs), tiles.splits) == programs


class Stopwatch(CpuDevice):
    """Time as a test says: of cuBLAS, then of ours, by the rows of a trial."""

    def __init__(self, seconds: dict[int, tuple[float, float]]) -> None:
        super().__init__(WorkerConfig(model_path="", device="cpu"))
        self._told = [each for pair in seconds.values() for each in pair]

    def seconds_of(self, work: Any) -> float | None:
        work()
        return self._told.pop(0)


@dataclass
class Launches:
    """Counts the launches of our kernel."""

    count: int = 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    counted, launch = Launches(), skinny.multiply_skinny

    def multiply(*given: Any, **named: Any) -> Tensor:
        counted.count += 1
        return launch(*given, **named)

    monkeypatch.setattr(skinny, "multiply_skinny", multiply)
    return counted


def normed_product() -> FoldedProduct:
    torch.manual_seed(1)
    return FoldedProduct(
        Linear.of(PlainWeight(torch.randn(24, 32))),
        Folds(norm=RmsNorm(torch.rand(32) + 0.5, 1e-5)),
    )


def test_ours_is_taken_for_the_numbers_of_rows_at_which_it_is_faster(launches):
    product = normed_product()
    choose_products([product], Stopwatch({1: (2.0, 1.0), 4: (1.0, 2.0), 16: (2.0, 1.0)}))
    taken = []
    for num_rows in (1, 2, 4, 5, 16, 17):
        before = launches.count
        product.multiply(torch.randn(num_rows, 32))
        taken.append(launches.count > before)
    assert taken == [True, False, False, True, True, False]


def test_ours_is_left_where_it_computes_something_else(launches, monkeypatch, caplog):
    wrong = skinny.multiply_skinny
    monkeypatch.setattr(skinny, "multiply_skinny", lambda *given, **named: wrong(*given, **named) * 1.01)
    product = normed_product()
    choose_products([product], Stopwatch({1: (2.0, 1.0)}))
    x_TK, before = torch.randn(1, 32), launches.count
    product.multiply(x_TK)
    assert launches.count == before
    assert "24 x 32 with its norm is wrong" in caplog.text


def test_ours_is_compared_on_a_residual_to_which_timing_has_not_added(monkeypatch, caplog):
    class Replaying(Stopwatch):
        def seconds_of(self, work: Any) -> float | None:
            for _ in range(999):
                work()
            return super().seconds_of(work)

    right = skinny.multiply_skinny
    monkeypatch.setattr(skinny, "multiply_skinny", lambda x, *rest, **named: right(x * 1.01, *rest, **named))
    weight_NK = torch.randn((24, 32), generator=torch.Generator().manual_seed(1)).half()
    product = FoldedProduct(Linear.of(PlainWeight(weight_NK)), Folds(is_added=True))
    choose_products([product], Replaying({1: (2.0, 1.0)}))
    assert "24 x 32 with its addition is wrong" in caplog.text


def test_what_is_timed_asks_the_device_nothing(launches, monkeypatch, caplog):
    """A graph could not be captured of it. Each layer has a norm of its own."""

    class Capturing(Stopwatch):
        def seconds_of(self, work: Any) -> float | None:
            with monkeypatch.context() as patch:
                patch.setattr(torch, "equal", lambda *_: pytest.fail("this waits for the device"))
                return super().seconds_of(work)

    choose_products(
        [normed_product(), normed_product()], Capturing({size: (2.0, 1.0) for size in (1, 4, 16)})
    )
    assert launches.count


def test_a_product_that_adapters_update_is_given_normed_rows_and_folds_nothing(launches):
    product, seen = normed_product(), []

    class Watched:
        def multiply(self, x_TK: Tensor) -> Tensor:
            seen.append(x_TK)
            return x_TK

    choose_products([product], Stopwatch({size: (2.0, 1.0) for size in (1, 4, 16)}))
    product.wrap(lambda plain: Watched())  # type: ignore[arg-type,return-value]
    before, rows_TK = launches.count, torch.randn(2, 32) * 9
    product.multiply(rows_TK)
    assert torch.allclose(seen[0].square().mean(-1).sqrt(), torch.ones(2), atol=0.5)
    assert product.kind() is None
    assert launches.count == before


@pytest.mark.parametrize("error", [TritonError("out of resource: shared memory"), torch.OutOfMemoryError()])
def test_ours_is_left_where_it_cannot_be_launched(monkeypatch, caplog, error):
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(skinny, "multiply_skinny", fail)
    product = normed_product()
    choose_products([product], Stopwatch({1: (2.0, 1.0)}))
    product.multiply(torch.randn(1, 32))
    assert "24 x 32 with its norm cannot be tried" in caplog.text


def test_ours_is_left_where_it_is_no_faster_and_where_time_tells_nothing(launches):
    product = normed_product()
    choose_products([product], Stopwatch({size: (1.0, 1.0) for size in (1, 4, 16)}))
    tried = launches.count
    choose_products([product], CpuDevice(WorkerConfig(model_path="", device="cpu")))
    product.multiply(torch.randn(1, 32))
    assert launches.count == tried


def launched(shape: tuple[int, int], folds: Folds, dtype: torch.dtype = torch.bfloat16) -> Kernel:
    """The kernel as a step launches it on a device of 132 processors."""
    weight_NK = torch.empty(shape, dtype=dtype)
    noted: dict[str, Kernel] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny_products, "skinny_kernel", Recorder(skinny_products, "skinny_kernel", noted))
        x_TK, out_TN = torch.empty((5, shape[1]), dtype=dtype), torch.empty((5, shape[0]), dtype=dtype)
        tiles = choose_skinny_tiles(weight_NK, folds, num_processors=132)
        multiply_skinny(
            x_TK,
            weight_NK,
            None,
            folds,
            tiles,
            out_TN=out_TN,
            arrivals=torch.empty(shape[0], dtype=torch.int32),
        )
    return noted["skinny_kernel"]


NORM, WIDE_NORM = RmsNorm(torch.empty(4096).bfloat16(), 1e-5), RmsNorm(torch.empty(4096), 1e-5)
FOR_HOPPER = {
    "queries, keys and values": launched((6144, 4096), Folds(NORM)),
    "gates": launched((28672, 4096), Folds(NORM, GateActivation.SILU)),
    "gates behind a norm of wider numbers": launched((28672, 4096), Folds(WIDE_NORM, GateActivation.SILU)),
    "gates without a norm": launched((28672, 4096), Folds(activation=GateActivation.SILU)),
    "gates of a small model": launched((6144, 1024), Folds(NORM, GateActivation.SILU)),
    "addition": launched((4096, 4096), Folds(is_added=True, multiplier=0.5)),
    "addition of parts": launched((1024, 3072), Folds(is_added=True)),
    "outputs": launched((8192, 4096), Folds()),
    "float32": launched((4096, 4096), Folds(WIDE_NORM, GateActivation.GELU_TANH), torch.float32),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return dict(zip(FOR_HOPPER, compile_kernels(list(FOR_HOPPER.values())), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", FOR_HOPPER)
def test_a_hopper_gpu_reads_weights_ahead_sixteen_bytes_at_a_time_and_spills_nothing(compiled, name):
    found = compiled[name]
    assert "cp.async.wait_group" in found.ptx
    assert 2 * found.shared_bytes <= SHARED_BYTES_LIMIT, "two programs of a processor at the same time"
    if name != "float32":  # which has no tensor cores, and is for trials
        assert found.local_bytes == 0
        assert found.widest_load_bytes == 16
        assert found.uses_tensor_cores
