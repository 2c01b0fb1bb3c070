"""Steps of a model whose sequences have caches of their own: computed one after the other, never batched.

Owns: the caches, and the order of a step: apply the plan's changes, compute each share, sample.
Never: loads (startup/), or knows how a model is called (model.py). The blocks that the scheduler
counts are empty: they stand for the memory of the caches.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
    TokenLogprobs,
)
from worker.adapters.store import AdapterStore
from worker.own_cache.model import OwnCacheModel, SequenceCache
from worker.sampling.logits import Alternatives, report_logprobs
from worker.sampling.sampler import Sampler
from worker.steps.inputs import check_new_sequence, is_sound
from worker.steps.protocol import ComputedStep
from worker.steps.row_table import RowTable
from worker.steps.sequence_table import add_row, apply_changes
from worker.worker_errors import SequenceRefused, WorkerError

log = logging.getLogger(__name__)

_SLICE_LOGITS = 1 << 23
"""32 MiB of float32: the most logits computed at once while a prompt is scored."""
_FAILED = "the model failed on this request"


class ScoredPrompt(NamedTuple):
    """A prompt whose log-probabilities were asked for."""

    num_top: int
    token_ids: tuple[int, ...]


class CacheTable:
    """Rows of the worker, and the cache of each."""

    def __init__(
        self,
        rows: RowTable,
        sampler: Sampler,
        vocab_size: int,
        adapters: AdapterStore | None,
        *,
        keeps_caches: bool,
    ) -> None:
        self.rows = rows
        self.adapters = adapters
        self.caches: dict[SequenceId, SequenceCache] = {}
        self.scored: dict[SequenceId, ScoredPrompt] = {}
        """Sequences that asked for log-probabilities of their prompts, and did not get all of them."""
        self.keeps_caches = keeps_caches
        """Whether the family's caches can be used; see SequenceCache."""
        self._sampler = sampler
        self._vocab_size = vocab_size

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """Copy nothing: blocks are empty."""
        copied = (*plan.swap_out, *plan.swap_in, *plan.copies)
        assert not copied, "without host blocks and prefix cache nothing is copied"
        return {}

    def add(self, new: NewSequence) -> None:
        """See SequenceTable."""
        check_new_sequence(new, self._vocab_size)
        row = add_row(self.rows, self.adapters, new)
        self._sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)
        self.caches[new.sequence_id] = SequenceCache(self.keeps_caches)
        num_top = new.params.num_prompt_logprobs
        # One that is readmitted with tokens of its reply has reported its prompt.
        if num_top is not None and len(new.token_ids) == new.num_prompt_tokens:
            self.scored[new.sequence_id] = ScoredPrompt(num_top, new.token_ids)

    def release(self, sequence_id: SequenceId) -> None:
        """See SequenceTable."""
        self.caches.pop(sequence_id, None)
        self.scored.pop(sequence_id, None)
        row = self.rows.release(sequence_id)
        if row is not None:
            if self.adapters is not None:
                self.adapters.unseat(row)
            self._sampler.remove_row(row)


