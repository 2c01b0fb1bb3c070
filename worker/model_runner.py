"""One forward pass over a flattened batch.

Owns: how a transformers model is called, and which executor its attention calls reach.
Never: builds the batch (inputs.py) or draws tokens (sampler.py).
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from worker.attention.interface import AttentionBackend, LayerExecutor, active
from worker.inputs import StepInputs


class ModelRunner:
    """Calls the model. Shapes: T tokens, N logits wanted, V tokens of the vocabulary."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        parameters = inspect.signature(model.forward).parameters
        self._can_choose_logits = "logits_to_keep" in parameters

    def run(self, inputs: StepInputs, backend: AttentionBackend) -> Tensor:
        """Compute one step; returns logits [N, V]."""
        backend.begin_step(inputs.metadata)
        return self.forward(inputs.input_ids_1T, inputs.position_ids_1T, inputs.logits_indices_N, backend)

    @torch.inference_mode()
    def forward(
        self, input_ids_1T: Tensor, position_ids_1T: Tensor, logits_indices_N: Tensor, executor: LayerExecutor
    ) -> Tensor:
        """Run the model with its attention going to `executor`; returns logits [N, V]."""
        arguments: dict[str, Any] = {"use_cache": False, "return_dict": True}
        # The output layer is the largest product of a step: only wanted tokens go through it.
        if self._can_choose_logits:
            arguments["logits_to_keep"] = logits_indices_N
        with active(executor):
            logits_1NV = self._model(input_ids=input_ids_1T, position_ids=position_ids_1T, **arguments).logits
        logits_NV: Tensor = logits_1NV[0] if self._can_choose_logits else logits_1NV[0, logits_indices_N]
        return logits_NV[:, : self._vocab_size]
