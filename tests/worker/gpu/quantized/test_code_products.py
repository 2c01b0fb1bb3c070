"""Products by codes on a GPU, against float64 of the dequantized weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.gpu.interpreter import mend_interpreter
from tests.worker.quantized.random_weights import KINDS, random_weight
from worker.gpu.quantized import products as code_products
from worker.gpu.quantized import proof as code_proof
from worker.gpu.quantized.experts import CodeExperts
from worker.gpu.quantized.float8_products import Float8Product, has_float8_product, with_float8_rows
from worker.gpu.quantized.kernels.row_kernels import round_rows
from worker.gpu.quantized.products import CodeProduct, count_splits, find_hindrance, without_codes
from worker.gpu.quantized.proof import prove_product
from worker.model.layer_parts import GateActivation, Unrecognised
from worker.model.linear import Linear, PlainWeight
from worker.model.mixture import Gate
from worker.model.quantization import round_to_float8, round_to_int4, round_to_int8
from worker.quantized.grouped_weight import GroupedWeight
from worker.worker_errors import StartupError

mend_interpreter()
# The interpreter multiplies no bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
few = settings(max_examples=20, deadline=None, derandomize=True)


def rows(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((num_rows, num_inputs), generator=torch.Generator().manual_seed(4)).to(dtype)


def with_scales_of(dtype: torch.dtype, weight: GroupedWeight) -> GroupedWeight:
    """Round scales, and half of all offsets, to what a dtype has: as checkpoints have them."""
    offsets = weight.offsets_NG
    if offsets is not None and dtype is torch.float16:
        offsets = offsets.to(dtype).float()
    return replace(weight, scales_NG=weight.scales_NG.to(dtype).float(), offsets_NG=offsets)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected).norm() / expected.norm())


@few
@given(
    st.sampled_from(KINDS),
    st.sampled_from(list(TOLERANCE)),
    st.integers(1, 20),
    st.integers(1, 70),
    # Sizes that no tile divides, groups of which a tile has several, one, or a part, and one of all inputs.
    st.sampled_from(
        [(48, 16), (96, 32), (288, 96), (192, 64), (160, 80), (512, 128), (256, 256), (80, 80), (768, 384)]
    ),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_a_product_is_that_of_the_dequantized_weight(
    kind, dtype, num_rows, num_outputs, sizes, is_added, of_scales
):
    x = rows(num_rows, sizes[0], dtype)
    weight = with_scales_of(of_scales, random_weight(kind, num_outputs, *sizes))
    expected = x.double() @ weight.dequantized().double().T
    bias = None if is_added else torch.randn(num_outputs)
    product = CodeProduct(Linear.of(weight, bias))
    if bias is not None:
        assert error_of(product.multiply(x), expected + bias.double()) < TOLERANCE[dtype]
        return
    residual = rows(num_rows, num_outputs, dtype)
    expected = residual.double() + 0.5 * expected
    product.multiply_and_add(residual, x, 0.5)
    assert error_of(residual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_that_share_the_inputs_have_the_same_sums(kind):
    x, weight = rows(3, 1024, torch.float16), random_weight(kind, 40, 1024, 32)
    bias = torch.randn(40)
    assert count_splits(1, CodeProduct(Linear.of(weight))._weights.num_tiles, 264) > 1
    found = CodeProduct(Linear.of(weight, bias)).multiply_to(x, torch.float32)
    assert error_of(found, x.double() @ weight.dequantized().double().T + bias.double()) < 1e-5


@few
@given(
    st.sampled_from(KINDS), st.integers(1, 70), st.sampled_from([(48, 16), (160, 80), (512, 128), (256, 256)])
)
def test_numbers_that_are_written_are_those_of_the_codes(kind, num_outputs, sizes):
    weight = random_weight(kind, num_outputs, *sizes)
    order = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(3))
    for each in (weight, replace(weight, permutation_K=order)):
        assert torch.equal(CodeProduct(Linear.of(each)).numbers(torch.float32), each.dequantized())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_groups_share_words_where_16_bits_have_their_scales_whatever_the_number_of_outputs(kind, num_outputs):
    weight = with_scales_of(torch.float16, random_weight(kind, num_outputs, 96, 32))
    product = CodeProduct(Linear.of(weight))
    assert product._weights.scales_ERN.dtype is torch.int32
    assert torch.equal(product.numbers(torch.float32), weight.dequantized())
    x = rows(2, 96, torch.float16)
    expected = x.double() @ weight.dequantized().double().T
    assert error_of(product.multiply_to(x, torch.float32), expected) < 1e-5


def test_weights_with_codes_that_are_no_numbers_go_the_longer_way():
    weight = random_weight("float8", 16, 64, 64)
    assert CodeProduct(Linear.of(weight))._weights._has_bit_way
    weight.codes.view(torch.uint8)[3, 5] = 0xFF
    assert not CodeProduct(Linear.of(weight))._weights._has_bit_way


def test_words_of_bytes_have_the_same_numbers_in_rows_as_in_tiles():
    weight = random_weight("int8", 64, 256, 256)
    product = CodeProduct(Linear.of(weight), in_rows=True)
    in_tiles = CodeProduct(Linear.of(weight))
    assert torch.equal(product.numbers(torch.float32), in_tiles.numbers(torch.float32))


@pytest.mark.parametrize("has_bias", [True, False])
def test_many_rows_are_multiplied_by_numbers_and_few_by_codes(has_bias, monkeypatch):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    weight = replace(random_weight("unsigned", 48, 64, 32), permutation_K=order)
    product = CodeProduct(Linear.of(weight, torch.randn(48).half() if has_bias else None))
    numbers = weight.dequantized(torch.float16).double()
    product.fewest_by_numbers = 5
    # What a row must not meet is not there.
    for num_rows, absent in ((4, "write_numbers_kernel"), (5, "launch")):
        monkeypatch.undo()
        monkeypatch.setattr(code_products, absent, None)
        x, residual = rows(num_rows, 64, torch.float16), rows(num_rows, 48, torch.float16)
        expected = x.double() @ numbers.T + (product._bias_N.double() if has_bias else 0)
        assert error_of(product.multiply(x), expected) < TOLERANCE[torch.float16]
        found = residual.clone()
        product.multiply_and_add(found, x, 0.5)
        assert error_of(found, residual.double() + 0.5 * expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_rows", [1, 12, 17, 40, 70, 140])
def test_every_choice_of_tiles_has_the_same_sums(num_rows):
    x, weight = rows(num_rows, 128, torch.float16), random_weight("unsigned", 130, 128, 64)
    found = CodeProduct(Linear.of(weight)).multiply_to(x, torch.float32)
    assert error_of(found, x.double() @ weight.dequantized().double().T) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_every_code_of_eight_bits_is_multiplied_as_its_number(kind):
    raw = torch.arange(256, dtype=torch.uint8)
    numbers = raw.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    weight = GroupedWeight(
        codes=raw.repeat(16, 1).T.contiguous().view(numbers.dtype), scales_NG=torch.ones(256, 1)
    )
    one = torch.zeros(1, 16, dtype=torch.float16)
    one[0, 5] = 1
    found = CodeProduct(Linear.of(weight)).multiply_to(one, torch.float32)[0]
    is_number = numbers.float().isfinite()
    assert torch.equal(found[is_number], numbers.float()[is_number])


def test_permuted_inputs_and_numbers_of_any_table_meet_their_own_codes():
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    table = torch.linspace(-1, 1, 16).bfloat16().float()
    weight = replace(random_weight("unsigned", 64, 128, 32), permutation_K=order, table=table)
    x = rows(3, 128, torch.float16)
    found = CodeProduct(Linear.of(weight)).multiply_to(x, torch.float32)
    assert error_of(found, x.double() @ weight.dequantized().double().T) < 1e-5


def test_weights_without_an_exact_product_are_refused_by_name():
    assert find_hindrance(random_weight("signed", 8, 48, 24)) == ("groups of 24 inputs are no multiple of 16")
    finer = replace(random_weight("signed", 8, 32, 32), table=torch.linspace(-1, 1, 16))
    assert find_hindrance(finer) == "the table has numbers that bfloat16 has not"


@pytest.mark.parametrize("quantize", [round_to_int8, round_to_int4, round_to_float8])
def test_plain_weights_that_an_option_rounds_are_multiplied_as_they_were_rounded(quantize):
    linear = quantize(Linear.of(PlainWeight(torch.randn(48, 64))))
    x = rows(2, 64, torch.float16)
    found = CodeProduct(linear).multiply_to(x, torch.float32)
    assert error_of(found, x.double() @ linear.weight.dequantized(torch.float32).double().T) < 1e-5


def test_codes_are_not_kept_beside_the_product_that_has_them_in_its_own_order():
    linear = Linear.of(random_weight("unsigned", 48, 64, 32))
    left = without_codes(linear)
    assert left.weight.shape == linear.weight.shape
    assert left.weight.numbers_NK.untyped_storage().nbytes() == 2
    plain = Linear.of(PlainWeight(torch.ones(4, 4)))
    assert without_codes(plain) is plain


class RandomExperts:
    """See ExpertLinears."""

    gate = Gate(GateActivation.SILU, 1.7, 2.0, 1.0)

    def __init__(self, kind: str, num_experts: int) -> None:
        self.num_experts = num_experts
        biases = torch.randn(2, num_experts, 128)
        self._gate_ups = [
            Linear.of(random_weight(kind, 96, 64, 32, seed=each), biases[0, each, :96])
            for each in range(num_experts)
        ]
        self._downs = [
            Linear.of(random_weight(kind, 64, 48, 16, seed=9 + each), biases[1, each, :64])
            for each in range(num_experts)
        ]

    def gate_up(self, expert: int) -> Linear:
        return self._gate_ups[expert]

    def down(self, expert: int) -> Linear:
        return self._downs[expert]


@pytest.mark.parametrize("kind", ["e2m1", "unsigned", "float8"])
def test_each_token_gets_what_its_experts_of_codes_make_of_it(kind):
    experts = RandomExperts(kind, 5)
    hidden_TH = rows(9, 64, torch.float32) / 8
    ids_TK = torch.rand(9, 4).topk(2).indices  # one expert has no token
    scores_TK = torch.rand(9, 2)
    found_TH = CodeExperts(experts)(hidden_TH, ids_TK, scores_TK)
    expected_TH = torch.zeros(9, 64)
    for token in range(9):
        for expert, score in zip(ids_TK[token].tolist(), scores_TK[token], strict=True):
            x = experts.gate_up(expert).multiply(hidden_TH[token : token + 1])
            gated = experts.gate(*x.chunk(2, dim=1))
            expected_TH[token] += score * experts.down(expert).multiply(gated)[0]
    assert error_of(found_TH, expected_TH.double()) < 1e-5


def test_experts_that_are_quantized_in_several_ways_stay_as_they_are():
    experts = RandomExperts("signed", 3)
    experts._gate_ups[1] = Linear.of(random_weight("unsigned", 96, 64, 32))
    with pytest.raises(Unrecognised, match="quantized in several ways"):
        CodeExperts(experts)


@pytest.mark.parametrize("num_rows", [2, 40])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_of_float8_by_float8_is_that_of_the_rounded_rows(num_rows, has_bias):
    weight = replace(random_weight("float8", 48, 64, 64), scales_NG=torch.rand(48, 1) + 0.5)
    bias = torch.randn(48) if has_bias else None
    x = rows(num_rows, 64, torch.float16)
    rounded, scales = round_rows(x)
    assert error_of(rounded.double() * scales, x.double()) < 0.04
    assert bool((rounded.float().abs().amax(dim=1) == 448).all())
    expected = (rounded.double() * scales) @ weight.dequantized().double().T
    if bias is not None:
        expected += bias.double()
    product = Float8Product(Linear.of(weight, bias))
    assert error_of(product.multiply(x), expected) < TOLERANCE[x.dtype]
    residual = rows(num_rows, 48, torch.float16)
    expected = residual.double() + 0.5 * expected
    product.multiply_and_add(residual, x, 0.5)
    assert error_of(residual, expected) < TOLERANCE[x.dtype]


def test_only_floats_of_one_scale_for_each_output_have_their_rows_rounded():
    whole, in_groups = random_weight("float8", 48, 64, 64), random_weight("float8", 48, 64, 32)
    assert has_float8_product(whole)
    assert with_float8_rows(Linear.of(whole)).weight.format == "float8 times float8"
    for other in (in_groups, random_weight("int8", 48, 64, 64)):
        assert with_float8_rows(Linear.of(other)).weight is other


def test_a_product_that_is_not_exact_is_refused_with_the_modules_name(monkeypatch):
    weight = random_weight("unsigned", 64, 128, 32)
    monkeypatch.setattr(code_proof, "NUM_TOKENS", (1,))
    prove_product("model.layers.0.q_proj", weight, torch.float16)
    monkeypatch.setattr(code_products, "_kind_of", lambda _: (code_products.NIBBLES_E2M1, None))
    with pytest.raises(StartupError, match=r"do not multiply exactly by model\.layers\.0\.q_proj"):
        prove_product("model.layers.0.q_proj", weight, torch.float16)
