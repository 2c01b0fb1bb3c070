"""Blocks of a sequence that a step reads and writes: all of them, or those inside a sliding window.

Owns: the arithmetic from positions to places in a block table.
Never: blocks themselves (kv_cache_manager.py), or how attention masks what it reads (worker/attention/).

With a sliding window in every layer a token sees itself and the window - 1 tokens before it. Blocks that lie
wholly before that are never read again, so that a sequence needs so many blocks at once and no more:

    table   | passed | passed | held | held | held | not yet |
    tokens    ................[.. window ..)[ one step )
                                            ^ start of the share
"""

from scheduler.config import SchedulerConfig


class AttendedBlocks:
    """Ranges of a block table, counted from its first block. Without a window no block is ever passed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._num_before: int | None = None
        """Tokens before its own that a query reads; None: all."""
        self._most_at_once = 0
        window = config.sliding_window
        if window is not None and window < config.max_model_len:
            self._num_before = window - 1
            # A range of tokens touches one block more than fit into it, unless it begins where a block does.
            longest_range = self._num_before + config.max_num_batched_tokens
            self._most_at_once = self.blocks_for(longest_range - 1) + 1

    @property
    def is_limited(self) -> bool:
        """Whether there is a window that blocks can fall out of."""
        return self._num_before is not None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def first_block(self, start: int) -> int:
        """First block that a share from position `start` on reads; those before it are passed."""
        if self._num_before is None:
            return 0
        return max(start - self._num_before, 0) // self._block_size

    def end_block(self, num_tokens: int, start: int) -> int:
        """Length of the table that a sequence of `num_tokens` needs for any share from `start` on."""
        end = self.blocks_for(num_tokens)
        if self._num_before is None:
            return end
        return min(end, self.first_block(start) + self._most_at_once)

    def most_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` ever holds at once."""
        return self.end_block(num_tokens, 0)
