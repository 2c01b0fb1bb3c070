"""Scales and offsets keep every number in fewer bytes, and products and rows are those of the weight."""

from dataclasses import replace

import pytest
import torch

from tests.gguf_checkpoints import RandomBlocks
from tests.worker.cpu.conftest import INSTRUCTION_SETS, OpenKernels
from worker.checkpoint.gguf.file import GgufType
from worker.cpu.native import Kernels
from worker.cpu.packing.grouped_packing import Inputs, grouped_rows, pack_grouped, pack_offsets, pack_scales
from worker.cpu.proof import prove_product
from worker.quantized.gguf_blocks import weight_of_blocks
from worker.quantized.grouped_weight import UNSIGNED_TABLE, GroupedWeight

pytestmark = pytest.mark.pairs

N, K, GROUP = 77, 512, 32
EVERY = torch.arange(N)


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest, open_kernels: OpenKernels) -> Kernels:
    return open_kernels(request.param, 1)


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])) + 0.25


def whole(highest: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, highest, shape, generator=torch.Generator().manual_seed(highest)).float()


def spread(units: torch.Tensor) -> torch.Tensor:
    return units.float().repeat_interleave(K // GROUP // units.shape[1], dim=1)


SHAPE = (N, K // GROUP)
HALF, BF16 = (random(*SHAPE) / 1000).half().float(), (random(*SHAPE) * 1e-30).bfloat16().float()
UNITS = random(N, K // 256).half() / 100
CASES = {
    "float32": ({"scales_NG": random(*SHAPE)}, 4),
    "half": ({"scales_NG": HALF}, 2),
    "subnormal half": ({"scales_NG": HALF.clone().fill_(3e-7).half().float()}, 2),
    "bfloat16": ({"scales_NG": BF16}, 2),
    "zero points": ({"scales_NG": HALF, "offsets_NG": HALF * whole(15, *SHAPE)}, 3),
    "zero points of bfloat16": ({"scales_NG": BF16, "offsets_NG": BF16 * whole(15, *SHAPE)}, 3),
    "float offsets": ({"scales_NG": HALF, "offsets_NG": random(*SHAPE)}, 6),
    "units": (
        {
            "scales_NG": spread(UNITS) * whole(63, *SHAPE),
            "offsets_NG": spread(UNITS) * -whole(60, *SHAPE),
            "scale_units_NU": UNITS,
            "offset_units_NU": UNITS,
        },
        2.5,
    ),
}
"""Stored numbers of a weight, and the bytes of all of it for each group."""


RANGES = {"5 bits": (0, 32), "6 bits": (-32, 32), "8 bits": (-127, 128)}
"""Whole numbers, the second being the first that is none of them."""
WIDTHS = ("4 bits", *RANGES)


def weight(name: str, *, width: str = "4 bits") -> GroupedWeight:
    generator = torch.Generator().manual_seed(3)
    if width in RANGES:
        codes = torch.randint(*RANGES[width], (N, K), generator=generator).to(torch.int8)
        return GroupedWeight(codes=codes, **CASES[name][0])
    codes = torch.randint(256, (N, K // 2), dtype=torch.uint8, generator=generator)
    return GroupedWeight(codes=codes, table=UNSIGNED_TABLE, **CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_every_number_is_kept_in_as_few_bytes_as_hold_it(name):
    parts, num_bytes = CASES[name]
    made = weight(name)
    scales = pack_scales(made.scales_NG, made.scale_units_NU)
    offsets = pack_offsets(made.offsets_NG, made.scales_NG, made.offset_units_NU)
    found = scales.rows(EVERY // 32, EVERY % 32)
    assert torch.equal(found, parts["scales_NG"])
    if "offsets_NG" in parts:
        assert torch.equal(offsets.rows(EVERY // 32, EVERY % 32, found), parts["offsets_NG"])
    padded = 96 * K // GROUP
    assert scales.num_bytes + offsets.num_bytes == num_bytes * padded


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_a_product_is_that_of_the_dequantized_weight(kernels, name, width):
    for inputs in Inputs:
        prove_product(name, weight(name, width=width), kernels, inputs)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_no_row_depends_on_how_many_there_are(kernels, name, width):
    packed = pack_grouped(weight(name, width=width))
    x = torch.randn((110, K), generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = torch.cat([kernels.multiply_to_float(row[None], packed) for row in x])
    for num_rows in (2, 5, 7, 13, 18, 110):
        assert torch.equal(kernels.multiply_to_float(x[:num_rows].contiguous(), packed), alone[:num_rows])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_looked_up_in_what_was_packed(name, width):
    made = weight(name, width=width)
    chosen = torch.tensor([0, 76, 5, 5, 33, 64])
    for inputs in Inputs:
        found = grouped_rows(pack_grouped(made, inputs=inputs), chosen)
        assert torch.equal(found, made.dequantized()[chosen])


def test_units_follow_the_outputs_and_are_dropped_where_others_have_none():
    made = weight("units")
    both = made.outputs(slice(40)).merge([made.outputs(slice(40, N))])
    assert torch.equal(both.scale_units_NU, UNITS)
    plain = replace(made, scale_units_NU=None, offset_units_NU=None)
    merged = made.merge([plain])
    assert merged.scale_units_NU is None
    assert torch.equal(merged.dequantized(), made.dequantized().repeat(2, 1))


def test_of_a_weight_with_offsets_and_one_without_merged_no_number_takes_more_than_a_byte_and_its_units():
    parts = [
        weight_of_blocks(torch.from_numpy(RandomBlocks().of(kind, 64, 1024)), GgufType[kind])
        for kind in ("Q4_K", "Q6_K")
    ]
    both = parts[0].merge(parts[1:])
    packed = pack_grouped(both)
    num_units, num_groups = 2 * 128 * 1024 // 256, 2 * 128 * 1024 // 16
    assert sum(each.num_bytes for each in packed.numbers) == num_groups + 2 * num_units
    assert torch.equal(grouped_rows(packed, torch.arange(128)), both.dequantized())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"])
def test_packed_blocks_take_no_more_than_a_twentieth_above_their_file(kind):
    blocks = RandomBlocks().of(kind, 64, 1024)
    packed = pack_grouped(weight_of_blocks(torch.from_numpy(blocks), GgufType[kind]))
    num_bytes = packed.data.nbytes + sum(each.num_bytes for each in packed.numbers)
    assert blocks.nbytes <= num_bytes <= 1.05 * blocks.nbytes
