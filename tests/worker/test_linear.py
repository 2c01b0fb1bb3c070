"""A linear layer is merged, reordered and cut without a look at its numbers, whatever format they are in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.model import quantization
from worker.model.layer_call import HeadShape
from worker.model.linear import Axis, Linear, PlainWeight, Segment, linear_of, merge
from worker.model.quantization import (
    NO_ROUNDING,
    round_to_float8,
    round_to_int4,
    round_to_int8,
    rounding_of,
)
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

NUM_TOKENS, NUM_INPUTS = 5, 24
HEADS = HeadShape(num_query_heads=8, num_kv_heads=2, key_dim=6, value_dim=4)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(num_outputs: int, seed: int = 1) -> Linear:
    weight = PlainWeight(numbers(num_outputs, NUM_INPUTS, seed=seed))
    return Linear.of(weight, numbers(num_outputs, seed=seed + 100))


@pytest.fixture(params=["plain", "int8"])
def merged(request: pytest.FixtureRequest) -> Linear:
    """Queries, keys and values of 8 and 2 heads."""
    parts = merge([layer(segment.num_outputs, seed) for seed, segment in enumerate(HEADS.segments)])
    parts = parts.in_segments(HEADS.segments)
    return round_to_int8(parts) if request.param == "int8" else parts


@pytest.fixture
def x() -> Tensor:
    return numbers(NUM_TOKENS, NUM_INPUTS, seed=7)


def test_the_product_is_that_of_the_numbers_as_they_are_when_plain(merged: Linear, x: Tensor) -> None:
    expected = functional.linear(x, merged.weight.dequantized(torch.float32), merged.bias_N)
    torch.testing.assert_close(merged.multiply(x), expected)
    torch.testing.assert_close(merged.dequantized(torch.float32).multiply(x), expected)
    residual = numbers(NUM_TOKENS, merged.num_outputs, seed=8)
    added = residual.clone()
    merged.multiply_and_add(added, x, 0.5)
    torch.testing.assert_close(added, residual + 0.5 * expected)


def test_layers_side_by_side_give_what_each_gives(x: Tensor) -> None:
    first, second = layer(7), layer(9, seed=2)
    without_bias = Linear.of(second.weight)
    together = merge([first, without_bias])
    expected = torch.cat([first.multiply(x), without_bias.multiply(x)], dim=1)
    torch.testing.assert_close(together.multiply(x), expected)
    assert together.segments == (Segment(7), Segment(9))


def test_outputs_are_reordered_with_their_biases(merged: Linear, x: Tensor) -> None:
    order = torch.arange(merged.num_outputs).flip(0)
    torch.testing.assert_close(merged.reordered(order).multiply(x), merged.multiply(x)[:, order])


@pytest.mark.parametrize("world", [1, 2])
def test_each_rank_has_its_part_of_queries_of_keys_and_of_values(
    merged: Linear, x: Tensor, world: int
) -> None:
    shards = [merged.shard(rank, world, Axis.OUTPUTS) for rank in range(world)]
    whole = merged.multiply(x).split([segment.num_outputs for segment in HEADS.segments], dim=1)
    of_ranks = [
        shard.multiply(x).split([segment.num_outputs for segment in shard.segments], dim=1)
        for shard in shards
    ]
    for index, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[index] for part in of_ranks], dim=1), expected)


def test_ranks_share_a_key_head_where_there_are_too_few(merged: Linear, x: Tensor) -> None:
    num_queries, num_keys, _ = (segment.num_outputs for segment in HEADS.segments)
    keys = merged.multiply(x)[:, num_queries : num_queries + num_keys]
    for rank in range(4):
        shard = merged.shard(rank, 4, Axis.OUTPUTS)
        assert [segment.num_outputs for segment in shard.segments] == [12, 6, 4]
        head = rank // 2
        torch.testing.assert_close(shard.multiply(x)[:, 12:18], keys[:, head * 6 : head * 6 + 6])


def test_products_of_cut_inputs_add_up_and_the_bias_is_added_once(merged: Linear, x: Tensor) -> None:
    total = torch.zeros(NUM_TOKENS, merged.num_outputs)
    for rank in range(3):
        shard = merged.shard(rank, 3, Axis.INPUTS)
        shard.multiply_and_add(total, x[:, rank * 8 : rank * 8 + 8], 1.0)
    torch.testing.assert_close(total, merged.multiply(x))


@pytest.mark.parametrize(("world", "axis"), [(3, Axis.OUTPUTS), (5, Axis.INPUTS)])
def test_heads_and_inputs_that_cannot_be_divided_are_refused(merged: Linear, world: int, axis: Axis) -> None:
    with pytest.raises(ValueError, match=f"cannot be divided by {world}"):
        merged.shard(0, world, axis)


def test_segments_cover_all_outputs() -> None:
    with pytest.raises(ValueError, match="of 7 outputs"):
        layer(7).in_segments([Segment(3), Segment(3)])


def test_rounded_numbers_take_a_quarter_and_are_close() -> None:
    plain = Linear.of(PlainWeight(numbers(32, 256)))
    rounded = round_to_int8(plain)
    assert plain.describe() == "32 x 256 float32, 32768 bytes"
    assert rounded.describe() == f"32 x 256 int8, {32 * 256 + 32 * 4} bytes"
    errors = (rounded.weight.dequantized(torch.float32) - plain.weight.dequantized(torch.float32)).abs()
    assert bool((errors.amax(dim=1) <= plain.weight.dequantized(torch.float32).abs().amax(dim=1) / 253).all())
    assert round_to_int8(rounded) is rounded


def test_four_bits_miss_no_number_by_more_than_half_a_step_of_its_group() -> None:
    plain = Linear.of(PlainWeight(numbers(8, 96)))
    plain.weight.dequantized(torch.float32)[0, :32] = 0
    rounded = round_to_int4(plain)
    exact, found = (each.weight.dequantized(torch.float32).view(8, 3, 32) for each in (plain, rounded))
    steps = exact.abs().amax(dim=2, keepdim=True) / 8
    # Of the other sign there is one code less: the largest may be a whole step away.
    assert bool(((found - exact).abs() <= steps * 1.0001).all())
    assert bool(((found - exact).abs() <= steps * 0.5001).float().mean() > 0.98)
    assert bool((found[0, 0] == 0).all())
    assert round_to_int4(rounded) is rounded
    assert round_to_int4(Linear.of(PlainWeight(numbers(8, 48)))).weight.format == "float32"


@pytest.mark.parametrize("round_weight", [round_to_int4, round_to_int8, round_to_float8])
def test_a_weight_that_is_rounded_piece_by_piece_is_the_same(
    round_weight: Callable[[Linear], Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last rows have scales that float16 has not, so that none are float16."""
    plain = numbers(8, 96) * torch.tensor([1.0] * 6 + [1e6] * 2)[:, None]
    whole = round_weight(Linear.of(PlainWeight(plain))).weight
    monkeypatch.setattr(quantization, "_PIECE_NUMBERS", 3 * 96)
    found = round_weight(Linear.of(PlainWeight(plain))).weight
    assert torch.equal(found.dequantized(torch.float32), whole.dequantized(torch.float32))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1.0, torch.float16), (1e6, torch.bfloat16), (1e-5, torch.bfloat16), (1e-38, torch.bfloat16)],
)
def test_scales_of_four_bits_are_numbers_of_16_bits_whatever_the_size_of_the_weights(size, dtype) -> None:
    exact = (numbers(8, 96) * size).view(8, 3, 32)
    weight = round_to_int4(Linear.of(PlainWeight(exact.view(8, 96)))).weight
    assert torch.equal(weight.scales_NG, weight.scales_NG.to(dtype).float())
    found = weight.dequantized().view(8, 3, 32)
    if size < 1e-30:  # of such a scale there is no inverse
        assert not found.any()
    else:
        assert bool(((found - exact).abs() <= exact.abs().amax(dim=2, keepdim=True) / 7.8).all())


