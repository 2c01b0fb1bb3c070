"""Steps that were captured as CUDA graphs, by their sizes.

A step of a few tokens is some three hundred kernels, each a few microseconds of the host's time to launch and
less than that to compute. Captured, it is launched at once.

    decodes   1 2 4 8 16 24 32 ... 256 288 ... 512 576 ... 1024 sequences of one token each
    mixed     256 384 512 768 1024 1536 2048 tokens of any sequences
    drafted   4 8 16 32 64 128 256 tokens of sequences with drafts; all have logits

Sizes in between are padded to the next. Steps beyond the largest are launched kernel by kernel: they compute
for longer than the host launches.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from worker.attention.interface import num_layers_begun
from worker.devices.device import Device, Graph
from worker.devices.trial import first_line
from worker.gpu.step_buffers import BatchSizes, Limits
from worker.steps.inputs import StepInputs
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_DECODES = (1, 2, 4, *range(8, 257, 8), *range(288, 513, 32), *range(576, 1025, 64))
_MIXED = (256, 384, 512, 768, 1024, 1536, 2048)
_DRAFTED = (4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph, and the sizes that it was captured for."""

    sizes: BatchSizes
    graph: Graph
    num_layers: int


class GraphSizes:
    """The sizes to capture. max_model_len bounds the length of every sequence, since any may come."""

    def __init__(self, limits: Limits, max_model_len: int) -> None:
        most_sequences = min(limits.num_sequences, _DECODES[-1])
        counts = {size for size in _DECODES if size < most_sequences} | {most_sequences}
        self.decodes = [BatchSizes(size, size, size, size, 1, max_model_len) for size in sorted(counts)]
        self.mixed = [
            # Each sequence of a step has a token of it.
            BatchSizes(size, min(most_sequences, size), min(most_sequences, size), 0, size, max_model_len)
            for size in _MIXED
            if size <= limits.num_tokens
        ]
        longest = 1 + limits.max_drafts
        self.drafted = [
            # One of the sequences has a draft at least.
            BatchSizes(size, min(most_sequences, size - 1), size, 0, min(size, longest), max_model_len)
            for size in _DRAFTED
            if limits.max_drafts
            and not limits.num_state_blocks
            and size <= min(limits.num_tokens, most_sequences * longest)
        ]

    def __len__(self) -> int:
        return len(self.decodes) + len(self.mixed) + len(self.drafted)

    @property
    def most_logits(self) -> int:
        """Lines of logits that the largest of them leaves."""
        return max(each.num_logits for each in (*self.decodes, *self.mixed, *self.drafted))

    def largest_first(self) -> Iterator[BatchSizes]:
        """Yield large sizes first, so that all later ones find room in the memory of earlier ones."""
        yield from reversed(self.mixed)
        yield from reversed(self.decodes)
        yield from reversed(self.drafted)  # last: without memory for all, they are the ones to miss


class StepGraphs:
    """The graphs that were captured."""

    def __init__(self) -> None:
        self._decodes: list[CapturedStep] = []
        self._mixed: list[CapturedStep] = []
        self._drafted: list[CapturedStep] = []

    def __len__(self) -> int:
        return len(self._decodes) + len(self._mixed) + len(self._drafted)

    def add(self, step: CapturedStep) -> None:
        steps = self._decodes if step.sizes.num_decodes else self._mixed
        if step.sizes.has_drafts:
            steps = self._drafted
        steps.insert(bisect_left([each.sizes for each in steps], step.sizes), step)

    def find(self, inputs: StepInputs) -> CapturedStep | None:
        """The smallest that the step fits into; None if it fits into none."""
        num_tokens = len(inputs.input_ids_T)
        num_sequences, num_logits = len(inputs.metadata.seq_lens), len(inputs.logits_indices_N)
        if inputs.metadata.cut_states is not None:
            return None
        found: CapturedStep | None = None
        if inputs.metadata.num_decodes == num_tokens:
            found = _first_of(self._decodes, num_tokens)
        elif inputs.has_drafts:
            found = _first_of(self._drafted, num_tokens)
            if found is None or found.sizes.max_query_len < int(np.diff(inputs.metadata.query_starts).max()):
                return None
        if found is None:
            found = _first_of(self._mixed, num_tokens)
        if found is None or num_sequences > found.sizes.num_sequences or num_logits > found.sizes.num_logits:
            return None
        return found


def _refuse_missing(num_missing: int, why: str) -> StartupError:
    return StartupError(
        f"{num_missing} CUDA graphs are missing that all ranks need: {why}",
        fix="lower --gpu-memory-utilization or --max-num-seqs, or start with --enforce-eager",
    )


def _first_of(steps: list[CapturedStep], num_tokens: int) -> CapturedStep | None:
    place = bisect_left([step.sizes.num_tokens for step in steps], num_tokens)
    return steps[place] if place < len(steps) else None


def capture_all(
    sizes: GraphSizes,
    work_on: Callable[[BatchSizes], Callable[[], None]],
    device: Device,
    *,
    must_have_all: bool,
) -> StepGraphs:
    """Capture one graph for each of `sizes`, as long as there is memory.

    `work_on` returns the work of a step of these sizes. A model that waits for the device within its step
    cannot be captured: it is computed without graphs, and the log says why. `must_have_all` is for ranks, of
    which one cannot go on without the others: raises StartupError in both cases.
    """
    graphs = StepGraphs()
    device.release_cached_memory()  # each capture does: it would be counted as memory that graphs gave back
    free_before = device.free_bytes()
    for each in sizes.largest_first():
        begun_before = num_layers_begun()
        try:
            graph = device.capture(work_on(each))
        except torch.OutOfMemoryError:
            device.release_cached_memory()
            if must_have_all:
                raise _refuse_missing(len(sizes) - len(graphs), "memory ran out") from None
            log.warning(
                "memory ran out at CUDA graph %d of %d: smaller steps take a larger one's graph",
                len(graphs) + 1,
                len(sizes),
            )
            break
        except RuntimeError as error:
            if must_have_all:
                raise _refuse_missing(len(sizes) - len(graphs), first_line(error)) from error
            log.warning("steps cannot be captured as CUDA graphs: %s", first_line(error))
            return StepGraphs()
        # Done once to set up, and once to record.
        graphs.add(CapturedStep(each, graph, (num_layers_begun() - begun_before) // 2))
    taken_mib = (free_before - device.free_bytes()) >> 20
    log.info("captured %d of %d CUDA graphs, which take %d MiB", len(graphs), len(sizes), taken_mib)
    return graphs
