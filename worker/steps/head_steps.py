"""Passes of a model's own draft head, and the hidden states that it reads, which lie in blocks of sequences.

    place of a row      0    1    2   ..   p   p+1
    model               h_0  h_1  h_2 ..   h_p  ?      last hidden states, kept by each step
    head                at place i: from h_i and token i + 1, a guess of token i + 2

Hidden states are one more layer of the blocks, as the keys and values of the head are: a preemption, a swap
or a cached prefix moves or keeps them, and the head may catch up at any time. So it costs nothing while no
draft pays. The key at the last place of a shared prefix is that of the token with which another sequence went
on: it may cost a draft.

Shapes: T tokens, N tokens that are sampled, H numbers of a hidden state, in `heads` parts of a KV layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.interface import AttentionBackend, AttentionMetadata
from worker.attention.kv_cache import LayerCache
from worker.devices.device import Device
from worker.ranks.ranks import Ranks
from worker.speculation.head_layer import DraftHead
from worker.steps.inputs import StepInputs
from worker.steps.model_runner import BodyRunner, EagerSteps, ModelRunner
from worker.steps.pictures import Pictures
from worker.steps.row_table import RowTable
from worker.steps.tokens import HiddenStates, StepOutcome, StepTokens


class KeptStates(ABC):
    """HiddenStatesKept at the places of a step. Each rank keeps its part of the numbers of a state."""

    def __init__(self, layer: LayerCache, head: DraftHead, ranks: Ranks) -> None:
        self._head, self._ranks = head, ranks
        self._layer_NHSD, self._stripe = layer.keys.blocks_NHSD, layer.stripe
        _, num_heads, self._block_size, dim = self._layer_NHSD.shape
        self._own = slice(ranks.rank * num_heads * dim, (ranks.rank + 1) * num_heads * dim)
        self._parts = num_heads, dim

    def states_of(self, hidden: HiddenStates) -> Tensor:
        return self._head.kept(hidden.tapped_TH if self._head.tapped else hidden.hidden_TH)

    def keep(
        self, blocks_ST: NDArray[np.int64], offsets_T: NDArray[np.int64], hidden_TH: Sequence[Tensor]
    ) -> None:
        states_TH = hidden_TH[0] if len(hidden_TH) == 1 else torch.cat(tuple(hidden_TH))
        self._put(blocks_ST[self._stripe], offsets_T, states_TH[:, self._own])

    def read(self, metadata: AttentionMetadata) -> Tensor:
        """Return the states [T, H] at the places of a step."""
        blocks_T, offsets_T = metadata.token_blocks_ST[self._stripe], metadata.token_offsets
        return self._ranks.gather(self._take(blocks_T, offsets_T))

    def put_behind(self, inputs: StepInputs, rows: RowTable, hidden_NH: Tensor) -> None:
        """Keep states one place behind the tokens that are sampled, for the next guess.

        Those of rows without a block there go to the padding.
        """
        rows_N = inputs.rows_T[inputs.logits_indices_N]
        places_N = inputs.position_ids_T[inputs.logits_indices_N] + 1
        has_place_N = places_N < rows.num_slots(rows_N)
        blocks_N = np.zeros_like(places_N)
        blocks_N[has_place_N] = rows.blocks_at(rows_N[has_place_N], places_N[has_place_N])[self._stripe]
        self._put(blocks_N, places_N % rows.block_size, hidden_NH[:, self._own])

    @abstractmethod
    def _put(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64], own_TP: Tensor) -> None:
        """Keep the rank's parts of states at these places."""

    @abstractmethod
    def _take(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64]) -> Tensor:
        """Return the rank's parts [T, P] at these places."""


