"""The ranks of one model as one executor: rank 0 is in this process, the others are its children.

Owns: the processes of the other ranks, and that all ranks end together: at once, whichever ends first, with
the stacks of the others in the log. No part is recovered: the engine process is replaced as a whole.
Never: plans, or samples. The engine's loop meets an Executor like any other.
"""

import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from engine.core.between_steps import GrammarsOfLastStage, RankAdapters
from engine.core.interfaces import Adapters, BegunStep, CompilesAhead, SamplingExecutor
from engine.core.worker_steps import LedStep, StageSteps
from engine.nodes.rank_plans import PlansOut, RankStep, Reports, ResultsIn
from engine.nodes.rank_start import start_rank
from engine.processes.child_process import EXIT_START_FAILED, SIGNAL_FOR_STACKS
from engine.processes.process_end import EXIT_WORKER_BROKEN, leave, report_signals_for_stacks
from scheduler.messages import ModelRunnerOutput, SchedulerOutput
from worker.ranks.places import RankPlace

if TYPE_CHECKING:
    from engine.nodes.switchboard import Switchboard
    from engine.ray_cluster.nodes import RayNodes
    from worker.ranks.stage import Stage

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_STACKS_S = 0.1
"""Time for the other ranks to write their stacks."""
_GOODBYE_S = 1.0
_NODES_GOODBYE_S = 0.9
"""Time for the nodes that Ray has placed to see that their ranks have ended."""


