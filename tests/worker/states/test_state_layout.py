"""States fill blocks without gaps, and every number of a state has one place."""

import numpy as np
import pytest
import torch

from worker.states.interface import StateShape
from worker.states.state_layout import LayerRuns, Run, StateLayout

DELTA = StateShape(
    input_dtype=torch.bfloat16, num_channels=96, num_columns=3, num_heads=4, key_dim=16, value_dim=16
)
CONVOLUTION = StateShape(input_dtype=torch.bfloat16, num_channels=64, num_columns=2)
OF_CHANNELS = StateShape(
    input_dtype=torch.float32, num_channels=48, num_columns=3, num_heads=48, key_dim=16, value_dim=1
)


def bytes_of(layer: LayerRuns) -> list[tuple[Run, int]]:
    """Runs, each with the bytes of an item."""
    shape = layer.shape
    channel_bytes, row_bytes = shape.num_columns * shape.input_dtype.itemsize, shape.key_dim * 4
    return [*((run, channel_bytes) for run in layer.channels), *((run, row_bytes) for run in layer.rows)]


@pytest.mark.parametrize("block_bytes", [192, 320, 1024, 5000 // 64 * 64, 1 << 20])
def test_every_number_has_one_place_within_a_block(block_bytes: int) -> None:
    layout = StateLayout({0: DELTA, 2: CONVOLUTION, 5: OF_CHANNELS}, block_bytes)
    taken = np.zeros((layout.num_stripes, block_bytes), np.int64)
    for layer in layout.layers.values():
        for runs, num_items in (
            (layer.channels, layer.shape.num_channels),
            (layer.rows, layer.shape.num_heads * layer.shape.value_dim),
        ):
            assert [item for run in runs for item in range(run.first, run.end)] == list(range(num_items))
        for run, item_bytes in bytes_of(layer):
            assert run.offset % 64 == 0
            assert run.offset + run.length * item_bytes <= block_bytes
            taken[run.stripe, run.offset : run.offset + run.length * item_bytes] += 1
    assert taken.max() == 1
    assert taken.any(axis=1).all()


def delta(num_heads: int, num_channels: int) -> StateShape:
    return StateShape(torch.bfloat16, num_channels, 3, num_heads, 128, 128)


@pytest.mark.parametrize(
    ("shape", "num_layers", "block_bytes"),
    [(delta(16, 6144), 18, 192 << 10), (delta(32, 8192), 24, 512 << 10), (delta(32, 8192), 30, 320 << 10)],
    ids=["Qwen3.5-0.8B", "Qwen3.5-4B", "Qwen3.6-35B-A3B"],
)
def test_published_shapes_fill_their_blocks(shape: StateShape, num_layers: int, block_bytes: int) -> None:
    """Blocks are those of 16 tokens in bf16."""
    layout = StateLayout(dict.fromkeys(range(num_layers), shape), block_bytes)
    row_bytes = shape.num_heads * shape.value_dim * shape.key_dim * 4
    least = num_layers * (row_bytes + shape.num_channels * shape.num_columns * 2)
    assert layout.num_stripes == -(-least // block_bytes)


def test_blocks_that_hold_no_row_are_refused() -> None:
    with pytest.raises(ValueError, match="does not hold 1 times 64 bytes"):
        _ = StateLayout({0: StateShape(num_heads=2, key_dim=16, value_dim=8)}, 32).layers
