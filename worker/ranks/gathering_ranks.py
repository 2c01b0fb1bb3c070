"""Agreement of ranks by gathering, in the same way over memory, links and devices.

Shapes: S ranks, T tokens, P numbers of one rank.
"""

import hashlib

import torch
from torch import Tensor

from worker.ranks.ranks import World
from worker.worker_errors import StartupError


class GatheringRanks:
    """Ranks that agree by gathering, which a subclass does."""

    rank: int
    size: int
    _world: World

    def gather(self, part_TP: Tensor) -> Tensor:
        num_rows, num_own = part_TP.shape
        whole = part_TP.new_empty((num_rows, self.size * num_own))
        self._gather(part_TP.contiguous(), whole)
        return whole

    def of_all(self, numbers: list[int]) -> Tensor:
        own = torch.tensor([numbers], dtype=torch.int64)
        found = own.new_empty((self.size, own.numel()))
        self._gather(own, found)
        return found

    def share(self, numbers: Tensor) -> None:
        numbers.copy_(self.of_all(numbers.tolist())[0])

    def broadcast(self, numbers: list[int]) -> list[int]:
        return [int(number) for number in self.of_all(numbers)[0]]

    def agree_min(self, number: int) -> int:
        return int(self._world.of_all([number]).min())

    def all_have(self, text: str) -> bool:
        numbers_S = self._digests(text)
        return bool((numbers_S == numbers_S[0]).all())

    def check_same(self, what: str, text: str) -> None:
        numbers_S = self._digests(text)
        others = [rank for rank in range(len(numbers_S)) if numbers_S[rank] != numbers_S[0]]
        if others:
            raise StartupError(
                f"ranks 0 and {others[0]} differ in {what}; on rank {self._world.rank} it is: {text}",
                fix="start again, with nothing changed meanwhile: all ranks must have the same",
            )

    def _digests(self, text: str) -> Tensor:
        digest = hashlib.sha256(text.encode()).digest()[:7]  # a positive number of 64 bits
        return self._world.of_all([int.from_bytes(digest, "big")]).reshape(-1)

    def _gather(self, own: Tensor, whole: Tensor) -> None:
        """Exchange rows; those of all ranks come to `whole`, side by side."""
        raise NotImplementedError
