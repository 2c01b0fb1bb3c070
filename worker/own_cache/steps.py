"""Steps of a model whose sequences have caches of their own: computed one after the other, never batched.

Owns: the caches, and the computation of each share of a step.
Never: the order of a step (steps/generation_step.py), or how a model is called (model.py). The blocks that
the scheduler counts are empty: they stand for the memory of the caches.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scheduler.messages import NewSequence, ScheduledSequence, SequenceId
from worker.attention.kv_cache import BlockLayout, KVCache
from worker.attention.ref_attention import RefAttention
from worker.devices.device import Device
from worker.load.loader import LoadedModel
from worker.own_cache.model import OwnCacheModel, SequenceCache
from worker.sampling.open_sampler import open_grammars, open_sampler
from worker.steps.generation_step import GenerationSteps
from worker.steps.host_pool import HostPool
from worker.steps.inputs import StepInputs
from worker.steps.model_runner import EagerSteps, ModelRunner
from worker.steps.prompt_logprobs import PromptReport
from worker.steps.row_table import RowTable
from worker.worker_config import ModelFacts, WorkerConfig
from worker.worker_errors import WorkerError

log = logging.getLogger(__name__)

_FAILED = "the model failed on this request"


class OwnCacheSteps(GenerationSteps):
    """Steps that compute each sequence alone."""

    def __init__(
        self,
        config: WorkerConfig,
        device: Device,
        facts: ModelFacts,
        loaded: LoadedModel,
        model: OwnCacheModel,
        *,
        keeps_caches: bool,
    ) -> None:
        """Take in a loaded model, and whether the family's caches can be used."""
        layout = BlockLayout(layers={}, block_size=facts.block_size, dtype=loaded.dtype, least_numel=1)
        no_cache = KVCache(layout, 0, device.zeros(1, loaded.dtype))
        runner = ModelRunner(loaded.model, facts.vocab_size)
        super().__init__(
            device=device,
            facts=facts,
            rows=RowTable.of(facts, config.max_num_seqs),
            host_pool=HostPool(0, no_cache, device),
            steps=EagerSteps(runner, RefAttention(no_cache, device), device),
            sampler=open_sampler(config, facts, device, open_grammars(config, facts), loaded.ranks),
        )
        self._model, self._keeps_caches = model, keeps_caches
        self._caches: dict[SequenceId, SequenceCache] = {}

    def add(self, new: NewSequence) -> None:
        super().add(new)
        self._caches[new.sequence_id] = SequenceCache(self._keeps_caches)
        if len(new.token_ids) > new.num_prompt_tokens:  # readmitted with tokens of its reply
            self._prompt_logprobs.remove(new.sequence_id)

    def release(self, sequence_id: SequenceId) -> None:
        super().release(sequence_id)
        self._caches.pop(sequence_id, None)

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, PromptReport]:
        """Compute the step. An error in one sequence fails that sequence; the others go on.

        Raises torch.OutOfMemoryError, and WorkerError if all sequences fail.
        """
        report, num_broken = PromptReport(), 0
        nothing_1V = torch.zeros((1, self._vocab_size), device=self.device.torch_device)
        logits = [nothing_1V[:0]]
        for share in inputs.shares:
            logits_1V = nothing_1V
            try:
                # Without a cache, the last share of a prompt computes those before it as well.
                if self._keeps_caches or share.samples:
                    logits_1V = self._compute_alone(share, report)
            except torch.OutOfMemoryError:
                raise  # not an error of this sequence: the engine repeats the step in parts
            except (RuntimeError, ValueError, LookupError, TypeError):
                log.exception("sequence %d failed alone", share.sequence_id)
                report.failures[share.sequence_id] = _FAILED
                num_broken += 1
            if share.samples:
                logits.append(nothing_1V if share.sequence_id in report.failures else logits_1V)
        if num_broken == len(inputs.shares):
            # The device may be broken: the engine counts failed steps.
            raise WorkerError(f"the model failed on all {num_broken} sequences of the step")
        return torch.cat(logits), report

    def _compute_alone(self, share: ScheduledSequence, report: PromptReport) -> Tensor:
        """Compute logits [1, V] of the share's last token; its prompt is scored if asked."""
        cache, row = self._caches[share.sequence_id], self.rows.row_of(share.sequence_id)
        assert row is not None, "the share is sound"
        if self.adapters is not None:
            self.adapters.begin_alone(row)
        end, start = share.start + share.num_tokens, cache.num_tokens
        token_ids: list[int] = self.rows.token_ids_CL[row, :end].tolist()
        logits_SV = torch.empty(0)

        def head(indices_S: NDArray[np.int64]) -> Tensor:
            nonlocal logits_SV
            stop = start + int(indices_S[-1]) + 1
            logits_SV = self._model.compute(token_ids[:stop], cache, num_logits=len(indices_S))
            return logits_SV

        uncomputed = share._replace(start=start, num_tokens=end - start)
        if wanted := self._prompt_logprobs.wanted([uncomputed], self.rows):
            self._prompt_logprobs.report(wanted, head, report)
            if share.samples:
                self._prompt_logprobs.remove(share.sequence_id)
        if cache.num_tokens == end:
            return logits_SV[-1:]
        return self._model.compute(token_ids, cache, num_logits=1)
