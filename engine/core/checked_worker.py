"""A worker whose tokens are looked at before anybody believes them.

Owns: the bounds of the vocabulary. A token outside of it would fail the next step of everybody in the batch,
at the embedding on CPU and for good on a GPU; so its sequence fails alone, now.
Never: computes.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from engine.core.loop import Executor, Launched
from scheduler.messages import ModelRunnerOutput, SchedulerOutput, SequenceId


class CheckedWorker:
    """Does what `worker` does."""

    def __init__(self, worker: Executor, *, vocab_size: int) -> None:
        self._worker = worker
        self._vocab_size = vocab_size

    def launch(self, plan: SchedulerOutput) -> Launched:
        return _CheckedStep(self._worker.launch(plan), self._vocab_size)


class _CheckedStep:
    def __init__(self, launched: Launched, vocab_size: int) -> None:
        self._launched = launched
        self._vocab_size = vocab_size

    def result(self) -> ModelRunnerOutput:
        output = self._launched.result()
        impossible = self._impossible(output.token_ids)
        if not impossible:
            return output
        kept = {key: value for key, value in output.token_ids.items() if key not in impossible}
        return replace(output, token_ids=kept, failures={**output.failures, **impossible})

    def _impossible(self, drawn: Mapping[SequenceId, tuple[int, ...]]) -> dict[SequenceId, str]:
        """Why each of these fails; empty nearly always."""
        all_drawn = list(chain.from_iterable(drawn.values()))
        if not all_drawn or (min(all_drawn) >= 0 and max(all_drawn) < self._vocab_size):
            return {}
        return {
            sequence_id: f"the model drew a token that is none of its {self._vocab_size}"
            for sequence_id, token_ids in drawn.items()
            if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= self._vocab_size
        }
