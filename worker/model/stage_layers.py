"""The part of a model that one stage of a pipeline computes.

Owns: modules in the place of what other stages have, and the hidden states that come to the first layer of a
stage and leave behind its last.

Families scale their embeddings, or add to them, before the first layer. So all of that runs on each stage, on
zeros, and the first layer of its own takes what came instead.

Shapes: T tokens, H numbers of a hidden state, V tokens of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.probe_attention import ProbeAttention
from worker.model.layer_parts import find_layers
from worker.model.quantized_layers import QuantizedEmbedding
from worker.ranks.stage import HiddenReceiver, HiddenSender, Stage


@contextmanager
def noting_layers(model: nn.Module, probe: ProbeAttention) -> Iterator[None]:
    """Let a probe learn which layers keep something under several numbers: a stage has all of them."""
    known: set[int] = set()

    def behind(*_: Any) -> None:
        own = sorted({*probe.shapes, *probe.states.shapes} - known)
        known.update(own)
        if len(own) > 1:
            probe.together.append(tuple(own))

    hooks = [layer.register_forward_hook(behind) for layer in find_layers(model).values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class PassedLayer(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return [1, T, H] as it came."""
        return hidden_states


class EdgeLayer(nn.Module):
    """The first or the last layer of a stage, or both."""

    def __init__(self, layer: nn.Module, inlet: HiddenReceiver | None, outlet: HiddenSender | None) -> None:
        super().__init__()
        self.layer = layer
        self._inlet, self._outlet = inlet, outlet

    def forward(self, hidden_states: Tensor, *arguments: Any, **others: Any) -> Tensor:
        """Compute [1, T, H] from what came from the stage before; send it on."""
        hidden_states = hidden_states.contiguous()
        if self._inlet is not None:
            self._inlet.receive(hidden_states)
        computed: Tensor = self.layer(hidden_states, *arguments, **others)
        if self._outlet is not None:
            self._outlet.send(computed.contiguous())
        return computed


class _NoEmbedding(nn.Module):
    weight = None

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden_size, self._dtype = hidden_size, dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return zeros [..., H]."""
        shape = (*token_ids.shape, self._hidden_size)
        return torch.zeros(shape, dtype=self._dtype, device=token_ids.device)


class _NoOutput(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros [..., V]."""
        return x.new_zeros((*x.shape[:-1], self._vocab_size))


def drop_ends(model: Any, stage: Stage) -> None:
    """Remove the embedding and the output layer, where they are other stages'."""
    embedding = model.get_input_embeddings()
    if not stage.is_last:
        model.set_output_embeddings(_NoOutput(model.get_output_embeddings().out_features))
    if stage.index:
        is_codes = isinstance(embedding, QuantizedEmbedding)
        dtype = embedding.dtype if is_codes else embedding.weight.dtype
        model.set_input_embeddings(_NoEmbedding(embedding.embedding_dim, dtype))


def places_before(model: nn.Module) -> dict[str, str]:
    """Find where each module is that this stage has, by the name that it had before layers were replaced."""
    edges = [f"{name}.layer" for name, module in model.named_modules() if isinstance(module, EdgeLayer)]
    places = {}
    for name, module in model.named_modules():
        edge = next((edge for edge in edges if f"{name}.".startswith(f"{edge}.")), None)
        before = name if edge is None else edge.removesuffix(".layer") + name.removeprefix(edge)
        if not isinstance(module, EdgeLayer | PassedLayer):
            places[before] = name
    return places
