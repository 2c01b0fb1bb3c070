"""One forward pass over a flattened batch.

Owns: the call of a transformers model, and the executor that its attention calls reach; the StepRunner
protocol, and the plain runner.
Never: builds the batch (step_inputs.py) or samples tokens (sampling/).
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.attention.interface import AttentionBackend, LayerExecutor, active
from worker.devices.device import Device
from worker.model.body import body_gives, body_name, whole_body_of
from worker.steps.step_inputs import StepInputs


class BodyOutputs:
    """Outputs of the model's body (all but its head) in one step: hidden states [1, T, H], mainly."""

    def __init__(self, input_ids_1T: Tensor, position_ids_1T: Tensor) -> None:
        self.input_ids_1T = input_ids_1T
        self.position_ids_1T = position_ids_1T
        self._outputs: Any = None

    def keep(self, _body: nn.Module, _arguments: Any, outputs: Any) -> None:
        """Keep the outputs: a forward hook."""
        self._outputs = outputs

    def only(self, indices_N: Tensor) -> Any:
        """Select the outputs of some tokens."""
        outputs = copy.copy(self._outputs)
        outputs.last_hidden_state = self._outputs.last_hidden_state[:, indices_N]
        return outputs


class _OutputLayer(nn.Module):
    """An output layer without a bias that can write its product to where it is to lie."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = layer.weight
        self.target_NV: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        target_NV = self.target_NV
        if target_NV is None or x.numel() != len(target_NV) * x.shape[-1]:
            return nn.functional.linear(x, self.weight)
        torch.mm(x.reshape(len(target_NV), -1), self.weight.t(), out=target_NV)
        return target_NV.view(*x.shape[:-1], -1)


class ModelRunner:
    """Caller of the model. Shapes: T tokens, N logits wanted, V tokens of the vocabulary."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self.rows_listener: Callable[[Tensor], None] | None = None
        """Is given the row of each token before a step on a GPU, where layers need them."""
        parameters = inspect.signature(model.forward).parameters
        self._can_choose_logits = "logits_to_keep" in parameters

    def note_rows(self, rows_T: Tensor) -> None:
        """Take the rows of the tokens of the next step."""
        if self.rows_listener is not None:
            self.rows_listener(rows_T)

    @contextmanager
    def logits_into(self, target_NV: Tensor) -> Iterator[None]:
        """Let the output layer write to `target_NV`, where nothing stands between its product and logits.

        Else the logits lie elsewhere, and the caller copies them.
        """
        layer = self._model.get_output_embeddings()
        if type(layer) is nn.Linear and layer.bias is None and layer.out_features == target_NV.shape[1]:
            layer = _OutputLayer(layer)
            self._model.set_output_embeddings(layer)
        if not isinstance(layer, _OutputLayer):
            yield
            return
        layer.target_NV = target_NV
        try:
            yield
        finally:
            layer.target_NV = None

    @torch.inference_mode()
    def forward(
        self, input_ids_1T: Tensor, position_ids_1T: Tensor, logits_indices_N: Tensor, executor: LayerExecutor
    ) -> Tensor:
        """Run the model, its attention calls executed by `executor`; returns logits [N, V].

        Indices ascend, without repeats, so that as many as there are tokens are all of them in their order.
        Where a whole body has a plain head, the model's own forward is not called, and no hooks of it run:
        it takes as long as two layers of a small model.
        """
        arguments: dict[str, Any] = {"use_cache": False, "return_dict": True}
        # The output layer is the largest product of a step: only wanted tokens go through it.
        if self._can_choose_logits:
            arguments["logits_to_keep"] = logits_indices_N
        with active(executor):
            body = whole_body_of(self._model)
            if body is not None and body.plain_head:
                outputs = body(input_ids=input_ids_1T, position_ids=position_ids_1T)
                return self._logits(outputs.hidden_TH, body.plain_head[0], logits_indices_N)
            logits_1NV = self._model(input_ids=input_ids_1T, position_ids=position_ids_1T, **arguments).logits
        logits_NV: Tensor = logits_1NV[0] if self._can_choose_logits else logits_1NV[0, logits_indices_N]
        return logits_NV[:, : self._vocab_size]

    def _logits(self, hidden_TH: Tensor, head: nn.Module, logits_indices_N: Tensor) -> Tensor:
        """Compute logits [N, V] of the hidden states by the output layer alone; see `forward`."""
        if logits_indices_N.shape != hidden_TH.shape[:1]:
            hidden_TH = hidden_TH[logits_indices_N]
        logits_NV: Tensor = head(hidden_TH)
        return logits_NV if logits_NV.shape[1] == self._vocab_size else logits_NV[:, : self._vocab_size]

    @torch.inference_mode()
    def forward_alone(self, input_ids_1T: Tensor) -> Tensor:
        """Run the model by itself, with the attention that it is set to; returns logits [T, V]."""
        logits_1TV: Tensor = self._model(input_ids=input_ids_1T, use_cache=False).logits
        return logits_1TV[0, :, : self._vocab_size]

    def forward_keeping_body(
        self, input_ids_1T: Tensor, position_ids_1T: Tensor, logits_indices_N: Tensor, executor: LayerExecutor
    ) -> tuple[Tensor, BodyOutputs]:
        """Run `forward` and keep the body's outputs, from which `head` computes logits of further tokens."""
        body = BodyOutputs(input_ids_1T, position_ids_1T)
        hook = self._model.get_submodule(body_name(self._model)).register_forward_hook(body.keep)
        try:
            return self.forward(input_ids_1T, position_ids_1T, logits_indices_N, executor), body
        finally:
            hook.remove()

    @torch.inference_mode()
    def head(self, body: BodyOutputs, indices_N: Tensor) -> Tensor:
        """Compute logits [N, V] of any tokens of the last step from its body's outputs.

        The model's own forward computes them, because several families scale or cap their logits after the
        output layer.
        """
        with body_gives(self._model, body.only(indices_N)):
            logits_1NV: Tensor = self._model(
                input_ids=body.input_ids_1T[:, indices_N],
                position_ids=body.position_ids_1T[:, indices_N],
                use_cache=False,
                return_dict=True,
            ).logits
        return logits_1NV[0, :, : self._vocab_size]