class HostStates(KeptStates):
    """KeptStates in the host's memory."""

    def __init__(self, layer: LayerCache, head: DraftHead, ranks: Ranks) -> None:
        super().__init__(layer, head, ranks)
        self._dtype = self._layer_NHSD.dtype
        # As whole numbers, which numpy copies in a tenth of the time that an operation of torch takes.
        self._whole = {2: torch.int16, 4: torch.int32}[self._dtype.itemsize]
        self._states_NHSD = self._layer_NHSD.view(self._whole).numpy()

    def _put(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64], own_TP: Tensor) -> None:
        numbers_TP = own_TP.to(self._dtype).view(self._whole).numpy()
        self._states_NHSD[blocks_T, :, offsets_T] = numbers_TP.reshape(-1, *self._parts)

    def _take(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(self._states_NHSD[blocks_T, :, offsets_T]).flatten(1).view(self._dtype)


class DeviceStates(KeptStates):
    """KeptStates in a device's memory. Steps on the device keep states themselves, so that graphs do."""

    def __init__(self, layer: LayerCache, head: DraftHead, ranks: Ranks, device: Device) -> None:
        super().__init__(layer, head, ranks)
        self._device = device

    def keep_in_step(self, hidden: HiddenStates, slots_ST: Tensor) -> None:
        """Keep the states of a step whose keys go to these slots; those of padding go to block 0."""
        slots_T = slots_ST[self._stripe].clamp_min(0)
        self._write(slots_T // self._block_size, slots_T % self._block_size, self.states_of(hidden))

    def _put(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64], own_TP: Tensor) -> None:
        self._write(self._device.tensor(blocks_T), self._device.tensor(offsets_T), own_TP)

    def _take(self, blocks_T: NDArray[np.int64], offsets_T: NDArray[np.int64]) -> Tensor:
        places = self._device.tensor(blocks_T), self._device.tensor(offsets_T)
        return self._layer_NHSD[places[0], :, places[1]].flatten(1)

    def _write(self, blocks_T: Tensor, offsets_T: Tensor, own_TP: Tensor) -> None:
        states_THD = own_TP.to(self._layer_NHSD.dtype).view(-1, *self._parts)
        self._layer_NHSD[blocks_T, :, offsets_T] = states_THD


class HeadSteps(EagerSteps):
    """StepRunner of a head. Inputs have, at the place of each token, the token behind it."""

    def __init__(
        self,
        head: DraftHead,
        model: ModelRunner,
        backend: AttentionBackend,
        kept: KeptStates,
        rows: RowTable,
        device: Device,
    ) -> None:
        """Take in the runner of the model, whose output layer is the head's too."""
        super().__init__(model, backend, device)
        self._head = head
        self._body = BodyRunner(head.body, head.body)
        self._kept, self._rows = kept, rows
        self._pictures: Pictures | None = None

    def see(self, pictures: Pictures) -> None:
        """Read prompts with pictures from now on."""
        self._pictures = pictures

    @torch.inference_mode()
    def compute(self, inputs: StepInputs) -> StepOutcome:
        """Compute a pass; the states of what it samples are what the next pass reads."""
        self._backend.begin_step(inputs.metadata)
        seen = inputs if self._pictures is None else self._pictures.place_behind(inputs)
        tokens = StepTokens.of(self._device, inputs.input_ids_T, seen.position_ids_T, inputs.logits_indices_N)
        embeds_TH = self._head.body.get_input_embeddings()(tokens.input_ids_1T[0])
        if seen.placed is not None:
            places_P = self._device.tensor(seen.placed.places_P)
            embeds_TH = embeds_TH.index_copy(0, places_P, seen.placed.embeds_PH.to(embeds_TH.dtype))
        embeds_1TH = self._head.inputs(embeds_TH, self._kept.read(inputs.metadata))
        tokens = tokens._replace(embeds_1TH=embeds_1TH)
        hidden_NH = self._body.forward(tokens, self._backend).logits_NV
        self._kept.put_behind(inputs, self._rows, hidden_NH)
        logits_NV = self._head.logits(hidden_NH)
        if logits_NV is None:
            logits_NV = self._runner.logits(tokens.only(tokens.logits_indices_N), hidden_NH)
        return StepOutcome(logits_NV)

    def accept_drafts(self, num_right_R: Sequence[int]) -> None:
        """Do nothing: a head has no recurrent layers."""
