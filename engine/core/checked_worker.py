"""A worker whose sampled tokens are checked against the vocabulary.

Owns: the check. A token outside the vocabulary would fail the next step of the whole batch at the embedding,
on a GPU for good; so its sequence fails alone, at once.
Never: computes.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from engine.core.loop import BegunStep, Executor
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, SequenceId


class CheckedWorker:
    """An executor that checks the results of `worker`."""

    def __init__(self, worker: Executor, *, vocab_size: int) -> None:
        self._worker = worker
        self._vocab_size = vocab_size

    def launch(self, plan: SchedulerOutput) -> BegunStep:
        return _CheckedStep(self._worker.launch(plan), self._vocab_size)


class _CheckedStep:
    def __init__(self, launched: BegunStep, vocab_size: int) -> None:
        self._launched = launched
        self._vocab_size = vocab_size

    def result(self) -> ModelRunnerOutput:
        output = self._launched.result()
        impossible = self._impossible(output.token_ids)
        if not impossible:
            return output
        kept = {key: value for key, value in output.token_ids.items() if key not in impossible}
        return replace(output, token_ids=kept, failures={**output.failures, **impossible})

    def _impossible(self, sampled: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, str]:
        """Find sequences with impossible tokens, each with its error message."""
        all_ids = list(chain.from_iterable(sampled.values()))
        if not all_ids or (min(all_ids) >= 0 and max(all_ids) < self._vocab_size):
            return {}
        return {
            sequence_id: f"the model drew a token that is none of its {self._vocab_size}"
            for sequence_id, token_ids in sampled.items()
            if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= self._vocab_size
        }
