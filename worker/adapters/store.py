"""The adapters in memory: places for a few, taken by those that running sequences use.

Owns: the identity of an adapter, which is its name and its content, the slot of each one in memory, and which
of them goes when another one needs its slot: the one that was used least recently, of those that no row uses.
"""

import logging
from collections import Counter, OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from worker.adapters.adapted_linear import NO_SLOT, AdaptablePart, StepAdapters
from worker.adapters.files import LowRank
from worker.adapters.targets import AdapterContent, Targets
from worker.attention.interface import note_layer_begun
from worker.ranks.ranks import ALONE, Ranks
from worker.worker_config import AdapterFacts, AdapterLimits
from worker.worker_errors import AdapterRefused, SequenceRefused

log = logging.getLogger(__name__)


class AdaptableModel(NamedTuple):
    """A model whose layers can compute updates."""

    targets: Targets
    parts: tuple[AdaptablePart, ...]
    """The parts that compute them; on several ranks, those of this one."""
    step: StepAdapters
    dtype: torch.dtype
    """Numbers that adapters are kept in."""


class AdapterStore:
    """Slots of adapters, and the slot of each row. Not thread-safe."""

    def __init__(
        self, model: AdaptableModel, limits: AdapterLimits, *, max_num_seqs: int, ranks: Ranks = ALONE
    ) -> None:
        """Start without adapters. The stores of all ranks get the same calls between the same steps."""
        self._targets, self._parts, self._step, self._dtype = model
        self._limits, self._ranks = limits, ranks
        self._folders: dict[str, str] = {}
        """Folder of every adapter that may be asked for, by identity."""
        self._slots: OrderedDict[str, int] = OrderedDict()
        """Slot of each adapter in memory, the least recently used first."""
        self._free = list(range(limits.max_in_memory - 1, -1, -1))
        self._num_rows: Counter[int] = Counter()
        self._unwanted: set[str] = set()
        self._slot_C = np.full(max_num_seqs, NO_SLOT, np.int32)

    @property
    def resident(self) -> tuple[str, ...]:
        """Identities of the adapters in memory, the least recently used first."""
        return tuple(self._slots)

    def load(self, name: str, folder: str) -> AdapterFacts:
        """Read and check a folder and take it into memory, if there is room. Raises AdapterRefused."""
        digest, updates, is_of_tower = self._read(folder)
        facts = AdapterFacts(
            name=name,
            identity=f"{name}@{digest}",
            folder=folder,
            rank=max(update.rank for update in updates.values()),
            num_bytes=sum(each.nbytes for update in updates.values() for each in update[:2]),
            is_of_tower=is_of_tower,
        )
        self.introduce(facts.identity, folder)
        if facts.identity not in self._slots and self._has_room():
            self._put(facts.identity, updates)
        return facts

    def introduce(self, identity: str, folder: str) -> None:
        """Let sequences ask for an adapter, which is read when the first of them runs."""
        self._folders[identity] = folder
        self._unwanted.discard(identity)

    def forget(self, identity: str) -> None:
        """Give an adapter up, as soon as no row uses it: no sequence will ask for it again."""
        self._folders.pop(identity, None)
        if identity in self._slots:
            self._unwanted.add(identity)
            self._drop_unwanted()

    def seat(self, row: int, identity: str) -> None:
        """Give a row its adapter; empty: none. Raises SequenceRefused."""
        slot = self._slot_for(identity) if identity else NO_SLOT
        self._slot_C[row] = slot
        if slot != NO_SLOT:
            self._num_rows[slot] += 1

    def unseat(self, row: int) -> None:
        """Take a row's adapter back."""
        slot, self._slot_C[row] = int(self._slot_C[row]), NO_SLOT
        if slot != NO_SLOT:
            self._num_rows[slot] -= 1
            self._drop_unwanted()

    def begin_step(self, rows_T: NDArray[np.int64]) -> None:
        """Let the model compute with the adapters of these rows, one for each token."""
        self._step.begin_rows(self._slot_C, rows_T)

    def begin_alone(self, row: int) -> None:
        """Let the model compute with the adapter of one row."""
        self._step.begin_alone(int(self._slot_C[row]))

    def _slot_for(self, identity: str) -> int:
        if identity not in self._slots:
            folder = self._folders.get(identity)
            name, _, digest = identity.rpartition("@")
            if folder is None:
                raise SequenceRefused(f"adapter {name} is not loaded in this form any more")
            try:
                found, updates, _ = self._read(folder)
            except AdapterRefused as error:
                raise SequenceRefused(f"adapter {name} cannot be read again: {error}") from error
            if found != digest:
                raise SequenceRefused(
                    f"the files of adapter {name} changed after it was loaded: load it again"
                )
            if not self._has_room():
                raise SequenceRefused(f"there is no place in memory for adapter {name}")
            self._put(identity, updates)
        self._slots.move_to_end(identity)
        return self._slots[identity]

    def _read(self, folder: str) -> AdapterContent:
        """Read a folder, on all ranks the same or on none. Raises AdapterRefused."""
        try:
            content = self._read_here(folder)
        except AdapterRefused:
            self._ranks.all_have("")
            raise
        if not self._ranks.all_have(content.digest):
            raise AdapterRefused("not all ranks read the same files: were they changed just now?")
        return content

    def _read_here(self, folder: str) -> AdapterContent:
        content = self._targets.read(Path(folder), max_rank=self._limits.max_rank)
        updates = {
            name: LowRank(each.down_RK.to(self._dtype), each.up_NR.to(self._dtype), each.scale)
            for name, each in content.updates.items()
        }
        return content._replace(updates=updates)

    def _has_room(self) -> bool:
        return bool(self._free) or any(not self._num_rows[slot] for slot in self._slots.values())

    def _put(self, identity: str, updates: dict[str, LowRank]) -> None:
        if not self._free:
            self._drop(next(each for each, slot in self._slots.items() if not self._num_rows[slot]))
        slot = self._free.pop()
        for part in self._parts:
            part.put(slot, updates)
            note_layer_begun()  # a mixture has thousands: the process shall not look as if it hung
        self._slots[identity] = slot
        log.info("adapter %s is in memory", identity)

    def _drop(self, identity: str) -> None:
        slot = self._slots.pop(identity)
        for part in self._parts:
            part.clear(slot)
        self._free.append(slot)
        self._unwanted.discard(identity)

    def _drop_unwanted(self) -> None:
        for identity in [each for each in self._unwanted if not self._num_rows[self._slots[each]]]:
            self._drop(identity)