class OwnCacheSteps:
    """Steps that compute each sequence alone."""

    def __init__(self, model: OwnCacheModel, table: CacheTable, sampler: Sampler, vocab_size: int) -> None:
        self._model = model
        self._table = table
        self.adapters = table.adapters
        self.grammars = sampler.compile_ahead
        self._sampler = sampler
        self._vocab_size = vocab_size

    def launch(self, plan: SchedulerOutput) -> ComputedStep:
        """See Steps. The step is computed when this returns."""
        return ComputedStep(self._compute_plan(plan))

    def describe(self) -> str:
        return ""

    def _compute_plan(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. An error in one sequence fails that sequence; the others go on.

        Raises torch.OutOfMemoryError, and WorkerError if all sequences fail.
        """
        failures: dict[SequenceId, str] = {}
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        apply_changes(plan, self._table, failures)
        sampling: list[SequenceId] = []
        logits: list[Tensor] = []
        num_broken = 0
        for share in plan.scheduled:
            if not is_sound(share, self._table.rows, failures) or self._waits_for_the_rest(share):
                continue
            try:
                last_1V = self._compute(share, prompt_logprobs)
            except torch.OutOfMemoryError:
                raise  # not an error of this sequence: the engine repeats the step in parts
            except SequenceRefused as error:
                failures[share.sequence_id] = str(error)
            except (RuntimeError, ValueError, LookupError, TypeError):
                log.exception("sequence %d failed alone", share.sequence_id)
                failures[share.sequence_id] = _FAILED
                num_broken += 1
            else:
                if share.samples:
                    sampling.append(share.sequence_id)
                    logits.append(last_1V)
        if num_broken and num_broken == len(plan.scheduled):
            # The device may be broken: the engine counts failed steps.
            raise WorkerError(f"the model failed on all {num_broken} sequences of the step")
        unfit: dict[SequenceId, str] = {}
        token_ids, logprobs = self._sample(sampling, logits, failures, unfit)
        return ModelRunnerOutput(
            token_ids=token_ids,
            logprobs=logprobs,
            failures=failures,
            unfit=unfit,
            prompt_logprobs=prompt_logprobs,
        )

    def _waits_for_the_rest(self, share: ScheduledSequence) -> bool:
        """Whether a share is computed with those behind it: without a cache, all are with the last one."""
        return not (self._table.keeps_caches or share.samples)

    def _compute(
        self, share: ScheduledSequence, prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]]
    ) -> Tensor:
        """Compute logits [1, V] of the share's last token. Raises SequenceRefused or the model's error."""
        rows, cache = self._table.rows, self._table.caches[share.sequence_id]
        end, row = share.start + share.num_tokens, rows.row_of(share.sequence_id)
        assert row is not None, "the share is sound"
        if self.adapters is not None:
            self.adapters.begin_alone(row)
        token_ids: list[int] = rows.token_ids_CL[row, :end].tolist()
        scored = self._table.scored.get(share.sequence_id)
        if scored is None:
            return self._model.compute(token_ids, cache, num_logits=1)
        size = max(1, _SLICE_LOGITS // self._vocab_size)
        found: list[TokenLogprobs] = []
        for start in range(cache.num_tokens, end, size):
            stop = min(start + size, end)
            logits_TV = self._model.compute(token_ids[:stop], cache, num_logits=stop - start)
            next_ids = list(scored.token_ids[start + 1 : stop + 1])
            if next_ids:
                found += _scores(logits_TV[: len(next_ids)].float(), next_ids, scored.num_top)
        prompt_logprobs[share.sequence_id] = tuple(found)
        if end >= len(scored.token_ids) - 1:
            del self._table.scored[share.sequence_id]
        return logits_TV[-1:]

    def _sample(
        self,
        sampling: list[SequenceId],
        logits: list[Tensor],
        failures: dict[SequenceId, str],
        unfit: dict[SequenceId, str],
    ) -> tuple[dict[SequenceId, tuple[int, ...]], dict[SequenceId, tuple[TokenLogprobs, ...]]]:
        if not sampling:
            return {}, {}
        rows = self._table.rows
        row_of = [rows.row_of(each) for each in sampling]
        result = self._sampler.sample(torch.cat(logits), [row for row in row_of if row is not None])
        for index, reason in result.failed.items():
            (unfit if index in result.unfit else failures)[sampling[index]] = reason
        good = [index for index in range(len(sampling)) if index not in result.failed]
        rows.append_tokens(
            [row for index in good if (row := row_of[index]) is not None],
            [result.token_ids[index] for index in good],
        )
        token_ids: dict[SequenceId, tuple[int, ...]] = {}
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        for index in good:
            token_ids[sampling[index]] = (result.token_ids[index],)
            if index in result.logprobs:
                logprobs[sampling[index]] = (result.logprobs[index],)
        return token_ids, logprobs


def _scores(logits_SV: Tensor, next_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Score each of S tokens of a prompt. Raises SequenceRefused."""
    if not bool(logits_SV.amax(-1).isfinite().all()):
        raise SequenceRefused("logits of the prompt are not finite")
    return report_logprobs(logits_SV, next_ids, [Alternatives(num_top)] * len(next_ids))
