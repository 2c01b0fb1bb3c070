"""Products by weights with scales of groups, against float64 of the dequantized weights."""

from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional

from tests.worker.cpu.conftest import INSTRUCTION_SETS, OpenKernels
from tests.worker.quantized.random_weights import KINDS, random_weight
from worker.cpu.kernel_build import build_library, find_library
from worker.cpu.native import Kernels, gate_up_order
from worker.cpu.packing import grouped_packing
from worker.cpu.packing.grouped_packing import (
    CannotPack,
    Inputs,
    grouped_rows,
    pack_grouped,
)
from worker.cpu.proof import prove_product
from worker.model.layer_parts import GateActivation
from worker.quantized.grouped_weight import SIGNED_TABLE, GroupedWeight, merged, pack_nibbles
from worker.worker_errors import StartupError

pytestmark = pytest.mark.pairs

# Rounding of a sum of some hundred products, and of the result to its dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
BYTE_KINDS = tuple(kind for kind in KINDS if kind != "float8")
MORE_THAN_SHARE = 200
"""Rows of a product that the kernels compute in several passes."""


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest, open_kernels: OpenKernels) -> Kernels:
    return open_kernels(request.param, 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def rows(num_rows: int, num_inputs: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, num_inputs), generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance


def whole_rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that are whole numbers already, times a power of two: rounding changes nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (num_rows, num_inputs), generator=generator)
    x[:, 7] = 127
    return (x / 32).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs"), [(1, 160), (2, 77), (7, 5), (12, 96), (13, 64), (100, 40)]
)
def test_a_product_is_that_of_the_dequantized_weight(kernels, dtype, kind, num_rows, num_outputs):
    x, weight = rows(num_rows, 192, dtype), random_weight(kind, num_outputs, 192, 32)
    bias = torch.randn(num_outputs)
    expected = x.double() @ weight.dequantized().double().T
    assert_close(kernels.multiply(x, pack_grouped(weight)), expected, TOLERANCE[dtype])
    assert_close(kernels.multiply(x, pack_grouped(weight, bias)), expected + bias.double(), TOLERANCE[dtype])
    assert_close(kernels.multiply_to_float(x, pack_grouped(weight)), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_inputs", "group_size"), [(640, 16), (480, 48), (640, 64), (640, 128), (640, 640)]
)
@pytest.mark.parametrize("num_rows", [3, 20])
def test_groups_may_be_of_any_size_up_to_all_inputs(kernels, dtype, kind, num_inputs, group_size, num_rows):
    x, weight = rows(num_rows, num_inputs, dtype), random_weight(kind, 64, num_inputs, group_size)
    expected = x.double() @ weight.dequantized().double().T
    assert_close(kernels.multiply_to_float(x, pack_grouped(weight)), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize(
    ("num_rows", "group_size"), [(1, 32), (3, 640), (5, 16), (12, 128), (20, 16), (20, 640), (30, 64)]
)
def test_whole_inputs_give_the_product_of_the_dequantized_weight(kernels, dtype, kind, num_rows, group_size):
    x, weight = whole_rows(num_rows, 640, dtype), random_weight(kind, 77, 640, group_size)
    found = kernels.multiply_to_float(x, pack_grouped(weight, inputs=Inputs.INT8))
    assert_close(found, x.double() @ weight.dequantized().double().T, TOLERANCE[torch.float32])


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize("kind", ["unsigned", "int8"])
def test_rows_that_begin_on_the_same_lines_of_a_cache_give_the_same_product(kernels, dtype, kind, inputs):
    """Many are copied apart: behind the order of inputs that codes have, and behind rounding."""
    weight = replace(random_weight(kind, 64, 4096, 512), permutation_K=torch.randperm(4096))
    x = whole_rows(9, 4096, dtype)
    packed = pack_grouped(weight, inputs=inputs)
    found = kernels.multiply_to_float(x, packed)
    assert_close(found, x.double() @ weight.dequantized().double().T, TOLERANCE[torch.float32])
    assert torch.equal(found[:4], kernels.multiply_to_float(x[:4], packed))


@pytest.mark.night
@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize(("num_inputs", "group_size"), [(640, 16), (480, 48), (640, 320), (4096, 32)])
def test_the_byte_instruction_of_laptops_changes_no_bit(open_kernels, kind, num_inputs, group_size):
    weight = random_weight(kind, 77, num_inputs, group_size)
    x, bias = rows(MORE_THAN_SHARE, num_inputs, torch.bfloat16), torch.randn(77)
    packed = pack_grouped(weight, bias, inputs=Inputs.INT8)
    avx_vnni, avx2 = (open_kernels(name, 1) for name in ("avx-vnni", "avx2"))
    for num_rows in (*range(1, 14), MORE_THAN_SHARE):
        assert torch.equal(avx_vnni.multiply(x[:num_rows], packed), avx2.multiply(x[:num_rows], packed))


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_a_large_input_makes_the_whole_inputs_of_other_groups_no_coarser(kernels, dtype, kind):
    x, weight = rows(14, 640, dtype), random_weight(kind, 64, 640, 32)
    x[:, :32] = 0
    x[:, 5] = 500
    found = kernels.multiply_to_float(x, pack_grouped(weight, inputs=Inputs.INT8)).double()
    x[:, 5], large = 0, x[0, 5].double() * weight.dequantized()[:, 5].double()
    expected = x.double() @ weight.dequantized().double().T
    assert (found - large - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("num_inputs", [640, 480])
def test_a_rows_result_does_not_depend_on_its_neighbours_in_any_bit(kernels, dtype, kind, inputs, num_inputs):
    x = rows(MORE_THAN_SHARE, num_inputs, dtype)
    group_size = 48 if num_inputs == 480 else 64 if kind == "unsigned" else 320
    weight = pack_grouped(random_weight(kind, 160, num_inputs, group_size), torch.randn(160), inputs=inputs)
    alone = torch.cat([kernels.multiply(x[row : row + 1].contiguous(), weight) for row in range(len(x))])
    for num_rows in (*range(1, 14), len(x)):
        assert torch.equal(kernels.multiply(x[:num_rows], weight), alone[:num_rows])


def test_a_row_of_float8_does_not_depend_on_its_neighbours_in_any_bit(kernels, dtype):
    x, weight = rows(100, 256, dtype), pack_grouped(random_weight("float8", 160, 256, 128))
    alone = torch.cat([kernels.multiply(x[row : row + 1].contiguous(), weight) for row in range(100)])
    for num_rows in (*range(1, 14), 100):
        assert torch.equal(kernels.multiply(x[:num_rows], weight), alone[:num_rows])


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_every_code_of_eight_bits_is_multiplied_as_its_number(kernels, dtype, kind):
    raw = torch.arange(256, dtype=torch.uint8)
    numbers = raw.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    codes = raw.repeat(16, 1).T.contiguous().view(numbers.dtype)
    weight = GroupedWeight(codes=codes, scales_NG=torch.ones(256, 1))
    one = torch.zeros(1, 16, dtype=dtype)
    one[0, 5] = 1
    found = kernels.multiply_to_float(one, pack_grouped(weight))[0]
    expected = numbers.float()
    keep = expected.isfinite()
    assert torch.equal(found[keep], expected[keep])


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_permuted_inputs_meet_their_own_codes(kernels, dtype, inputs, num_rows):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    weight = replace(random_weight("unsigned", 64, 128, 32), permutation_K=order)
    x = whole_rows(num_rows, 128, dtype)
    found = kernels.multiply_to_float(x, pack_grouped(weight, inputs=inputs))
    assert_close(found, x.double() @ weight.dequantized().double().T, TOLERANCE[torch.float32])


@pytest.mark.parametrize("num_rows", [1, 9, 10, 97])
def test_sums_of_the_largest_whole_numbers_are_exact(kernels, num_rows):
    table = torch.tensor([*range(15), 127.0])
    codes = pack_nibbles(torch.full((32, 64), 15, dtype=torch.uint8))
    weight = GroupedWeight(codes=codes, table=table, scales_NG=torch.ones(32, 1))
    x = torch.full((num_rows, 64), 127.0)
    x[::2] *= -1
    found = kernels.multiply_to_float(x, pack_grouped(weight, inputs=Inputs.INT8))
    assert torch.equal(found, (x.sum(1) * 127)[:, None].expand(-1, 32))


@pytest.mark.parametrize("num_rows", [3, 20])
@pytest.mark.parametrize("inputs", Inputs)
def test_a_row_of_zeros_and_one_that_is_not_finite_stay_so(kernels, dtype, inputs, num_rows):
    x, weight = rows(num_rows, 64, dtype), random_weight("signed", 32, 64, 32)
    x[0], x[1, 5] = 0, torch.nan
    found = kernels.multiply(x, pack_grouped(weight, inputs=inputs))
    assert not found[0].any()
    assert bool(found[1].isnan().all())
    assert bool(found[2:].isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_product_weighs_its_ups_by_its_gates(kernels, dtype, kind):
    x = rows(5, 128, dtype)
    gate, up = random_weight(kind, 48, 128, 32), random_weight(kind, 48, 128, 64, seed=2)
    expected = functional.silu(x.double() @ gate.dequantized().double().T)
    expected = expected * (x.double() @ up.dequantized().double().T)
    both = merged([gate, up]).outputs(gate_up_order(gate.num_outputs, gate.device))
    found = kernels.multiply(x, pack_grouped(both, None, GateActivation.SILU))
    assert_close(found, expected, TOLERANCE[dtype])


def test_what_the_kernels_have_no_form_for_is_refused_with_the_reason():
    with pytest.raises(CannotPack, match="groups of 8"):
        pack_grouped(random_weight("signed", 32, 64, 8))
    with pytest.raises(CannotPack, match="float8 weights have no product with int8 inputs"):
        pack_grouped(random_weight("float8", 32, 64, 32), inputs=Inputs.INT8)
    uneven = SIGNED_TABLE.clone()
    uneven[3] = -0.7
    codes = pack_nibbles(torch.zeros((32, 64), dtype=torch.uint8))
    weight = GroupedWeight(codes=codes, table=uneven, scales_NG=torch.ones(32, 2))
    with pytest.raises(CannotPack, match="bfloat16 has not"):
        pack_grouped(weight)
    with pytest.raises(CannotPack, match="whole multiples"):
        pack_grouped(weight, inputs=Inputs.INT8)


class _MisreadWeight(GroupedWeight):
    """A weight that its definition makes other numbers of than the kernels."""

    def dequantized(self, dtype=torch.float32):
        return super().dequantized(dtype) * 1.01


@pytest.mark.parametrize("inputs", Inputs)
def test_a_product_that_is_not_exact_is_refused_with_the_name_of_its_module(kernels, inputs):
    weight = random_weight("unsigned", 64, 128, 32)
    prove_product("layers.0.q_proj", weight, kernels, inputs)
    parts = {each.name: getattr(weight, each.name) for each in fields(weight)}
    with pytest.raises(StartupError, match=r"not multiply exactly by layers\.0\.q_proj \(4 bits by 32"):
        prove_product("layers.0.q_proj", _MisreadWeight(**parts), kernels, inputs)


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize(
    ("lowest", "highest", "num_bits"),
    [
        *((0, 0, 5), (5, 5, 5), (31, 31, 5), (32, 32, 6), (-128, -128, 8)),
        *((-31, 0, 5), (-32, 0, 6), (-20, 11, 5), (-20, 12, 6), (1, 31, 5), (1, 32, 6)),
        *((-63, 0, 6), (-64, 0, 8), (-5, 58, 6), (-5, 59, 8), (60, 63, 6), (60, 64, 8), (-128, 127, 8)),
    ],
)
def test_whole_numbers_take_as_few_bits_as_hold_them_and_0(kernels, inputs, lowest, highest, num_bits):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(lowest, highest + 1, (77, 96), generator=generator).to(torch.int8)
    codes[3, 5], codes[70, 90] = lowest, highest
    weight = GroupedWeight(codes=codes, scales_NG=torch.rand(77, 6, generator=generator) + 0.5)
    packed = pack_grouped(weight, inputs=inputs)
    assert packed.data.nbytes == 96 * 96 * num_bits // 8
    x = whole_rows(7, 96, torch.float32)
    found = kernels.multiply_to_float(x, packed).double()
    assert (found - x.double() @ weight.dequantized().double().T).abs().max() < 1e-5 * 77 * 96
    assert torch.equal(grouped_rows(packed, torch.arange(77)), weight.dequantized())


@pytest.mark.parametrize("inputs", Inputs)
def test_whole_numbers_are_tried_in_every_form_that_a_weight_of_their_kind_may_have(inputs, monkeypatch):
    """Their range is that of a whole weight, of which the trial has some outputs."""
    tried = []

    class Noting(Kernels):
        def multiply_to_float(self, x, weight):
            tried.append(weight.data[0].nbytes * 8 // (32 * 128))  # bits of a code
            return super().multiply_to_float(x, weight)

    weight = random_weight("six bits", 64, 128, 32)
    library = find_library() or build_library()
    prove_product("x", weight, Noting(library, 1), inputs)
    assert sorted(tried) == [5, 5, 6, 6, 8, 8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", Inputs)
def test_a_weight_that_is_packed_piece_by_piece_is_the_same(
    kind: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "float8" and inputs is Inputs.INT8:
        pytest.skip("has no product with them")
    weight = random_weight(kind, 77, 64, 32)
    whole = pack_grouped(weight, inputs=inputs)
    monkeypatch.setattr(grouped_packing, "_PIECE_BYTES", 1)
    assert torch.equal(pack_grouped(weight, inputs=inputs).data, whole.data)
