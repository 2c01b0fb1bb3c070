"""Blocks of GGUF files become the numbers that the package gguf makes of them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from worker.checkpoint.gguf.file import GgufType
from worker.quantized import gguf_blocks
from worker.quantized.gguf_blocks import in_halves, weight_of_blocks

gguf = pytest.importorskip("gguf")
N, BLOCKS = 40, 3
QUANTIZED = [each for each in GgufType if not each.is_plain]
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
HALVES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
"""Places of the float16 numbers of a block: random bytes there may be no numbers."""


def random_blocks(kind: GgufType) -> torch.Tensor:
    generator = torch.Generator().manual_seed(kind.value[0])
    raw = torch.randint(256, (N, BLOCKS, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[kind.name]:
        numbers = torch.randn((N, BLOCKS, 1), generator=generator).half()
        raw[:, :, place : place + 2] = numbers.view(torch.uint8)
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


def test_rows_of_rotary_pairs_come_to_stand_a_half_apart():
    rows = torch.arange(12)[:, None]
    assert in_halves(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert in_halves(rows, 0) is rows