class RankGroup:
    """The other ranks, from `start` to `close`. `launch` comes after `lead`."""

    def __init__(
        self,
        children: list[subprocess.Popen[bytes]],
        plans: "PlansOut | Switchboard",
        results: Reports | None,
        switchboard: "Switchboard | None" = None,
        placed: "RayNodes | None" = None,
    ) -> None:
        """Watch the children. `results` are those of the last stage, where there are several."""
        self._children = children
        self._plans = plans
        self._results = results
        self._switchboard = switchboard
        self._placed = placed
        self._worker: SamplingExecutor
        self._steps: StageSteps | None = None
        self._sampled: list[list[int]] = []  # tokens that the other ranks do not know yet
        self._is_closing = threading.Event()
        self._signals = report_signals_for_stacks()
        self._watch = threading.Thread(target=self._watch_all, name="ranks", daemon=True)
        self._watch.start()

    @classmethod
    def start(
        cls,
        directory: Path,
        places: list[RankPlace],
        switchboard: "Switchboard | None" = None,
        placed: "RayNodes | None" = None,
    ) -> "RankGroup":
        """Start all ranks of this node but rank 0, and those of other nodes over the switchboard."""
        plans: PlansOut | Switchboard = switchboard or PlansOut(directory, num_ranks=len(places))
        results: Reports | None = None
        if places[0].num_stages > 1:
            results = ResultsIn(directory) if switchboard is None else switchboard.results
        children = [start_rank(directory, place) for place in places[1:]]
        for descriptor in {each for place in places[1:] for each in place.descriptors}:
            if descriptor not in places[0].descriptors:
                os.close(descriptor)
        group = cls(children, plans, results, switchboard, placed)
        if switchboard is not None:
            switchboard.on_loss = group.end_for_node
            switchboard.begin()
        return group

    def lead(self, worker: SamplingExecutor, stage: "Stage") -> None:
        """Carry out plans with `worker` as rank 0, which is in the first stage."""
        self._worker = worker
        if self._results is not None:
            self._steps = StageSteps(worker, stage)

    def adapters_of_all(self, own: Adapters | None) -> Adapters | None:
        """Make one of the stores of all ranks; None where adapters are not computed."""
        return None if own is None else RankAdapters(own, self._plans.send)

    def grammars_of_all(self, own: CompilesAhead | None) -> CompilesAhead | None:
        """Give the side that compiles grammars: that of the rank which samples."""
        return (
            own
            if self._results is None
            else GrammarsOfLastStage(self._plans.send, self._results.take_compiled)
        )

    def launch(self, plan: SchedulerOutput) -> BegunStep:
        """Begin a step on all ranks. An error ends the process: the others wait within their step."""
        return self._or_end(plan, lambda: self._launch(plan))

    def _launch(self, plan: SchedulerOutput) -> BegunStep:
        sampled, self._sampled = self._sampled, []
        self._plans.send(RankStep(plan, sampled))
        if self._steps is not None:
            self._steps.launch(plan)
            return _StepOfRanks(self._collect)
        step = LedStep(self._worker.launch(plan), lambda token_ids: self._sampled.append(token_ids))
        return _StepOfRanks(lambda: self._or_end(plan, step.result))

    def _or_end(self, plan: SchedulerOutput, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except Exception:
            log.critical("rank 0 failed in step %d, and ends with all others", plan.step, exc_info=True)
            self._end(EXIT_WORKER_BROKEN)

    def has_result(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for the oldest step of a pipeline; return whether it is computed."""
        assert self._results is not None
        return self._results.has_any(wait_s)

    def _collect(self) -> ModelRunnerOutput:
        """Wait for the result of the oldest step, whose tokens all ranks but one still need."""
        assert self._results is not None
        assert self._steps is not None
        result = self._results.receive()
        self._sampled.append(result.token_ids)
        self._steps.learn(result.token_ids)
        return result.output

    def dismiss_nodes(self) -> None:
        """Let other nodes end with their ranks."""
        if self._switchboard is not None:
            self._switchboard.dismiss_nodes()

    def close(self) -> None:
        """Let the ranks end; kill those that have not ended in time."""
        self._is_closing.set()
        self._plans.say_goodbye()
        deadline_s = time.monotonic() + _GOODBYE_S
        for child in self._children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
        if self._switchboard is not None and self._placed is not None:  # it ends when all other nodes have
            with suppress(subprocess.TimeoutExpired):
                self._placed.wait(_NODES_GOODBYE_S)
        self._kill()
        self._plans.close()
        if isinstance(self._results, ResultsIn):
            self._results.close()

    def end_for_node(self, exit_code: int, what: str) -> None:
        """End all: a node is lost, or a rank of it. For the thread of the switchboard."""
        if exit_code != EXIT_START_FAILED:  # one that could not start has reported why
            log.critical("%s, and all ranks end with it", what)
        self._end(exit_code)

    def _watch_all(self) -> None:
        """Wait until a rank ends; pass signals for stacks on meanwhile."""
        ranks_of = {os.pidfd_open(child.pid): rank for rank, child in enumerate(self._children, start=1)}
        placed = None if self._placed is None else os.pidfd_open(self._placed.pid)
        poll = select.poll()
        for descriptor in (*ranks_of, self._signals, *([] if placed is None else [placed])):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._is_closing.is_set():
                return
            ended = [ranks_of[descriptor] for descriptor in ready if descriptor in ranks_of]
            if ended:
                self._mourn(ended[0])
            if self._placed is not None and placed in ready:
                code = self._placed.wait()  # 0 if its agents ended in order, below 0 by a signal
                self.end_for_node(
                    code if code > 0 else EXIT_WORKER_BROKEN, "the nodes that Ray had placed are lost"
                )
            with suppress(BlockingIOError):
                os.read(self._signals, 64)
            self._ask_for_stacks()

    def _mourn(self, rank: int) -> None:
        child = self._children[rank - 1]
        exit_code = child.wait()
        if exit_code == EXIT_START_FAILED:
            self._end(exit_code)  # it has reported why
        how = signal.Signals(-exit_code).name if exit_code < 0 else f"code {exit_code}"
        log.critical(
            "rank %d (pid %d) ended by %s, and all ranks end with it; their stacks are in this log",
            *(rank, child.pid, how),
        )
        os.kill(os.getpid(), SIGNAL_FOR_STACKS)
        self._ask_for_stacks()
        time.sleep(_STACKS_S)
        self._end(EXIT_WORKER_BROKEN)

    def _ask_for_stacks(self) -> None:
        if self._switchboard is not None:
            self._switchboard.ask_for_stacks()
        for child in self._children:
            with suppress(ProcessLookupError):
                child.send_signal(SIGNAL_FOR_STACKS)

    def _end(self, exit_code: int) -> NoReturn:
        self._is_closing.set()
        self._kill()
        leave(exit_code)

    def _kill(self) -> None:
        for child in self._children:
            with suppress(ProcessLookupError):
                child.kill()
        if self._placed is not None:
            self._placed.kill()


class _StepOfRanks(NamedTuple):
    """A step of all ranks. Results are collected in order."""

    result: Callable[[], ModelRunnerOutput]
