"""A worker's steps where each sequence has a cache of its own: one after the other, whatever is batched.

Owns: those caches, and the order of a step: apply the plan's changes, compute each share, draw.
Never: loads (startup.py), or knows how a model is called (own_cache_model.py). The blocks that the
scheduler counts
hold nothing here: they stand for the memory that the caches take.
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
from worker.own_cache.own_cache_model import OwnCacheModel, SequenceCache, Way
from worker.sampling.logits import report_logprobs
from worker.sampling.sampler import Sampler
from worker.steps.plan_changes import apply_changes
from worker.steps.row_table import RowTable
from worker.steps.step_inputs import check_new_sequence, is_sound
from worker.worker_errors import SequenceRefused, WorkerError

log = logging.getLogger(__name__)

_SLICE_LOGITS = 1 << 23
"""32 MiB of float32: so many are asked for at once where the tokens of a prompt are scored."""
_MOST_LOGITS = 1 << 27
"""Where a prompt is computed at once, so are the logits of all of its tokens."""
_FAILED = "the model failed on this request"


class ScoredPrompt(NamedTuple):
    num_top: int
    token_ids: tuple[int, ...]


class CacheTable:
    """The rows of the worker, and the cache of each of them."""

    def __init__(self, rows: RowTable, sampler: Sampler, way: Way, vocab_size: int) -> None:
        self.rows = rows
        self.caches: dict[SequenceId, SequenceCache] = {}
        self.scored: dict[SequenceId, ScoredPrompt] = {}
        """Who asked for log-probabilities of its prompt."""
        self._sampler = sampler
        self._way = way
        self._vocab_size = vocab_size

    def copy_blocks(self, plan: SchedulerOutput) -> dict[BlockId, str]:
        """There is nothing in a block."""
        copied = (*plan.swap_out, *plan.swap_in, *plan.copies)
        assert not copied, "without host blocks and prefix cache nothing is copied"
        return {}

    def add(self, new: NewSequence) -> None:
        """Raises SequenceRefused."""
        check_new_sequence(new, self._vocab_size)
        scored = self._scored_prompt(new)
        row = self.rows.add(new)
        self._sampler.add_row(row, new.params, new.token_ids, new.num_prompt_tokens)
        self.caches[new.sequence_id] = SequenceCache()
        if scored is not None:
            self.scored[new.sequence_id] = scored

    def release(self, sequence_id: SequenceId) -> None:
        """See Table."""
        self.caches.pop(sequence_id, None)
        self.scored.pop(sequence_id, None)
        row = self.rows.release(sequence_id)
        if row is not None:
            self._sampler.remove_row(row)

    def _scored_prompt(self, new: NewSequence) -> ScoredPrompt | None:
        """Raises SequenceRefused."""
        if new.params.num_prompt_logprobs is None:
            return None
        if self._way is not Way.IN_CHUNKS:
            if len(new.token_ids) > new.num_prompt_tokens:
                return None  # readmitted: the whole prompt was told of with the first token drawn
            if new.num_prompt_tokens * self._vocab_size > _MOST_LOGITS:
                raise SequenceRefused(
                    f"{new.num_prompt_tokens} tokens are too many to be scored by a model that computes "
                    f"{self._way.value}"
                )
        return ScoredPrompt(new.params.num_prompt_logprobs, new.token_ids[: new.num_prompt_tokens])


class OwnCacheSteps:
    """Executes plans, one after another."""

    def __init__(
        self, model: OwnCacheModel, way: Way, table: CacheTable, sampler: Sampler, vocab_size: int
    ) -> None:
        self._model = model
        self._way = way
        self._table = table
        self._sampler = sampler
        self._vocab_size = vocab_size

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Do one step. What is wrong with one sequence fails that sequence; the others go on.

        Raises torch.OutOfMemoryError, and WorkerError if there are no others.
        """
        failures: dict[SequenceId, str] = {}
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        apply_changes(plan, self._table, failures)
        drawing: list[SequenceId] = []
        logits: list[Tensor] = []
        num_broken = 0
        for share in plan.scheduled:
            if not is_sound(share, self._table.rows, failures) or self._waits_for_the_rest(share):
                continue
            try:
                last_1V = self._compute(share, prompt_logprobs)
            except torch.OutOfMemoryError:
                raise  # no fault of this sequence: the step is made again in parts
            except SequenceRefused as error:
                failures[share.sequence_id] = str(error)
            except (RuntimeError, ValueError, LookupError, TypeError):
                log.exception("sequence %d failed alone", share.sequence_id)
                failures[share.sequence_id] = _FAILED
                num_broken += 1
            else:
                if share.samples:
                    drawing.append(share.sequence_id)
                    logits.append(last_1V)
        if num_broken and num_broken == len(plan.scheduled):
            # It may be the device that is broken: whoever counts steps that fail has to know.
            raise WorkerError(f"the model failed on all {num_broken} sequences of the step")
        token_ids, logprobs = self._draw(drawing, logits, failures)
        return ModelRunnerOutput(
            token_ids=token_ids, logprobs=logprobs, failures=failures, prompt_logprobs=prompt_logprobs
        )

    def _waits_for_the_rest(self, share: ScheduledSequence) -> bool:
        """A part of a prompt that is computed at once, with its last share."""
        return self._way is not Way.IN_CHUNKS and not share.samples

    def _compute(
        self, share: ScheduledSequence, prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]]
    ) -> Tensor:
        """Logits [1, V] of the share's last token. Raises SequenceRefused, and whatever the model raises."""
        rows, cache = self._table.rows, self._table.caches[share.sequence_id]
        end = share.start + share.num_tokens
        token_ids: list[int] = rows.token_ids_CL[rows.row_of(share.sequence_id), :end].tolist()
        scored = self._table.scored.get(share.sequence_id)
        # By what was computed: of a prompt that waited for its rest, that is nothing before the last share.
        if scored is None or cache.num_tokens >= len(scored.token_ids) - 1:
            return self._model.compute(token_ids, cache, self._way, num_logits=1)
        size = end if self._way is not Way.IN_CHUNKS else max(1, _SLICE_LOGITS // self._vocab_size)
        found: list[TokenLogprobs] = []
        for start in range(cache.num_tokens, end, size):
            stop = min(start + size, end)
            logits_TV = self._model.compute(token_ids[:stop], cache, self._way, num_logits=stop - start)
            next_ids = list(scored.token_ids[start + 1 : stop + 1])
            if next_ids:
                found += _scores(logits_TV[: len(next_ids)].float(), next_ids, scored.num_top)
        prompt_logprobs[share.sequence_id] = tuple(found)
        return logits_TV[-1:]

    def _draw(
        self, drawing: list[SequenceId], logits: list[Tensor], failures: dict[SequenceId, str]
    ) -> tuple[dict[SequenceId, tuple[int, ...]], dict[SequenceId, tuple[TokenLogprobs, ...]]]:
        if not drawing:
            return {}, {}
        rows = self._table.rows
        row_of = [rows.row_of(each) for each in drawing]
        result = self._sampler.sample(torch.cat(logits), [row for row in row_of if row is not None])
        for index, reason in result.failed.items():
            failures[drawing[index]] = reason
        good = [index for index in range(len(drawing)) if index not in result.failed]
        rows.append_tokens(
            [row for index in good if (row := row_of[index]) is not None],
            [result.token_ids[index] for index in good],
        )
        token_ids: dict[SequenceId, tuple[int, ...]] = {}
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        for index in good:
            token_ids[drawing[index]] = (result.token_ids[index],)
            if index in result.logprobs:
                logprobs[drawing[index]] = (result.logprobs[index],)
        return token_ids, logprobs


def _scores(logits_SV: Tensor, next_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """One entry for each of S tokens of a prompt. Raises SequenceRefused."""
    if not bool(logits_SV.amax(-1).isfinite().all()):
        raise SequenceRefused("logits of the prompt are not finite")
    return report_logprobs(logits_SV, next_ids, [num_top] * len(next_ids))