@pytest.mark.parametrize(("smallest", "most_error"), [(2.0**-20, 0.0), (2.0**-12.4, 2.0**-10)])
def test_scales_of_float16_weights_are_kept_however_small(smallest: float, most_error: float) -> None:
    plain = (numbers(8, 96) * 0.02).half()
    plain[0] = smallest
    exact = plain.float().view(8, 3, 32).abs().amax(dim=2) / 8
    found = round_to_int4(Linear.of(PlainWeight(plain))).weight.scales_NG
    assert torch.equal(found[1:].abs(), exact[1:])
    assert bool(((found.abs() - exact).abs() <= most_error * exact).all())


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class RoundedLinear(nn.Module):
    def as_linear(self) -> Linear:
        return round_to_int8(layer(8))


def test_a_module_is_read_if_it_is_torchs_own_or_says_what_it_computes() -> None:
    module = nn.Linear(4, 3)
    found = linear_of(module)
    assert found is not None
    torch.testing.assert_close(found.multiply(torch.ones(1, 4)), module(torch.ones(1, 4)))
    assert linear_of(Doubling(4, 3)) is None
    assert linear_of(None) is None
    found = linear_of(RoundedLinear())
    assert found is not None
    assert found.weight.format == "int8"


def test_an_unknown_word_of_quantization_is_refused_with_the_known_ones() -> None:
    assert rounding_of(WorkerConfig(model_path="")) == NO_ROUNDING
    with pytest.raises(StartupError, match="unknown --quantization int3") as refused:
        rounding_of(WorkerConfig(model_path="", quantization="int3"))
    assert "none, int8" in refused.value.fix
