"""A step on a GPU: what the host asks for, without waiting for anything.

Owns: the order of a step on the device (fill in tokens that the host does not know, attention's batch, the
model, the logits), and who does it: a captured graph, or the host kernel by kernel.
Never: builds a step (inputs.py, step_buffers.py) or draws (gpu/sampler.py).

Shapes: T tokens, N logits wanted, V vocabulary, C rows of the worker and one more that is nobody's.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.interface import LayerExecutor, note_layers_begun
from worker.device import Device
from worker.gpu.batch import AttentionBatch, DeviceBatch
from worker.gpu.graphs import GraphSizes, StepGraphs, capture_all
from worker.gpu.kernels.inputs import fill_unknown_tokens, remember_tokens
from worker.gpu.step_buffers import BatchSizes, StepBuffers
from worker.inputs import StepInputs
from worker.model_runner import BodyOutputs, ModelRunner


class BatchAttention(LayerExecutor, Protocol):
    """A LayerExecutor over the paged cache that reads its step on the device."""

    def begin_batch(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of the step share, without waiting for the device."""


class GpuSteps:
    """A StepRunner that asks and does not wait. One step's memory: each is filled in after the one before."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: BatchAttention,
        device: Device,
        buffers: StepBuffers,
        logits_NV: Tensor,
    ) -> None:
        """`logits_NV` is where graphs leave their logits, for the most sequences that may draw at once."""
        self._runner = runner
        self._backend = backend
        self._device = device
        self._buffers = buffers
        self._logits_NV = logits_NV
        self._last_token_C = device.zeros(buffers.limits.num_sequences + 1, torch.int64)
        self._graphs = StepGraphs()
        self._rows_of: dict[BatchSizes, Tensor] = {}
        # Compiled now, for nobody's row, and not in the middle of the first step.
        self._rows_N = device.tensor(np.array([buffers.limits.num_sequences], np.int32))
        self.remember(self._last_token_C[:1])
        self._num_replayed = self._num_eager = self._num_padding = 0

    def capture(self, sizes: GraphSizes) -> None:
        """Capture what there is memory for. Steps that fit into these sizes are replayed from then on."""

        def work_on(each: BatchSizes) -> "_Work":
            self._buffers.fill(None, each)
            batch = self._buffers.view(each)
            self._rows_of[each] = batch.rows_N
            return _Work(self, batch)

        self._graphs = capture_all(sizes, work_on, self._device)

    def compute(self, inputs: StepInputs) -> Tensor:
        """See StepRunner."""
        captured = self._graphs.find(inputs)
        if captured is None:
            return self._forward(self._begin(inputs))
        self._buffers.fill(inputs, captured.sizes)
        self._rows_N = self._rows_of[captured.sizes]
        captured.graph.replay()
        note_layers_begun(captured.num_layers)
        self._num_replayed += 1
        self._num_padding += captured.sizes.num_tokens - len(inputs.input_ids_T)
        return self._logits_NV[: len(inputs.rows)]

    def compute_keeping_body(self, inputs: StepInputs) -> tuple[Tensor, BodyOutputs]:
        """See StepRunner."""
        batch = self._begin(inputs)
        self._prepare(batch)
        return self._runner.forward_keeping_body(
            batch.input_ids_1T, batch.position_ids_1T, batch.logits_indices_N, self._backend
        )

    def head(self, body: BodyOutputs, indices_S: NDArray[np.int64]) -> Tensor:
        """See StepRunner."""
        return self._runner.head(body, self._device.tensor(indices_S))

    @torch.inference_mode()
    def remember(self, token_ids_N: Tensor) -> None:
        """See StepRunner."""
        remember_tokens(self._last_token_C, self._rows_N, token_ids_N)

    def describe(self) -> str:
        """See StepRunner."""
        return (
            f"{self._num_replayed} steps were replayed from CUDA graphs, with {self._num_padding} tokens of "
            f"padding; {self._num_eager} were not"
        )

    def leave_logits(self, batch: DeviceBatch) -> None:
        """Compute a batch and leave its logits where those of graphs are found."""
        logits_NV = self._forward(batch)
        self._logits_NV[: len(logits_NV)].copy_(logits_NV)

    def _begin(self, inputs: StepInputs) -> DeviceBatch:
        """A step of its own sizes, without padding."""
        self._num_eager += 1
        sizes = sizes_of(inputs)
        self._buffers.fill(inputs, sizes)
        batch = self._buffers.view(sizes)
        self._rows_N = batch.rows_N
        return batch

    def _forward(self, batch: DeviceBatch) -> Tensor:
        self._prepare(batch)
        return self._runner.forward(
            batch.input_ids_1T, batch.position_ids_1T, batch.logits_indices_N, self._backend
        )

    @torch.inference_mode()
    def _prepare(self, batch: DeviceBatch) -> None:
        fill_unknown_tokens(batch.input_ids_1T, batch.rows_T, self._last_token_C)
        self._backend.begin_batch(batch.attention)


class _Work:
    """What a graph records: it knows a batch's place in memory, and nothing of the host's step."""

    def __init__(self, steps: GpuSteps, batch: DeviceBatch) -> None:
        self._steps, self._batch = steps, batch

    @torch.inference_mode()
    def __call__(self) -> None:
        self._steps.leave_logits(self._batch)


def sizes_of(inputs: StepInputs) -> BatchSizes:
    """Of a step without padding."""
    metadata, num_tokens = inputs.metadata, len(inputs.input_ids_T)
    return BatchSizes(
        num_tokens=num_tokens,
        num_sequences=len(metadata.seq_lens),
        num_logits=len(inputs.rows),
        # As graphs are: kernels that are told the decodes of a mixed step would be compiled in service.
        num_decodes=num_tokens if metadata.num_decodes == num_tokens else 0,
        max_query_len=int(np.diff(metadata.query_starts).max()),
        max_seq_len=int(metadata.seq_lens.max()),
    )
