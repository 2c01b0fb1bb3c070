"""Positions of the tokens of a prompt with pictures, where a rotation takes time, row and column apart.

Owns: the rule: a picture's places have the position at which it begins, plus their row and column; what
follows goes on behind the largest of these.

Shapes: L tokens up to the end of the last picture, T tokens of a step.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.input_messages import EncoderInput


class PromptPositions:
    """Positions of one sequence."""

    def __init__(self, inputs: Sequence[EncoderInput], grids: Sequence[tuple[int, int, int]]) -> None:
        """Take in the pictures in their order, each with its frames, rows and columns of places."""
        parts, end, following = [], 0, 0
        for item, grid in zip(inputs, grids, strict=True):
            num_before = item.offset - end
            parts.append(np.broadcast_to(np.arange(following, following + num_before), (3, num_before)))
            following += num_before
            parts.append(following + np.indices(grid).reshape(3, -1))
            following += max(grid)
            end = item.end
        self._positions_3L = np.concatenate(parts, axis=1)
        self.end = end
        """Position of the sequence from which on all are `delta` further."""
        self.delta = following - end

    def between(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the positions [3, T] of the tokens from `start` to `end`."""
        rest = np.arange(max(start, self.end), max(end, self.end)) + self.delta
        known_3T = self._positions_3L[:, start:end]
        return np.concatenate([known_3T, np.broadcast_to(rest, (3, len(rest)))], axis=1)
