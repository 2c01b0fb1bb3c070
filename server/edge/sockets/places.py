"""Places of connections: their number, and the connection that loses its place to a new one.

Owns: the number of sockets, from the moment they are accepted, a TLS handshake included.

A connection is quiet while no request is under way on it. When all places are taken, the connection that has
been quiet for longest gives way: silent clients, however many, do not hold up requests.
"""

import time
from collections.abc import Callable

MAX_CONNECTIONS = 4096
RESERVED_PLACES = 64
"""Places beyond the limit, from which probes are answered and other requests are refused with a reason."""
QUIET_S = 1.0
"""Time that a quiet connection has for itself. Only a newcomer beyond the reserve does not grant it."""


class Place:
    def __init__(self, places: "Places", *, is_reserved: bool) -> None:
        self._places = places
        self.is_reserved = is_reserved
        self.give_way: Callable[[], None] | None = None
        """Ends the connection; set by the present owner of the socket."""

    def quiet(self) -> None:
        """Note that no request is under way."""
        self._places.note_quiet(self)

    def busy(self) -> None:
        """Note that a request is under way."""
        self._places.note_busy(self)

    def leave(self) -> None:
        """Give the place back. May be called twice."""
        self.give_way = None  # its owner refers to it: a cycle would keep both until a full collection
        self._places.take_back(self)


class Places:
    def __init__(self, max_connections: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max = max_connections
        self._clock = clock
        self._taken: set[Place] = set()
        self._quiet_since: dict[Place, float] = {}
        """In order of their times."""

    def take(self) -> Place | None:
        """Take a place for a socket that was just accepted; None if all are taken by requests under way."""
        if len(self._taken) >= self._max:
            is_last = len(self._taken) >= self._max + RESERVED_PLACES
            if not self.shed(quiet_s=0.0 if is_last else QUIET_S) and is_last:
                return None
        place = Place(self, is_reserved=len(self._taken) >= self._max)
        self._taken.add(place)
        place.quiet()
        return place

    def shed(self, *, quiet_s: float = 0.0) -> bool:
        """End the connection that has been quiet for longest, if that is `quiet_s` at least."""
        place, since_s = next(iter(self._quiet_since.items()), (None, 0.0))
        if place is None or self._clock() - since_s < quiet_s:
            return False
        give_way = place.give_way
        place.leave()
        if give_way is not None:
            give_way()
        return True

    def note_quiet(self, place: Place) -> None:
        if place in self._taken:
            self._quiet_since.setdefault(place, self._clock())

    def note_busy(self, place: Place) -> None:
        self._quiet_since.pop(place, None)

    def take_back(self, place: Place) -> None:
        self._taken.discard(place)
        self._quiet_since.pop(place, None)
