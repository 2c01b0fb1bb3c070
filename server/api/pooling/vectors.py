"""Vectors of a model that pools, and how alike they are.

Owns: float32 of what the engine gave. It is imported by the first request that needs it: numpy takes as long
as a tenth of a server's start, and a server of a model that generates does without.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def vectors_of(outputs: Sequence[bytes]) -> list[NDArray[np.float32]]:
    return [np.frombuffer(output, dtype="<f4").astype(np.float32, copy=False) for output in outputs]


def rows_of(outputs: Sequence[bytes]) -> Rows:
    """One vector in each row."""
    return np.stack(vectors_of(outputs))


def cosines(left_NE: Rows, right_ME: Rows) -> Rows:
    """Cosines [M] of pairs of rows; N is 1 or M. The cosine of a vector of zeros is 0."""
    lengths = np.linalg.norm(left_NE, axis=1) * np.linalg.norm(right_ME, axis=1)
    products = (left_NE * right_ME).sum(axis=1)
    alike: Rows = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return alike
