"""Host memory for the blocks of sequences that had to leave the device.

Owns: which host blocks are free.
Never: contents; the plan's copies move those.
"""

from scheduler.messages import BlockId


class SwapSpace:
    """Host blocks 1 to num_blocks, each held by one sequence or by none.

    A plan copies out before it copies in. So a host block whose content is copied in by a plan may be
    filled again by the next plan at the earliest: it is given back `later`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(block) for block in range(num_blocks, 0, -1)]
        self._free_later: list[BlockId] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._free_later)

    def take(self, num_blocks: int) -> list[BlockId]:
        """The caller makes sure that so many are free."""
        assert num_blocks <= len(self._free)
        return [self._free.pop() for _ in range(num_blocks)]

    def give_back(self, blocks: list[BlockId]) -> None:
        self._free.extend(blocks)

    def give_back_later(self, blocks: list[BlockId]) -> None:
        self._free_later.extend(blocks)

    def next_plan(self) -> None:
        """What the last plan copied in is no longer needed here."""
        if self._free_later:
            self._free.extend(self._free_later)
            self._free_later.clear()

    def free_blocks(self) -> list[BlockId]:
        """Also those given back `later`; for tests and invariants."""
        return self._free + self._free_later
