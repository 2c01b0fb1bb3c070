"""Check at load that a model computes the same through the paged cache as by itself.

Owns: one short random sequence, run in three steps (a first chunk, a later chunk, a decode), or in more if
the decode alone differs, and the comparison with the model's own eager attention. Some families keep state
other than keys and values, or do not use the attention call at all: the check finds them without a list of
names. It is also the warm-up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scheduler.cache_groups import LifetimeKind
from scheduler.messages import (
    BlockId,
    NewSequence,
    NewTable,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from worker.attention.interface import ATTENTION_NAME, AttentionBackend, LayerExecutor
from worker.attention.kv_cache import FLOAT8, KVCache
from worker.devices.device import Device
from worker.load.loader import LoadedModel
from worker.ranks.ranks import samples
from worker.steps.inputs import build_inputs
from worker.steps.row_table import RowTable
from worker.steps.tokens import StepOutcome, StepTokens
from worker.worker_errors import FamilyRefused, StartupError, UnsupportedAttention

LONGEST_CHECK = 12
"""Tokens of the sequence."""
_SEED = 7
_RESTS = (5, 1)
"""Cuts of 12 tokens into 7, 4 and 1."""
_RESTS_WITH_MORE_DECODES = (5, 3, 2, 1)
"""Cuts for a model whose numbers, rounded to 16 bits or less, nearly cancel out in one token, since a single
one has no median. Made only where the decode differs: each step reads all weights."""
_LEAST_FOR_MORE_DECODES = 4
"""Tokens with three decodes behind the first chunk: of two the better would count as the median."""
# Error over magnitude of a token's logits. Wrong computation gives about 1; rounding in a deep model,
# in another order of sums, stays well below these.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2, FLOAT8: 0.3}


@contextmanager
def refusing(model_type: str) -> Iterator[None]:
    """Turn an error of a model that is tried into a FamilyRefused with its reason."""
    try:
        yield
    except UnsupportedAttention as error:
        raise FamilyRefused(f"{model_type} asks for {error}, which this worker would get wrong") from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise StartupError(
            "memory ran out while the model was tried",
            fix="lower --max-num-batched-tokens, or take a smaller model",
        ) from error
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise FamilyRefused(
            f"{model_type} fails on a flattened batch: {type(error).__name__}: {reason}"
        ) from error


class Runner(Protocol):
    """Caller of the model for the logits, or for the hidden states, of some of its tokens."""

    def forward(self, tokens: StepTokens, executor: LayerExecutor, /) -> StepOutcome:
        """Compute with attention in `executor`; returns one row for each of N tokens."""

    def forward_alone(self, input_ids_1T: Tensor, /) -> Tensor:
        """Compute with the model's own attention; returns one row for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """Check of one model on its device and cache."""

    loaded: LoadedModel
    runner: Runner
    backend: AttentionBackend
    cache: KVCache
    device: Device
    max_model_len: int

    def run(self) -> Tensor:
        """Return the model's own logits. Raises StartupError if those through the cache differ."""
        with refusing(self.loaded.model_type):
            expected = self._run_eagerly(self._token_ids())
        error = self._error(expected)
        if error is not None:
            raise FamilyRefused(
                f"{self.loaded.model_type} computes other logits through the paged KV cache than by itself "
                f"(error {error:.2g} of their size): it keeps state besides keys and values, "
                "or attends in its own way"
            )
        return expected

    def run_again(
        self, backend: AttentionBackend, expected: Tensor, *, tolerance: float | None = None
    ) -> None:
        """Raise StartupError if the logits with our own kernels differ from `expected`."""
        kind = self.device.kind
        fix = f"start with --{kind.lower()}-kernels off, and report it"
        try:
            error = replace(self, backend=backend)._error(expected, tolerance)
        except FamilyRefused as failure:
            # Not an error of the family, which was computed without the kernels before.
            raise StartupError(f"{failure.what}, with the {kind} kernels", fix=fix) from failure
        if error is not None and tolerance is not None:
            raise StartupError(
                f"rounded as the options ask, {self.loaded.model_type} computes other logits than its "
                f"checkpoint (error {error:.2g} of their size, {tolerance:.2g} is let in): few bits lose "
                "this model",
                fix="take --quantization int8, or leave rounding out; where that fails too, report it",
            )
        if error is not None:
            raise StartupError(
                f"{self.loaded.model_type} computes other logits with the {kind} kernels than without "
                f"(error {error:.2g} of their size)",
                fix=fix,
            )

    def _error(self, expected: Tensor, tolerance: float | None = None) -> float | None:
        """Return the largest error of a chunk, or the median of decodes, if it is above `tolerance`.

        Without one it is that of rounding.
        """
        ranks = self.loaded.ranks
        if not ranks.agree_min(int(torch.isfinite(expected).all())):
            return None  # random or damaged weights: requests will fail one by one, and say so
        dtypes = self.cache.layout.dtype, self.loaded.dtype
        most = max(TOLERANCE[each] for each in dtypes)
        if tolerance is not None:
            most = max(most, tolerance)
        in_chunks, in_decodes = self._errors(expected, _RESTS)
        if ranks.agree_min(int(in_chunks <= most and in_decodes <= most)):  # NaN is an error too
            return None
        has_median = len(expected) >= _LEAST_FOR_MORE_DECODES
        if set(dtypes) != {torch.float32} and has_median and ranks.agree_min(int(in_chunks <= most)):
            in_chunks, in_decodes = self._errors(expected, _RESTS_WITH_MORE_DECODES)
        return next((error for error in (in_chunks, in_decodes) if not error <= most), None)

    def _errors(self, expected: Tensor, rests: tuple[int, ...]) -> tuple[float, float]:
        """Return the largest error of a chunk, and that of all decodes; 0 on ranks without logits.

        A chunk at position 0 is none of the decodes.
        """
        chunks = _chunks(len(self._token_ids()), rests)
        with refusing(self.loaded.model_type):
            ours = self._run_paged(self._token_ids().tolist(), chunks)
        if not samples(self.loaded.ranks):
            return 0.0, 0.0  # rank 0 of the last stage has the logits, and refuses for all
        decodes = [start for start, end in chunks[1:] if end - start == 1]
        places = [torch.arange(*chunk) for chunk in chunks if chunk[0] not in decodes]
        errors = torch.tensor([relative_error(ours[each], expected[each]) for each in places])
        in_decodes = relative_error(ours[decodes], expected[decodes]) if decodes else 0.0
        return float(errors.max()), in_decodes  # of which NaN is the largest

    def _token_ids(self) -> np.ndarray[Any, Any]:
        length = min(LONGEST_CHECK, self.max_model_len, self.cache.most_tokens)
        return np.random.default_rng(_SEED).integers(0, self.loaded.vocab_size, length)

    def _run_paged(self, token_ids: list[int], chunks: list[tuple[int, int]]) -> Tensor:
        """Return logits [tokens, V], or hidden states, computed chunk by chunk."""
        rows = RowTable(
            max_num_seqs=1,
            max_model_len=self.max_model_len,
            block_size=self.cache.layout.block_size,
            num_blocks=self.cache.num_blocks,
            groups=self.cache.layout.groups,
        )
        sequence_id = SequenceId(0)
        rows.add(
            NewSequence(
                sequence_id=sequence_id,
                token_ids=tuple(token_ids),
                num_prompt_tokens=len(token_ids),
                params=SamplingParams(),
                tables=self._tables(-(-len(token_ids) // rows.block_size)),
            )
        )
        logits = []
        for start, end in chunks:
            plan = SchedulerOutput(
                step=0,
                released=(),
                new_sequences=(),
                new_blocks={},
                scheduled=(ScheduledSequence(sequence_id, start, end - start, samples=False),),
                num_scheduled_tokens=end - start,
            )
            inputs = build_inputs(plan, rows, failures={})
            assert inputs is not None
            self.backend.begin_step(inputs.metadata)
            tokens = StepTokens.of(
                self.device, inputs.input_ids_T, inputs.position_ids_T, np.arange(end - start)
            )
            logits.append(self.runner.forward(tokens, self.backend).logits_NV)
        return torch.cat(logits).float()

    def _tables(self, num_places: int) -> tuple[NewTable, ...]:
        """Take blocks in descending order, to check that block tables are followed."""
        tables, last = [], self.cache.num_blocks
        for group in self.cache.layout.groups:
            is_state = group.lifetime.kind is LifetimeKind.FIXED
            num_blocks = group.num_stripes * (1 if is_state else num_places)
            tables.append(NewTable(tuple(BlockId(last - place) for place in range(num_blocks))))
            last -= num_blocks
        return tuple(tables)

    def _run_eagerly(self, token_ids: np.ndarray[Any, Any]) -> Tensor:
        """Return the logits of all tokens with the model's own attention."""
        model: Any = self.loaded.model
        model.set_attn_implementation("eager")
        try:
            return self.runner.forward_alone(self.device.tensor(token_ids[None])).float()
        finally:
            model.set_attn_implementation(ATTENTION_NAME)


def _chunks(length: int, rests: tuple[int, ...]) -> list[tuple[int, int]]:
    """Cut tokens where `rests` are left; fewer tokens into fewer chunks."""
    cuts = sorted({0, *(max(length - rest, 0) for rest in rests), length})
    return list(pairwise(cuts))


def relative_error(ours: Tensor, expected: Tensor) -> float:
    """Take the median over tokens: rounding may route a token of a mixture to another expert."""
    errors = (ours - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return float(errors.median())
