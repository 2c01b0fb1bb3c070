"""One forward pass over a flattened batch.

Owns: the calls of a transformers model and of one without a head, and the executor that its attention calls
reach; the base of all StepRunners, and the plain one.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from worker.attention.interface import AttentionBackend, LayerExecutor, active
from worker.devices.device import Device
from worker.model.body import body_gives, body_name, tap_layers, whole_body_of
from worker.pictures.eyes import Eyes
from worker.steps.inputs import StepInputs
from worker.steps.tokens import HiddenStates, PlacedRows, StepOutcome, StepTokens


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
        self.model = model
        self._vocab_size = vocab_size
        self.rows_listener: Callable[[Tensor], None] | None = None
        """Is given the row of each token before a step on a GPU, where layers need them."""
        self.hidden_listener: Callable[[HiddenStates, Tensor], None] | None = None
        """Is given the hidden states of each step on a GPU, and the slots of its keys, for a head."""
        self.keeps_hidden = False
        """Whether the hidden states of all steps are wanted, as a head that drafts wants them."""
        self.eyes: Eyes | None = None
        """The tower of a model that reads pictures."""
        parameters = inspect.signature(model.forward).parameters
        self._can_choose_logits = "logits_to_keep" in parameters

    def keep_hidden(self, tapped: Sequence[int]) -> None:
        """Keep the hidden states of all steps, and those before some layers with them."""
        self.keeps_hidden = True
        tap_layers(self.model, tapped)

    def note_rows(self, rows_T: Tensor) -> None:
        """Take the rows of the tokens of the next step."""
        if self.rows_listener is not None:
            self.rows_listener(rows_T)

    def note_hidden(self, hidden: HiddenStates | None, slots_ST: Tensor) -> None:
        """Take the hidden states of the step that was computed last."""
        if self.hidden_listener is not None and hidden is not None:
            self.hidden_listener(hidden, slots_ST)

    @contextmanager
    def logits_into(self, target_NV: Tensor) -> Iterator[None]:
        """Let the output layer write to `target_NV`, where nothing stands between its product and logits.

        Otherwise the logits lie elsewhere, and the caller copies them.
        """
        layer = self.model.get_output_embeddings()
        if type(layer) is nn.Linear and layer.bias is None and layer.out_features == target_NV.shape[1]:
            layer = _OutputLayer(layer)
            self.model.set_output_embeddings(layer)
        if not isinstance(layer, _OutputLayer):
            yield
            return
        layer.target_NV = target_NV
        try:
            yield
        finally:
            layer.target_NV = None

    @torch.inference_mode()
    def forward(self, tokens: StepTokens, executor: LayerExecutor) -> StepOutcome:
        """Run the model, its attention calls executed by `executor`.

        Where a whole body has a plain head, the model's own forward is not called, and no hooks of it run:
        it takes as long as two layers of a small model.
        """
        whole_body = None if tokens.by_layers else whole_body_of(self.model)
        keeps_hidden = self.keeps_hidden or tokens.keeps_hidden
        if whole_body is not None and whole_body.plain_head:
            with active(executor):
                outputs = whole_body(**tokens.arguments)
                logits_NV = self._logits(outputs.hidden_TH, whole_body.plain_head[0], tokens.logits_indices_N)
            return StepOutcome(logits_NV, HiddenStates(tokens, outputs) if keeps_hidden else None)
        if not keeps_hidden:
            return StepOutcome(self._run(tokens, executor))
        kept: list[Any] = []
        body = self.model.get_submodule(body_name(self.model))
        hook = body.register_forward_hook(lambda _body, _given, outputs: kept.append(outputs))
        try:
            return StepOutcome(self._run(tokens, executor), HiddenStates(tokens, kept.pop()))
        finally:
            hook.remove()

    def forward_placed(
        self, tokens: StepTokens, placed: PlacedRows | None, executor: LayerExecutor
    ) -> StepOutcome:
        """Run the model as `forward` does, with the rows of pictures in their places."""
        if placed is None or self.eyes is None:
            return self.forward(tokens, executor)
        places_P = self.eyes.device.tensor(placed.places_P)
        tokens = tokens._replace(
            embeds_1TH=self.eyes.embeds(tokens.input_ids_1T, places_P, placed.embeds_PH),
            layer_embeds=self.eyes.layer_embeds(tokens.input_ids_1T, places_P),
            by_layers=bool(placed.deep),
        )
        with self.eyes.adding(places_P, placed.deep):
            return self.forward(tokens, executor)

    def _run(self, tokens: StepTokens, executor: LayerExecutor) -> Tensor:
        arguments: dict[str, Any] = {"use_cache": False, "return_dict": True}
        # The output layer is the largest product of a step: only wanted tokens go through it.
        if self._can_choose_logits:
            arguments["logits_to_keep"] = tokens.logits_indices_N
        with active(executor):
            logits_1NV = self.model(**tokens.arguments, **arguments).logits
        logits_NV: Tensor
        logits_NV = logits_1NV[0] if self._can_choose_logits else logits_1NV[0, tokens.logits_indices_N]
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
        logits_1TV: Tensor = self.model(input_ids=input_ids_1T, use_cache=False).logits
        return logits_1TV[0, :, : self._vocab_size]

    @torch.inference_mode()
    def head(self, hidden: HiddenStates, indices_S: Tensor) -> Tensor:
        """Compute logits [S, V] of any tokens of the last step from the hidden states that it kept.

        The model's own forward computes them, because several families scale or cap their logits after the
        output layer.
        """
        hidden = hidden.only(indices_S)
        return self._head(hidden.tokens, hidden.outputs)

    @torch.inference_mode()
    def logits(self, tokens: StepTokens, hidden_NH: Tensor) -> Tensor:
        """Compute logits [N, V] of hidden states that another body gave for these tokens."""
        body = whole_body_of(self.model)
        if body is not None and body.plain_head:
            return self._logits(hidden_NH, body.plain_head[0], tokens.logits_indices_N)
        return self._head(tokens, MoeModelOutputWithPast(last_hidden_state=hidden_NH[None]))

    def _head(self, tokens: StepTokens, outputs: Any) -> Tensor:
        with body_gives(self.model, outputs):
            logits_1SV: Tensor = self.model(**tokens.arguments, use_cache=False, return_dict=True).logits
        return logits_1SV[0, :, : self._vocab_size]


class BodyRunner:
    """Caller of a model without its head, with the methods of ModelRunner that startup tries."""

    def __init__(self, model: Any, body: Any) -> None:
        """Take in the body of `model`, which may be itself; kernels put another in its place."""
        self._model, self._own_body = model, body

    @property
    def _body(self) -> Any:
        return whole_body_of(self._model) or self._own_body

    @torch.inference_mode()
    def forward(self, tokens: StepTokens, executor: LayerExecutor) -> StepOutcome:
        """Run the model, its attention calls executed by `executor`; returns hidden states [N, H]."""
        arguments: dict[str, Any] = {"use_cache": False, "return_dict": True}
        with active(executor):
            outputs = self._body(**tokens.arguments, **arguments)
        return StepOutcome(outputs.last_hidden_state[0, tokens.logits_indices_N])

    @torch.inference_mode()
    def forward_alone(self, input_ids_1T: Tensor) -> Tensor:
        """Run the model by itself, with the attention that it is set to; returns hidden states [T, H]."""
        hidden_TH: Tensor = self._body(input_ids=input_ids_1T, use_cache=False).last_hidden_state[0]
        return hidden_TH


class StageRunner(ModelRunner):
    """Caller of a stage that is not the last: it computes no logits, and returns zeros."""

    def forward(self, tokens: StepTokens, executor: LayerExecutor) -> StepOutcome:
        indices_N = tokens.logits_indices_N
        outcome = super().forward(tokens._replace(logits_indices_N=indices_N[:0]), executor)
        return outcome._replace(logits_NV=no_logits(len(indices_N), self._vocab_size, indices_N.device))


def no_logits(num_lines: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return zeros that take the memory of one, where the logits are another stage's."""
    return torch.zeros((), device=device).expand(num_lines, vocab_size)


