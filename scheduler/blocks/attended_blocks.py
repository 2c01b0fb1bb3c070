"""Blocks of a sequence that a step reads and writes: all of them, or those that are still read.

Owns: the arithmetic from positions to places in a block table.
Never: blocks themselves (kv_cache_manager.py), or how attention masks what it reads (worker/attention/).

With a window of n tokens in every layer a token sees itself and the n - 1 tokens before it. Blocks that lie
wholly before that are never read again, which limits the blocks that a sequence needs at once:

    table   | passed | passed | held | held | held | not yet |
    tokens    ................[.. window ..)[ one step )
                                            ^ start of the share
"""

from scheduler.cache_groups import ALL_TOKENS
from scheduler.config import SchedulerConfig


class AttendedBlocks:
    """Ranges of a block table, counted from its first block. Without a window no block is ever passed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        (group,) = config.groups
        lifetime = group.lifetime
        self._lifetime = lifetime if lifetime.num_tokens < config.max_model_len else ALL_TOKENS
        # A range of tokens touches one block more than fit into it, unless it begins where a block does.
        longest_range = lifetime.num_tokens - 1 + config.max_num_batched_tokens
        self._most_at_once = self.blocks_for(longest_range - 1) + 1
        self.is_limited = self._lifetime.is_limited
        """Whether blocks are passed."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def first_block(self, start: int) -> int:
        """First block that a share from position `start` on reads; those before it are passed."""
        return self._lifetime.first_read(start) // self._block_size if self.is_limited else 0

    def end_block(self, num_tokens: int, start: int) -> int:
        """Length of the table that a sequence of `num_tokens` needs for any share from `start` on."""
        end = self.blocks_for(num_tokens)
        if not self.is_limited:
            return end
        return min(end, self.first_block(start) + self._most_at_once)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` ever holds at once."""
        return self.end_block(num_tokens, 0)
