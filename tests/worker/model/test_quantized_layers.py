"""Products by codes in plain torch: those of the numbers that the codes stand for, or none at all."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.worker.quantized.random_weights import KINDS, random_weight
from worker.model.quantized_layers import QuantizedLinear, skipping_products


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_any_block_of_outputs_is_that_of_the_numbers(kind: str):
    layer = QuantizedLinear(nn.Linear(1024, 300))
    layer.fill(random_weight(kind, 300, 1024, 32))  # more than one block
    x = torch.randn((3, 1024), generator=torch.Generator().manual_seed(2))
    numbers = layer.weight_codes.numbers().view(300, -1, 32) * layer.weight_codes.scales_NG[:, :, None]
    if layer.weight_codes.offsets_NG is not None:
        numbers = numbers - layer.weight_codes.offsets_NG[:, :, None]
    torch.testing.assert_close(layer(x), functional.linear(x, numbers.view(300, -1), layer.bias))


def test_a_call_that_only_shows_how_layers_are_called_multiplies_nothing():
    layer = QuantizedLinear(nn.Linear(64, 48))
    layer.fill(random_weight("signed", 48, 64, 32))
    x = torch.ones(2, 5, 64)
    with skipping_products():
        shown = layer(x)
    assert shown.shape == (2, 5, 48)
    assert not shown.any()
    assert layer(x).any()