class StepRunner(ABC):
    """Computation of steps, one after another."""

    def __init__(self, runner: ModelRunner, backend: AttentionBackend, device: Device) -> None:
        self._runner, self._backend, self._device = runner, backend, device

    @abstractmethod
    def compute(self, inputs: StepInputs) -> StepOutcome:
        """Compute a step. Its logits are valid until the next one is computed."""

    @torch.inference_mode()
    def accept_drafts(self, num_right_R: Sequence[int]) -> None:
        """Take in the first drafts of each sequence of the step that was computed last: their numbers.

        Keys and values need nothing: those of wrong drafts are overwritten.
        """
        if self._backend.states is not None:
            self._backend.states.accept_drafts(num_right_R)

    def head(self, hidden: HiddenStates, indices_S: NDArray[np.int64]) -> Tensor:
        """Compute logits [S, V] of any tokens of the step that was computed last."""
        return self._runner.head(hidden, self._device.tensor(indices_S))

    @abstractmethod
    def remember(self, token_ids_N: Tensor) -> None:
        """Keep the tokens sampled from the last step, for a next step that was built without them."""

    def describe(self) -> str:
        """See Steps.describe."""
        return ""


class EagerSteps(StepRunner):
    """StepRunner that calls the model for each step, with all tokens known on the host."""

    def compute(self, inputs: StepInputs) -> StepOutcome:
        self._backend.begin_step(inputs.metadata)
        tokens = StepTokens.of(
            self._device, inputs.input_ids_T, inputs.position_ids_T, inputs.logits_indices_N
        )
        tokens = tokens._replace(keeps_hidden=inputs.keeps_hidden)
        return self._runner.forward_placed(tokens, inputs.placed, self._backend)

    def remember(self, token_ids_N: Tensor) -> None:
        """Do nothing: the host reads every token before it builds the next step."""
