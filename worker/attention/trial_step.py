"""A step of one short sequence over a small cache, by which layers and bodies are tried at load."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch

from worker.attention.interface import AttentionMetadata, BlockTables
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.device import Device
from worker.states.interface import StateShape

TRIAL_TOKENS = 21
"""More than two blocks, and not a whole number of them."""
_BLOCK_SIZE = 8
_NUM_BLOCKS = -(-TRIAL_TOKENS // _BLOCK_SIZE)


def trial_cache(
    shapes: Mapping[int, LayerShape],
    dtype: torch.dtype,
    device: Device,
    states: Mapping[int, StateShape] = MappingProxyType({}),
) -> KVCache:
    """Make a cache for one sequence of at most TRIAL_TOKENS tokens."""
    layout = BlockLayout(layers=dict(shapes), state_shapes=dict(states), block_size=_BLOCK_SIZE, dtype=dtype)
    num_blocks = _NUM_BLOCKS + layout.num_state_blocks
    return KVCache(layout, num_blocks, device.zeros((num_blocks + 1) * layout.block_numel, layout.dtype))


def trial_metadata(num_tokens: int = TRIAL_TOKENS, num_state_blocks: int = 0) -> AttentionMetadata:
    """Describe the first step of a sequence. Its blocks are in reverse order, to test block tables."""
    places = np.arange(num_tokens)
    blocks = np.arange(_NUM_BLOCKS, 0, -1)
    return AttentionMetadata(
        num_decodes=int(num_tokens == 1),
        query_starts=np.array([0, num_tokens]),
        seq_lens=np.array([num_tokens]),
        tables=BlockTables.of(blocks[None].astype(np.int32)),
        token_blocks_ST=blocks[places // _BLOCK_SIZE][None],
        token_offsets=places % _BLOCK_SIZE,
        state_blocks=np.arange(_NUM_BLOCKS + num_state_blocks, _NUM_BLOCKS, -1)[None],
    )
