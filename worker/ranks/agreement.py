"""Agreement of ranks on numbers and texts, over whatever exchanges their numbers.

Owns: what follows from the numbers of all ranks, and the error where they differ.
Never: exchanges (shared_ranks.py, device_ranks.py).
"""

import hashlib

from torch import Tensor

from worker.ranks.ranks import World
from worker.worker_errors import StartupError


class Agreement:
    """The part of Ranks that is made of `of_all`, of a stage's ranks and of the world's."""

    _world: World

    def broadcast(self, numbers: list[int]) -> list[int]:
        """See Ranks."""
        return [int(number) for number in self.of_all(numbers)[0]]

    def agree_min(self, number: int) -> int:
        """See Ranks."""
        return int(self._world.of_all([number]).min())

    def all_have(self, text: str) -> bool:
        """See Ranks."""
        numbers_S = self._digests(text)
        return bool((numbers_S == numbers_S[0]).all())

    def check_same(self, what: str, text: str) -> None:
        """See Ranks."""
        numbers_S = self._digests(text)
        others = [rank for rank in range(len(numbers_S)) if numbers_S[rank] != numbers_S[0]]
        if others:
            raise StartupError(
                f"ranks 0 and {others[0]} differ in {what}; on rank {self._world.rank} it is: {text}",
                fix="start again, with nothing changed meanwhile: all ranks must have the same",
            )

    def of_all(self, numbers: list[int]) -> Tensor:
        """See World."""
        raise NotImplementedError

    def _digests(self, text: str) -> Tensor:
        digest = hashlib.sha256(text.encode()).digest()[:7]  # a positive number of 64 bits
        return self._world.of_all([int.from_bytes(digest, "big")]).reshape(-1)
