"""Pooling of prompts through a decoder and the paged cache.

A prompt is computed in chunks, and read from the prefix cache, if only its last hidden state counts;
otherwise it is computed whole.

Owns: one forward pass without an output layer, and the spans of its prompts.

Shapes: T tokens, N prompts that end in this step, H hidden size, E size of the vectors.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from scheduler.messages import BlockId, SchedulerOutput, SequenceId
from worker.attention.interface import AttentionBackend
from worker.devices.device import Device
from worker.pooling.pooler import Readout, TokenSpan
from worker.pooling.step import NOTHING_POOLED, PooledPrompts, PromptTable
from worker.steps.host_pool import HostPool
from worker.steps.inputs import StepInputs, build_inputs
from worker.steps.model_runner import BodyRunner
from worker.steps.tokens import StepTokens


@dataclass(frozen=True, slots=True)
class DecoderPrompts:
    """PromptRunner of a decoder with the paged cache."""

    _model: BodyRunner
    _backend: AttentionBackend
    _host_pool: HostPool
    _readout: Readout
    _device: Device

    def cut(self, vector_E: Tensor, num_dimensions: int | None) -> Tensor:
        return self._readout.cut(vector_E, num_dimensions)

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        return self._host_pool.swap(plan.swap_out, plan.swap_in, plan.copies)

    def run(
        self, plan: SchedulerOutput, table: PromptTable, failures: dict[SequenceId, str]
    ) -> PooledPrompts:
        inputs = build_inputs(plan, table.rows, failures)
        if inputs is None:
            return NOTHING_POOLED
        with self._host_pool.step(inputs.metadata):
            self._backend.begin_step(inputs.metadata)
            everything = np.arange(len(inputs.input_ids_T))
            tokens = StepTokens.of(self._device, inputs.input_ids_T, inputs.position_ids_T, everything)
            hidden_TH = self._model.forward(tokens, self._backend).logits_NV
        if not inputs.rows:
            return NOTHING_POOLED
        return PooledPrompts(inputs.sequence_ids, self._readout.pool(hidden_TH, _spans(inputs)))


def _spans(inputs: StepInputs) -> list[TokenSpan]:
    """List the spans of the shares that end a prompt, in the order of `inputs.rows`."""
    starts_R = inputs.metadata.query_starts
    last_N = inputs.logits_indices_N
    shares_N = np.searchsorted(starts_R, last_N, side="right") - 1
    return [
        TokenSpan(int(start), int(last) + 1) for start, last in zip(starts_R[shares_N], last_N, strict=True)
    ]
