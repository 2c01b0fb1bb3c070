"""Places for work that no client waits for: batches, and responses in the background.

Owns: how much of it is under way at once, the order in which owners have a place, and their rests.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MIN_REST_S, MAX_REST_S = 1.0, 60.0


class FairPlaces:
    """Places of one event loop.

    The next goes to the owner with the fewest, of equals to the one that has got none for longest.
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._held: Counter[str] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting work of each owner; an owner that has got a place goes to the end."""
        self._rests_until_s: dict[str, float] = {}

    def has_room(self, owner: str) -> bool:
        """Whether work of this owner that comes now has a place at once."""
        return not self._lines and owner not in self._rests_until_s and self._held.total() < self.num_places

    @asynccontextmanager
    async def held_by(self, owner: str) -> AsyncIterator[None]:
        """Hold a place, after the rest of its owner."""
        loop = asyncio.get_running_loop()
        while (rest_s := self._rests_until_s.get(owner, 0.0) - loop.time()) > 0:
            await asyncio.sleep(rest_s)
        self._rests_until_s.pop(owner, None)
        place: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(owner, deque()).append(place)
        self._hand_out()
        try:
            await place
            yield
        finally:
            if not place.cancel() and not place.cancelled():
                self._held[owner] -= 1
            self._hand_out()

    def rest(self, owner: str, seconds: float) -> None:
        """Begin none of the owner's work for some time, within the bounds. What is under way goes on."""
        until_s = asyncio.get_running_loop().time() + min(max(seconds, MIN_REST_S), MAX_REST_S)
        self._rests_until_s[owner] = max(until_s, self._rests_until_s.get(owner, 0.0))

    def _hand_out(self) -> None:
        while self._lines and self._held.total() < self.num_places:
            owner = min(self._lines, key=self._held.__getitem__)
            line = self._lines.pop(owner)
            place = line.popleft()
            if line:
                self._lines[owner] = line
            if not place.done():  # else its work was given up
                self._held[owner] += 1
                place.set_result(None)
        self._held += Counter()  # forgets owners with none
