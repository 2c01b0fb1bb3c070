"""Search for the end of one text inside another.

Owns: the choice of the longest match.
Never: state; a search looks at the tokens themselves, so that there is no index to build, to bound or to
move.
Source: prompt lookup decoding (A. Saxena, 2023). One comparison of 8,000 tokens takes some microseconds, and
the few places that it leaves take less.
"""

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


def find_continuations(text: TokenIds, tail: TokenIds, *, least: int, most: int) -> NDArray[np.int64]:
    """Find the places of `text` that come right after the end of `tail`, in ascending order.

    The match is as long as any, up to `most` tokens; none if that is less than `least`. The end of the text
    may be a place.
    """
    none = np.empty(0, np.int64)
    if len(tail) < least:
        return none
    places = np.flatnonzero(text[least - 1 :] == tail[-1]) + least
    for length in range(2, min(most, len(tail)) + 1):
        longer = places[places >= length]
        longer = longer[text[longer - length] == tail[-length]]
        if not len(longer):
            return places if length > least else none
        places = longer
    return places
