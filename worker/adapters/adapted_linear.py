"""Adapters of a step in plain torch: the adapter of each token, and linear layers that add its updates.

Owns: the slots of the tokens of the step under way, and the product of every linear layer that no kernel
computes; it defines the right results.

Shapes: T tokens, R ranks, N outputs and K inputs of a layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.adapters.files import LowRank
from worker.attention.latents import LatentExpansion
from worker.model.linear import CUT
from worker.worker_errors import WorkerError

NO_SLOT = -1
"""The slot of a token without an adapter."""


class SlotTokens(NamedTuple):
    """The tokens of a step that have the adapter of one slot."""

    slot: int
    tokens: Tensor | None
    """Their places among the T; None: all."""


class StepAdapters:
    """The slot of each token of the step under way."""

    def __init__(self) -> None:
        self.groups: tuple[SlotTokens, ...] = ()
        """Empty: no token of the step has an adapter."""
        self.num_tokens = 0
        self.address = np.zeros(1, np.uint64)
        """Address of the slots [T], int32, for kernels; 0: no token has an adapter. It stays in its place."""
        self._slots_T: NDArray[np.int32] | None = None

    def begin_rows(self, slot_C: NDArray[np.int32], rows_T: NDArray[np.int64]) -> None:
        """Take the slot of each row of the worker, and the row of each token of a step."""
        self._begin(slot_C[rows_T])

    def _begin(self, slots_T: NDArray[np.int32]) -> None:
        found = np.unique(slots_T)
        found = found[found != NO_SLOT]
        self.num_tokens = len(slots_T)
        self._slots_T = np.ascontiguousarray(slots_T) if len(found) else None
        self.point_to(0)
        self.groups = tuple(
            SlotTokens(int(slot), torch.from_numpy(np.flatnonzero(slots_T == slot))) for slot in found
        )

    def begin_some(self, whole: "StepAdapters", places: Tensor) -> None:
        """Take the slots of a step for kernels that are given its tokens in another order; see `point_to`."""
        slots_T = whole._slots_T
        self._slots_T = None if slots_T is None else np.ascontiguousarray(slots_T[places.numpy()])
        self.point_to(0)

    @property
    def has_slots(self) -> bool:
        """Whether kernels are given slots: a token has an adapter, and others may have none."""
        return self._slots_T is not None

    def point_to(self, first: int) -> None:
        """Let kernels begin with this place."""
        self.address[0] = 0 if self._slots_T is None else self._slots_T[first:].ctypes.data

    def begin_alone(self, slot: int) -> None:
        """Take one slot for all tokens, however many there are."""
        self._slots_T = None
        self.address[0] = 0
        self.groups = () if slot == NO_SLOT else (SlotTokens(slot, None),)


class AdaptablePart(Protocol):
    """A part of the model that computes with updates of its modules."""

    def adapted_names(self) -> tuple[str, ...]:
        """Name the modules, as they were called before layers were replaced."""

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        """Take the updates of an adapter, as far as they are of its modules."""

    def clear(self, slot: int) -> None:
        """Give the updates of a slot up."""


class WrappedModule(nn.Module):
    """A module in the place of another one, which it calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return what the other one has: some models ask a layer for its weight's dtype."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class AdaptedLinear(WrappedModule):
    """A linear layer with updates. See AdaptablePart."""

    def __init__(self, name: str, inner: nn.Module, step: StepAdapters) -> None:
        super().__init__(inner)
        self.name = name
        self._step = step
        self._updates: dict[int, LowRank] = {}

    def adapted_names(self) -> tuple[str, ...]:
        return (self.name,)

    def put(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        if self.name in updates:
            update, cut = updates[self.name], getattr(self.inner, CUT, None)
            self._updates[slot] = update if cut is None else update.part(cut)

    def clear(self, slot: int) -> None:
        self._updates.pop(slot, None)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] to [..., N]."""
        product: Tensor = self.inner(x)
        for slot, tokens in self._step.groups:
            update = self._updates.get(slot)
            if update is None:
                continue
            if tokens is None:
                product = product + update.multiply(x).to(product.dtype)
                continue
            rows, sums = x.reshape(-1, x.shape[-1]), product.reshape(-1, product.shape[-1])
            if len(rows) != self._step.num_tokens:
                raise WorkerError(f"{self.name} is given {len(rows)} of {self._step.num_tokens} tokens")
            sums[tokens] += update.multiply(rows[tokens]).to(sums.dtype)
            product = sums.view(product.shape)
        return product


class AdaptedExpansion(AdaptedLinear):
    """The product that expands latents, with updates of both its parts. See AdaptablePart, LatentExpansion.

    An update is a product in two steps in either direction.
    """

    inner: LatentExpansion

    def absorb(self, queries_HTD: Tensor) -> Tensor:
        latent_dim, key_dim, _ = self.inner.sizes
        absorbed_HTD = self.inner.absorb(queries_HTD)
        for tokens, update in self._updates_of(queries_HTD.shape[1]):
            up_HDR, _ = self.inner.split(update.up_NR.to(queries_HTD.dtype))
            ranks_HXR = queries_HTD[:, tokens, :key_dim] @ up_HDR
            added_HXL = ranks_HXR @ update.down_RK.to(ranks_HXR.dtype) * update.scale
            absorbed_HTD[:, tokens, :latent_dim] += added_HXL
        return absorbed_HTD

    def expand(self, sums_THL: Tensor) -> Tensor:
        values_THV = self.inner.expand(sums_THL).contiguous()
        for tokens, update in self._updates_of(len(sums_THL)):
            _, up_HVR = self.inner.split(update.up_NR.to(sums_THL.dtype))
            ranks_HXR = sums_THL[tokens].transpose(0, 1) @ update.down_RK.to(sums_THL.dtype).t()
            values_THV[tokens] += (ranks_HXR @ up_HVR.transpose(1, 2) * update.scale).transpose(0, 1)
        return values_THV

    def _updates_of(self, num_tokens: int) -> Iterator[tuple[Tensor, LowRank]]:
        """Find the places of tokens with an adapter of this layer."""
        for slot, tokens in self._step.groups:
            if slot in self._updates:
                yield torch.arange(num_tokens) if tokens is None else tokens, self._updates[slot]


def adapt_linear(name: str, module: nn.Module, step: StepAdapters, _num_slots: int) -> AdaptedLinear:
    """Put a module with updates around a linear layer."""
    adapted = AdaptedExpansion if isinstance(module, LatentExpansion) else AdaptedLinear
    return adapted(name, module, step)
