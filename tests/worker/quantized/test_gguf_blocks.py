"""Blocks of GGUF files become the numbers that the package gguf makes of them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from worker.checkpoint.gguf.file import GgufType
from worker.checkpoint.gguf.layouts import RowOrder, rotary_pairs
from worker.quantized import gguf_blocks
from worker.quantized.gguf_blocks import order_of, weight_of_blocks

gguf = pytest.importorskip("gguf")
N, BLOCKS = 40, 3
QUANTIZED = [each for each in GgufType if not each.is_plain]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []}
"""Places of the float16 numbers of a block: random bytes there may be no numbers."""


def random_blocks(kind: GgufType) -> torch.Tensor:
    generator = torch.Generator().manual_seed(kind.value[0])
    raw = torch.randint(256, (N, BLOCKS, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[kind.name]:
        numbers = torch.randn((N, BLOCKS, 1), generator=generator).half()
        raw[:, :, place : place + 2] = numbers.view(torch.uint8)
    if kind is GgufType.MXFP4:  # exponents, of which 0 is the smallest and 255 no number
        raw[:, :, 0] = raw[:, :, 0] % 9 + 120
        raw[0, 0, 0] = 0
    return raw.view(N, -1)


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_random_blocks_are_the_numbers_of_the_package(kind: GgufType):
    raw = random_blocks(kind)
    expected = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind.name])
    found = weight_of_blocks(raw, kind).dequantized()
    assert found.shape == expected.shape
    # The package rounds a product of scales once more than the kernels, or adds in another order.
    assert np.allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_that_are_decoded_piece_by_piece_are_the_same_weight(
    kind: GgufType, monkeypatch: pytest.MonkeyPatch
):
    whole = weight_of_blocks(random_blocks(kind), kind)
    monkeypatch.setattr(gguf_blocks, "_PIECE_BYTES", 7 * BLOCKS * kind.block_bytes)
    found = weight_of_blocks(random_blocks(kind), kind)
    for field in fields(found):
        one, other = getattr(found, field.name), getattr(whole, field.name)
        assert one is other or torch.equal(one, other), field.name


def test_a_scale_that_is_no_number_is_refused():
    raw = random_blocks(GgufType.MXFP4)
    raw[3, 17] = 255
    with pytest.raises(ValueError, match="not a number"):
        weight_of_blocks(raw, GgufType.MXFP4)


def test_rows_of_rotary_pairs_come_to_stand_a_half_apart():
    order = rotary_pairs(num_heads=2).rows
    assert order is not None
    assert order_of(order, 12).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_runs_of_rows_become_heads():
    order = RowOrder(num_heads=2, sizes=(1, 2), start=1)
    # Behind the first: one row of each head, two of each, and both once more.
    assert order_of(order, 13).tolist() == [0, 1, 3, 4, 7, 9, 10, 2, 5, 6, 8, 11, 12]
    for num_rows in (0, 1, 12, 14):
        with pytest.raises(ValueError, match="rows are not those of"):
            order_of(order, num_rows)
