"""The interfaces between the engine's loop, its worker and its mailbox."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from engine.process_messages import ToClient, ToEngine
from scheduler.messages import Grammar, ModelRunnerOutput, SchedulerOutput, SequenceId
from worker.worker_config import AdapterFacts


class BegunStep(Protocol):
    def result(self) -> ModelRunnerOutput:
        """Wait for the result. Raises the step's error; StepOutOfMemory if it may be made again in parts."""


class Executor(Protocol):
    """The loop's interface to a worker."""

    def launch(self, plan: SchedulerOutput) -> BegunStep:
        """Begin a step; on a CPU, compute it. Steps are computed in order. Raises as `result` does."""


class Mailbox(Protocol):
    """The loop's interface to a transport."""

    def receive(self, *, wait_s: float) -> list[ToEngine]: ...

    def send(self, message: ToClient) -> None: ...


class SampledStep(BegunStep, Protocol):
    """A step on the rank that samples."""

    @property
    def sampled(self) -> list[int]:
        """Tokens that it sampled, once there is a result."""


class SamplingExecutor(Protocol):
    """Executor of the rank that samples."""

    def launch(self, plan: SchedulerOutput) -> SampledStep: ...


class Adapters(Protocol):
    """The worker's store of adapters, as far as the loop calls it; the store documents the methods."""

    @property
    def resident(self) -> tuple[str, ...]: ...
    def load(self, name: str, folder: str) -> AdapterFacts: ...
    def introduce(self, identity: str, folder: str) -> None: ...
    def forget(self, identity: str) -> None: ...


class CompilesAhead(Protocol):
    """The worker's compiler of grammars, as far as the loop calls it; it documents the methods."""

    def begin(self, sequence_id: SequenceId, grammar: Grammar, generated: SequenceOf[int]) -> None: ...
    def give_up(self, sequence_id: SequenceId) -> None: ...
    def take_finished(self) -> list[SequenceId]: ...
    def hand_out(self, sequence_ids: Iterable[SequenceId]) -> None: ...
    def discard(self, sequence_id: SequenceId) -> None: ...


def _is_due(_wait_s: float) -> bool:
    """Say that a step must be waited for: the default of a worker that computes within `launch`."""
    return True


class BesideSteps(NamedTuple):
    """Functions of the worker that are called outside of plans."""

    adapters: Adapters | None = None
    grammars: CompilesAhead | None = None
    has_result: Callable[[float], bool] = _is_due
    """Wait up to this many seconds for the oldest step; return whether it is computed."""
    rank_times_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    """Seconds so far of copying and adding between ranks, and of waiting for them."""


NOTHING_BESIDE = BesideSteps()
