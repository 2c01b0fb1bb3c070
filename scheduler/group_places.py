"""Places of a group of layers that a sequence needs: all of them, those that are still read, or one.

A place is block_size tokens of all layers of a group, and takes a block for each stripe. With a window of n
tokens a token sees itself and the n - 1 tokens before it. Places that lie wholly before that are never read
again, which limits the places that a sequence needs at once:

    table   | passed | passed | held | held | held | not yet |
    tokens    ................[.. window ..)[ one step )
                                            ^ start of the share
"""

from sys import maxsize

from scheduler.cache_groups import CacheGroup, LifetimeKind
from scheduler.config import SchedulerConfig, SchedulerOptions

_LEAST_STEP_TOKENS = 64
"""More than any share of a decode with drafts, and those that a draft model writes ahead."""


class GroupPlaces:
    """Ranges of a table, counted from a sequence's first token. Where all tokens are kept, none is passed."""

    def __init__(
        self, group: CacheGroup, *, block_size: int, max_model_len: int, num_step_tokens: int
    ) -> None:
        """Take in sizes; `num_step_tokens` is the most tokens of a sequence in a step."""
        self._block_size = block_size
        self.lifetime = lifetime = group.lifetime
        self._most_at_once = group.most_places(
            maxsize, block_size=block_size, num_step_tokens=num_step_tokens
        )
        self.num_stripes = group.num_stripes
        """Blocks of a place."""
        self.is_fixed = lifetime.kind is LifetimeKind.FIXED
        """Whether one place holds the state after all tokens."""
        self.is_limited = lifetime.is_limited and lifetime.num_tokens < max_model_len
        """Whether places are passed."""
        self.keeps_all = not (self.is_fixed or self.is_limited)

    def first(self, start: int) -> int:
        """First place that a share from position `start` on reads; those before it are passed."""
        return self.lifetime.first_read(start) // self._block_size if self.is_limited else 0

    def end(self, num_tokens: int, start: int) -> int:
        """Place behind the last that a sequence of `num_tokens` needs for any share from `start` on."""
        end = -(-num_tokens // self._block_size)
        if self.keeps_all:
            return end
        return 1 if self.is_fixed else min(end, self.first(start) + self._most_at_once)

    def end_written(self, num_tokens: int) -> int:
        """Place behind the last that the first `num_tokens` have written to."""
        return 1 if self.is_fixed else -(-num_tokens // self._block_size)


def places_of(config: SchedulerConfig) -> tuple[GroupPlaces, ...]:
    """Make the arithmetic of each group of a loaded model."""
    sizes = {"block_size": config.block_size, "max_model_len": config.max_model_len}
    return places_by(config, config.groups, **sizes)


def places_by(
    options: SchedulerOptions, groups: tuple[CacheGroup, ...], *, block_size: int, max_model_len: int
) -> tuple[GroupPlaces, ...]:
    """Make the arithmetic of groups. What the options leave open is no limit."""
    # Of one prompt a step has no more than of all; drafts are fewer than that.
    most_of_prompts = max(options.max_prefill_tokens or maxsize, _LEAST_STEP_TOKENS)
    num_step_tokens = min(options.max_num_batched_tokens, most_of_prompts)
    sizes = {"block_size": block_size, "max_model_len": max_model_len, "num_step_tokens": num_step_tokens}
    return tuple(GroupPlaces(group, **sizes) for group in groups)


def main_group(groups: tuple[GroupPlaces, ...]) -> int:
    """Group that keeps most."""
    return min(range(len(groups)), key=lambda index: (groups[index].is_fixed, groups[index].is_limited))


def most_blocks(groups: tuple[GroupPlaces, ...], num_tokens: int) -> int:
    """Most blocks that a sequence of `num_tokens` ever holds at once."""
    return sum([group.end(num_tokens, 0) * group.num_stripes for group in groups])