class StageRunner(ModelRunner):
    """Caller of a stage that is not the last: it computes no logits, and returns zeros."""

    def forward(
        self, input_ids_1T: Tensor, position_ids_1T: Tensor, logits_indices_N: Tensor, executor: LayerExecutor
    ) -> Tensor:
        """See ModelRunner."""
        super().forward(input_ids_1T, position_ids_1T, logits_indices_N[:0], executor)
        return no_logits(len(logits_indices_N), self._vocab_size, input_ids_1T.device)


def no_logits(num_lines: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return zeros that take the memory of one, where the logits are another stage's."""
    return torch.zeros((), device=device).expand(num_lines, vocab_size)


class StepRunner(Protocol):
    """Computation of steps, one after another."""

    def compute(self, inputs: StepInputs) -> Tensor:
        """Compute the logits [N, V] of the tokens that sample; valid until the next step is computed."""

    def compute_keeping_body(self, inputs: StepInputs) -> tuple[Tensor, BodyOutputs]:
        """Run `compute` and keep the body's outputs, from which `head` computes further logits."""

    def head(self, body: BodyOutputs, indices_S: NDArray[np.int64]) -> Tensor:
        """Compute logits [S, V] of any tokens of the step that was computed last."""

    def remember(self, token_ids_N: Tensor) -> None:
        """Keep the tokens sampled from the last step, for a next step that was built without them."""

    def describe(self) -> str:
        """See Steps.describe."""


class EagerSteps:
    """StepRunner that calls the model for each step, with all tokens known on the host."""

    def __init__(self, runner: ModelRunner, backend: AttentionBackend, device: Device) -> None:
        self._runner, self._backend, self._device = runner, backend, device

    def compute(self, inputs: StepInputs) -> Tensor:
        """See StepRunner."""
        self._backend.begin_step(inputs.metadata)
        return self._runner.forward(*self._tensors(inputs), self._backend)

    def compute_keeping_body(self, inputs: StepInputs) -> tuple[Tensor, BodyOutputs]:
        """See StepRunner."""
        self._backend.begin_step(inputs.metadata)
        return self._runner.forward_keeping_body(*self._tensors(inputs), self._backend)

    def head(self, body: BodyOutputs, indices_S: NDArray[np.int64]) -> Tensor:
        """See StepRunner."""
        return self._runner.head(body, self._device.tensor(indices_S))

    def remember(self, token_ids_N: Tensor) -> None:
        """Do nothing: the host reads every token before it builds the next step."""

    def describe(self) -> str:
        """See StepRunner."""
        return ""

    def _tensors(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self._device.tensor(inputs.input_ids_T[None]),
            self._device.tensor(inputs.position_ids_T[None]),
            self._device.tensor(inputs.logits_indices_N),
        )
