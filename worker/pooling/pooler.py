"""Vectors from hidden states, and scores from the outputs of a head.

Owns: pooling, dense layers, normalization, activations; all in float32 for every dtype of the model.

Shapes: T tokens, N prompts, H hidden size, E size of the vectors.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from worker.checkpoint.pooling_files import DenseLayer, HeadActivation, PoolingMode, PoolingRecipe
from worker.worker_errors import StartupError

_ACTIVATIONS: dict[HeadActivation, Callable[[Tensor], Tensor]] = {
    HeadActivation.IDENTITY: lambda values: values,
    HeadActivation.TANH: torch.tanh,
    HeadActivation.SIGMOID: torch.sigmoid,
    HeadActivation.RELU: functional.relu,
    HeadActivation.GELU: functional.gelu,
}


class TokenSpan(NamedTuple):
    """Range of one prompt's tokens among T; for a prompt in chunks, of its last chunk."""

    start: int
    end: int


class Readout(Protocol):
    """Pooling of a step's hidden states to a vector for each prompt that ends in it."""

    num_dimensions: int

    def pool(self, hidden_TH: Tensor, spans: list[TokenSpan]) -> Tensor:
        """Pool to vectors [N, E], float32."""

    def cut(self, vector_E: Tensor, num_dimensions: int | None) -> Tensor:
        """Return the part of a vector that was asked for."""


class Pooler:
    """Pooling, dense layers and normalization behind a model without a head."""

    def __init__(self, recipe: PoolingRecipe, hidden_size: int, device: torch.device) -> None:
        """Read the dense layers. Raises StartupError if they do not follow each other."""
        self.mode = recipe.mode
        self.normalizes = recipe.normalizes
        self.num_dimensions = hidden_size
        self._dense: list[tuple[nn.Linear, Callable[[Tensor], Tensor]]] = []
        for layer in recipe.dense_layers:
            if layer.in_features != self.num_dimensions:
                raise StartupError(
                    f"the dense layer in {layer.folder} takes {layer.in_features} numbers, but gets "
                    f"{self.num_dimensions}",
                    fix="download the checkpoint again",
                )
            self._dense.append((_load_dense(layer).to(device), _ACTIVATIONS[layer.activation]))
            self.num_dimensions = layer.out_features

    @torch.inference_mode()
    def pool(self, hidden_TH: Tensor, spans: list[TokenSpan]) -> Tensor:
        """Pool one vector for each span, [N, E]. Every mode but LAST needs spans of whole prompts."""
        vectors_NE = self._pool(hidden_TH, spans).float()
        for linear, activation in self._dense:
            vectors_NE = activation(linear(vectors_NE))
        return self.normalize(vectors_NE)

    def cut(self, vector_E: Tensor, num_dimensions: int | None) -> Tensor:
        """Return the first `num_dimensions` numbers, normalized again if the whole vector is."""
        return vector_E if num_dimensions is None else self.normalize(vector_E[:num_dimensions])

    def normalize(self, vectors: Tensor) -> Tensor:
        """Scale to length 1 along the last dimension, if the checkpoint's vectors have it."""
        return functional.normalize(vectors, dim=-1) if self.normalizes else vectors

    def _pool(self, hidden_TH: Tensor, spans: list[TokenSpan]) -> Tensor:
        match self.mode:
            case PoolingMode.CLS:
                return hidden_TH[[span.start for span in spans]]
            case PoolingMode.LAST:
                return hidden_TH[[span.end - 1 for span in spans]]
            case PoolingMode.MEAN:
                means = [hidden_TH[span.start : span.end].float().mean(dim=0) for span in spans]
                return torch.stack(means)
            case PoolingMode.MAX:
                return torch.stack([hidden_TH[span.start : span.end].amax(dim=0) for span in spans])


class Scores:
    """Activation behind a classification head with one output."""

    num_dimensions = 1

    def __init__(self, activation: HeadActivation) -> None:
        self._activation = _ACTIVATIONS[activation]

    def score(self, logits_N1: Tensor) -> Tensor:
        """Compute scores [N, 1]."""
        return self._activation(logits_N1.float())

    def cut(self, vector_E: Tensor, num_dimensions: int | None) -> Tensor:  # noqa: ARG002 - as Pooler's
        """Return the score, which has nothing to cut."""
        return vector_E


class LastTokenScores(Scores):
    """Linear head on the last hidden state, as in transformers' decoders for sequence classification."""

    def __init__(self, activation: HeadActivation, head: nn.Module) -> None:
        super().__init__(activation)
        self._head = head

    @torch.inference_mode()
    def pool(self, hidden_TH: Tensor, spans: list[TokenSpan]) -> Tensor:
        """Compute one score for each span, [N, 1]."""
        return self.score(self._head(hidden_TH[[span.end - 1 for span in spans]]))


def _load_dense(layer: DenseLayer) -> nn.Linear:
    path = layer.folder / "model.safetensors"
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.has_bias, dtype=torch.float32)
    try:
        weights = load_file(path)
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise StartupError(
            f"the dense layer in {path} cannot be read: {reason}",
            fix="take a checkpoint whose dense layers are safetensors (others can run code)",
        ) from error
    return linear.requires_grad_(requires_grad=False)
