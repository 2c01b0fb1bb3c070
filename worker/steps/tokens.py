"""Input and output of one forward pass of a model, on its device.

Shapes: T tokens, N tokens whose outputs are wanted, H numbers of a hidden state, V tokens of the vocabulary.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.devices.device import Device

_LAYER_EMBEDS = "per_layer_inputs"


class StepTokens(NamedTuple):
    """Tokens to compute, side by side."""

    input_ids_1T: Tensor
    """int64"""
    position_ids: Tensor
    """int64: [1, T], or [3, 1, T] where a rotation takes time, row and column apart."""
    logits_indices_N: Tensor
    """int64, ascending, without repeats: as many as there are tokens are all of them in their order."""
    embeds_1TH: Tensor | None = None
    """Rows in the place of the embeddings of all ids; None: the model looks the ids up."""
    layer_embeds: Tensor | None = None
    """Numbers [1, T, layers, N] that layers look up for each id; None where `embeds_1TH` is, and of families
    whose layers look nothing up."""
    keeps_hidden: bool = False
    """Whether the hidden states of all tokens are asked for."""
    by_layers: bool = False
    """Whether each layer is called by itself: rows are added behind some."""

    @classmethod
    def of(
        cls,
        device: Device,
        input_ids_T: NDArray[np.int64],
        position_ids: NDArray[np.int64],
        logits_indices_N: NDArray[np.int64],
    ) -> "StepTokens":
        """Bring tokens to a device; their positions are [T] or [3, T]."""
        return cls(
            device.tensor(input_ids_T[None]),
            device.tensor(position_ids[..., None, :]),
            device.tensor(logits_indices_N),
        )

    @property
    def arguments(self) -> dict[str, Tensor]:
        """Arguments of transformers' models and of their bodies."""
        if self.embeds_1TH is not None:
            arguments = {"inputs_embeds": self.embeds_1TH, "position_ids": self.position_ids}
            return arguments if self.layer_embeds is None else {**arguments, _LAYER_EMBEDS: self.layer_embeds}
        return {"input_ids": self.input_ids_1T, "position_ids": self.position_ids}

    def only(self, indices_S: Tensor) -> "StepTokens":
        """Select some tokens, by their places among T."""
        return self._replace(
            input_ids_1T=self.input_ids_1T[:, indices_S],
            position_ids=self.position_ids[..., indices_S],
            embeds_1TH=None if self.embeds_1TH is None else self.embeds_1TH[:, indices_S],
            layer_embeds=None if self.layer_embeds is None else self.layer_embeds[:, indices_S],
        )


class PlacedRows(NamedTuple):
    """Rows of pictures among the tokens of a step. P places, in ascending order."""

    places_P: NDArray[np.int64]
    embeds_PH: Tensor
    """Rows in the place of embeddings."""
    deep: tuple[Tensor, ...]
    """Rows [P, H] to be added behind the first layers, one for each."""


class HiddenStates(NamedTuple):
    """Hidden states of all tokens of a step, as the model's body (all but its head) gave them."""

    tokens: StepTokens
    outputs: Any
    """Output of transformers' body."""

    @property
    def hidden_TH(self) -> Tensor:
        """The states themselves, behind the last norm."""
        hidden_1TH: Tensor = self.outputs.last_hidden_state
        return hidden_1TH[0]

    @property
    def tapped_TH(self) -> Tensor:
        """The states before some layers, joined. Raises AttributeError where they were not kept."""
        return torch.cat(self.outputs.tapped, -1)

    def only(self, indices_S: Tensor) -> "HiddenStates":
        """Select the tokens at `indices_S`, in this order."""
        outputs = copy.copy(self.outputs)
        outputs.last_hidden_state = self.outputs.last_hidden_state[:, indices_S]
        return HiddenStates(self.tokens.only(indices_S), outputs)


class StepOutcome(NamedTuple):
    """Result of a forward pass."""

    logits_NV: Tensor
    """Logits of the wanted tokens; of a model that pools, their hidden states [N, H]."""
    hidden: HiddenStates | None = None
    """Set if they were asked for."""
