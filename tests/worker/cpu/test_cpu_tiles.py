"""Products by tiles, whose instructions are plain functions here (plain_tiles.h)."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.cpu.conftest import compile_beside
from tests.worker.plan_driver import GREEDY, PlanDriver
from worker.cpu import arithmetic as cpu_arithmetic
from worker.cpu import kernel_choice as cpu_kernel_choice
from worker.cpu.arithmetic import DOT, TILES, choose_kernels, open_kernels
from worker.cpu.kernel_choice import foresee_kernels
from worker.cpu.native import Kernels, PackedWeight, pack
from worker.cpu.products import pack_gate_up, pack_linear
from worker.cpu.proof import multiplies_exactly
from worker.devices.device import open_device
from worker.model.layer_parts import GateActivation, GatedMlp
from worker.model.linear import Linear, PlainWeight, merge
from worker.model.quantization import round_to_int8
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.pairs


@pytest.fixture(scope="module")
def library(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The door and the products by tiles, compiled with plain functions; all else is the built library's."""
    path = tmp_path_factory.mktemp("tiles") / "plain_tiles.so"
    tiles = f'-DTOKENYARD_TILES="{Path(__file__).with_name("plain_tiles.h")}"'
    compile_beside(built, path, ("instruction_sets/amx.cpp", "api.cpp"), tiles)
    return path


@pytest.fixture(scope="module")
def tiles(library: Path) -> Kernels:
    """With one thread, which takes several blocks at once."""
    return Kernels(library, 1, TILES)


