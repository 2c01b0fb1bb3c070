"""The pool's layout: every number of every view has one place, and only its own."""

import math

import pytest
import torch

from worker.attention.kv_cache import FLOAT8, BlockLayout, KVCache, LayerShape, scale_for

SHAPES = {
    "equal": {0: LayerShape(2, 8, 8), 1: LayerShape(2, 8, 8)},
    "values smaller than keys": {0: LayerShape(4, 24, 16), 1: LayerShape(4, 24, 16)},
    "layers of different shape": {0: LayerShape(2, 16, 16), 3: LayerShape(1, 32, 32), 5: LayerShape(3, 8, 4)},
}


@pytest.fixture(params=SHAPES)
def cache(request: pytest.FixtureRequest) -> KVCache:
    layout = BlockLayout(layers=SHAPES[request.param], block_size=4, dtype=torch.float32)
    return KVCache(layout, num_blocks=3, memory=torch.zeros(4 * layout.block_numel))


def tensors(cache: KVCache):
    for layer in cache.layers.values():
        yield from (layer.keys, layer.values)


def test_no_two_places_share_memory_and_a_block_is_one_piece(cache: KVCache) -> None:
    for number, paged in enumerate(tensors(cache), start=1):
        assert not paged.blocks_NHSD.any(), "written by another view"
        paged.blocks_NHSD[2] = number
    block = cache.pool_NE[2]
    used = sum(paged.blocks_NHSD[2].numel() for paged in tensors(cache))
    assert int((block != 0).sum()) == used
    assert not cache.pool_NE[[0, 1, 3]].any()


def test_pages_and_rows_number_the_same_memory_as_blocks(cache: KVCache) -> None:
    block_size = cache.layout.block_size
    for paged in tensors(cache):
        paged.blocks_NHSD.copy_(torch.randn(paged.blocks_NHSD.shape))
        num_blocks, num_heads, *_ = paged.blocks_NHSD.shape
        for block in range(num_blocks):
            for head in range(num_heads):
                page = block * paged.pages_per_block + head
                torch.testing.assert_close(paged.pages_PSD[page], paged.blocks_NHSD[block, head])
                row = page * block_size + 3
                torch.testing.assert_close(paged.rows_RD[row], paged.blocks_NHSD[block, head, 3])


def test_bytes_are_counted_with_the_padding_block_and_the_slack(cache: KVCache) -> None:
    assert cache.num_bytes == 4 * cache.layout.block_bytes
    used = sum(paged.blocks_NHSD[0].numel() for paged in tensors(cache))
    assert used <= cache.layout.block_numel <= 2 * used


def test_equal_layers_need_no_slack() -> None:
    layout = BlockLayout(layers=SHAPES["equal"], block_size=4, dtype=torch.bfloat16)
    assert layout.block_bytes == 2 * 2 * (2 * 4 * 8) * 2


@pytest.mark.parametrize("largest", [1e-4, 0.7, 40.0, 9000.0])
def test_keys_of_8_bits_are_near_what_was_written_and_never_infinite(largest: float) -> None:
    scale = scale_for(largest)
    assert math.log2(scale).is_integer(), "bfloat16 holds each number times its scale"
    layout = BlockLayout(
        layers={0: LayerShape(1, 8, 8)}, block_size=4, dtype=FLOAT8, scales={0: (scale, 2 * scale)}
    )
    cache = KVCache(layout, 2, torch.zeros(3 * layout.block_numel, dtype=layout.storage))
    keys = cache.layers[0].keys
    written = torch.tensor([1.0, -1.0, 0.3, 2.9, 1e-3, 0.0, 1e4, -1e4]) * largest
    keys.write(torch.tensor([5]), written[None])
    found = keys.rows_RD[5].float() * keys.scale
    assert torch.allclose(found[:6], written[:6], rtol=2**-4, atol=largest * 2**-14)
    assert bool(found.isfinite().all())
    assert found[6] == -found[7] >= 4 * largest
    assert cache.layers[0].values.scale == 2 * scale