@pytest.fixture(scope="module")
def dot(built: Path) -> Kernels:
    return Kernels(built, 1, DOT)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def sums_by_the_manual(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Sum as plain_tiles.h says. A product of two bf16 is exact in float32: adding it rounds once."""
    total_TN = torch.zeros((len(x_TK), len(weight_NK)))
    for x_Tk, weight_Nk in zip(x_TK.float().split(32, 1), weight_NK.float().split(32, 1), strict=True):
        firsts_TN, seconds_TN = torch.zeros_like(total_TN), torch.zeros_like(total_TN)
        for k in range(0, x_Tk.shape[1], 2):
            firsts_TN += x_Tk[:, k, None] * weight_Nk[:, k]
            seconds_TN += x_Tk[:, k + 1, None] * weight_Nk[:, k + 1]
        total_TN += firsts_TN + seconds_TN
    return total_TN


@pytest.mark.parametrize("num_rows", [0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 71])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 32), (96, 48), (77, 16), (5, 176), (160, 64)])
def test_a_sum_is_the_manuals_in_every_bit(tiles, num_rows, num_outputs, num_inputs):
    x, weight = numbers(num_rows, num_inputs), numbers(num_outputs, num_inputs, seed=1)
    found = tiles.multiply_to_float(x, pack(weight))
    assert torch.equal(found, sums_by_the_manual(x, weight))
    expected = x.double() @ weight.double().T
    assert bool(((found - expected).abs() <= 2e-6 * expected.abs().amax(1, keepdim=True)).all())


def test_blocks_that_are_too_many_for_a_near_cache_are_all_multiplied(tiles):
    x, weight = numbers(33, 8208), numbers(160, 8208, seed=1)
    assert torch.equal(tiles.multiply_to_float(x, pack(weight)), sums_by_the_manual(x, weight))


def packed_plain(weight: Tensor) -> PackedWeight:
    return pack(weight, torch.arange(len(weight)) / 7)


def packed_int8(weight: Tensor) -> PackedWeight:
    return pack_linear(round_to_int8(Linear.of(PlainWeight(weight), torch.arange(len(weight)) / 7)))


def packed_gates(weight: Tensor) -> PackedWeight:
    gates, ups = weight[:96], weight[96:192]
    merged = merge([Linear.of(PlainWeight(each)) for each in (gates, ups)])
    return pack_gate_up(GatedMlp(merged, merged, GateActivation.SILU))


@pytest.mark.parametrize("packed", [packed_plain, packed_int8, packed_gates])
def test_no_row_depends_on_the_rows_beside_it_in_any_bit(tiles, packed):
    x, weight = numbers(71, 176), packed(numbers(200, 176, seed=1))
    together = tiles.multiply(x, weight)
    for cuts in [[1] * 71, [16, 17, 38], [31, 40], [15, 33, 23]]:
        parts = [tiles.multiply(part, weight) for part in x.split(cuts)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("packed", [packed_plain, packed_gates])
def test_biases_and_gates_are_those_of_the_dot_instruction(tiles, dot, packed):
    x, weight = numbers(40, 112), packed(numbers(200, 112, seed=1))
    found, expected = tiles.multiply(x, weight).double(), dot.multiply(x, weight).double()
    assert (found - expected).abs().max() < 6e-3 * expected.abs().max()  # rounded to bf16 here and there


@pytest.mark.parametrize("num_rows", [1, 16, 40])
@pytest.mark.parametrize("num_inputs", [16, 32, 48, 64, 176])
def test_whole_numbers_are_summed_as_by_the_dot_instruction_in_every_bit(tiles, dot, num_rows, num_inputs):
    x, weight = numbers(num_rows, num_inputs), packed_int8(numbers(77, num_inputs, seed=1))
    assert torch.equal(tiles.multiply(x, weight), dot.multiply(x, weight))


def test_what_is_not_a_number_stays_in_its_row_and_its_column(tiles):
    x, weight = numbers(20, 48), numbers(40, 48, seed=1)
    x[7, 40], weight[33, 5] = torch.nan, torch.nan
    is_number = tiles.multiply(x, pack(weight)).isfinite()
    assert not is_number[7].any()
    assert not is_number[:, 33].any()
    assert int(is_number.sum()) == 19 * 39


def test_a_worker_samples_the_same_with_tiles_as_without_them(library, monkeypatch, tmp_path, caplog):
    folder = make_checkpoint("llama", tmp_path / "llama")
    monkeypatch.setattr(cpu_kernel_choice, "find_library", lambda **_: library)
    likely = []
    for name in (TILES, DOT):
        with caplog.at_level(logging.INFO):
            worker, facts = load_worker(folder, cpu_kernels=name, dtype="bfloat16")
        assert f"{name} kernels: 3 of 3 layers fused" in caplog.text
        assert facts.kernels == name
        driver = PlanDriver(worker, BLOCK_SIZE)
        sequence = driver.add(list(range(1, 40)), replace(GREEDY, num_logprobs=4))
        ((entry,),) = driver.step({sequence: None}).logprobs.values()
        likely.append(dict(entry.top))
    assert likely[0] == pytest.approx(likely[1], abs=0.05)
    assert likely[0] != likely[1]  # in another order of sums


@pytest.mark.parametrize(
    ("times_s", "chosen"),
    [((1.0, 2.0, 0.95), DOT), ((1.0, 0.9, 0.5), TILES), ((1.0, 0.5, 0.9), "avx512-expanded")],
)
def test_tiles_are_taken_where_they_are_the_fastest(library, monkeypatch, caplog, times_s, chosen):
    monkeypatch.setattr(cpu_arithmetic, "_measure", lambda *_: times_s)
    with caplog.at_level(logging.INFO):
        assert choose_kernels(library, 1).instruction_set == chosen
    assert f"bf16 products by {chosen}" in caplog.text
    assert f"{1000 * times_s[2]:.2f} ms by tiles" in caplog.text


def test_tiles_that_multiply_otherwise_are_not_taken_and_refused_by_name(
    library, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(cpu_arithmetic, "multiplies_exactly", lambda *_: False)
    monkeypatch.setattr(cpu_kernel_choice, "find_library", lambda **_: library)
    assert choose_kernels(library, 1).instruction_set != TILES
    assert "amx is not taken: its products are not exact" in caplog.text
    with pytest.raises(StartupError, match="--cpu-kernels amx: its products are not exact"):
        load_worker(make_checkpoint("llama", tmp_path / "llama"), cpu_kernels=TILES, dtype="bfloat16")


class Faulty(Kernels):
    """Wrong by what each of the trial's questions is about."""

    fault = ""

    def multiply_to_float(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        found_TN = super().multiply_to_float(x_TK, weight)
        is_plain = weight.data.dtype is torch.bfloat16
        if self.fault == "a row" and is_plain:
            found_TN[-1] *= 1.01
        if self.fault == "neighbours" and is_plain and len(x_TK) > 1:
            found_TN[16:] *= 1 + 2**-22
        if self.fault == "whole numbers" and not is_plain:
            found_TN[0, 0] += 1
        if self.fault == "not a number":
            found_TN[0, 0] = torch.nan
        return found_TN


@pytest.mark.parametrize("fault", ["", "a row", "neighbours", "whole numbers", "not a number"])
def test_the_trial_finds(library, dot, fault):
    faulty = Faulty(library, 1, TILES)
    faulty.fault = fault
    assert multiplies_exactly(faulty, dot) == (not fault)


def test_tiles_on_a_processor_without_them_are_refused_and_that_is_foreseen(built, tmp_path):
    try:
        open_kernels(built, 1, TILES)
    except ValueError:
        folder = make_checkpoint("llama", tmp_path / "llama")
    else:
        pytest.skip("this processor has tiles")
    lacking = "--cpu-kernels amx: this processor, or its system, has no amx"
    with pytest.raises(StartupError, match=lacking):
        load_worker(folder, cpu_kernels=TILES, dtype="bfloat16")
    config = WorkerConfig(model_path=str(folder), device="cpu", cpu_kernels=TILES)
    with pytest.raises(StartupError, match=lacking):
        foresee_kernels(config, open_device(config), torch.bfloat16)


def test_what_will_be_measured_is_foreseen(library, monkeypatch):
    monkeypatch.setattr(cpu_kernel_choice, "find_library", lambda **_: library)
    config = WorkerConfig(model_path="", device="cpu")
    found = foresee_kernels(config, open_device(config), torch.bfloat16)
    assert found.what == "the fastest of avx512-bf16, avx512-expanded and amx, measured at start, built"
    named = replace(config, cpu_kernels=TILES)
    assert foresee_kernels(named, open_device(named), torch.bfloat16).what == "amx, built"
