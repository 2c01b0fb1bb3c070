"""The engine's own loop on a machine and a clock of ours: its trace, and what a client measures."""

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from engine.core.loop import EngineLoop
from engine.core.step_trace import StepTrace
from engine.process_messages import AddRequest, Outputs, ToClient, ToEngine
from scheduler.config import SchedulerConfig
from scheduler.messages import ModelRunnerOutput, SamplingParams, SchedulerOutput, SequenceId, ServiceTerms
from scheduler.scheduler import Scheduler


class Request(NamedTuple):
    at_s: float
    prompt_len: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A small model on a CPU. Decodes vary by a large part, prompts by a small one; some steps are late."""

    base_s: float = 0.009
    per_token_s: float = 0.0009
    per_decode_s: float = 0.0002
    decode_spread: float = 0.12
    prefill_spread: float = 0.05
    late_share: float = 0.03
    mean_late_s: float = 0.02
    between_s: float = 0.0004
    """Time of the loop beside the model, for each step."""
    before_s: float = 0.003
    after_s: float = 0.002
    """HTTP, before a request comes to the engine and after each of its tokens left it."""


QUIET = Machine(decode_spread=0.0, prefill_spread=0.0, late_share=0.0)


class _Computed(NamedTuple):
    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


@dataclass
class _Server:
    """Worker, mailbox and clock of one loop."""

    machine: Machine
    random: Random
    letters: deque[tuple[float, AddRequest]]
    now_s: float = 1000.0
    token_times_s: dict[SequenceId, list[float]] = field(default_factory=dict)
    chunks: list[int] = field(default_factory=list)
    num_ended: int = 0

    def launch(self, plan: SchedulerOutput) -> _Computed:
        machine = self.machine
        num_decodes = sum(share.num_tokens == 1 for share in plan.scheduled)
        num_tokens = plan.num_scheduled_tokens
        seconds = machine.base_s + machine.per_token_s * num_tokens + machine.per_decode_s * num_decodes
        spread = machine.decode_spread
        if num_tokens > num_decodes:
            spread = machine.prefill_spread
            self.chunks.append(num_tokens - num_decodes)
        seconds *= math.exp(self.random.gauss(0, spread))
        if self.random.random() < machine.late_share:
            seconds += self.random.expovariate(1 / machine.mean_late_s)
        self.now_s += seconds
        tokens = {share.sequence_id: (5,) for share in plan.scheduled if share.samples}
        return _Computed(ModelRunnerOutput(token_ids=tokens, logprobs={}, failures={}))

    def receive(self, *, wait_s: float) -> list[ToEngine]:
        if self.letters and self.letters[0][0] > self.now_s:
            self.now_s = max(self.now_s, min(self.letters[0][0], self.now_s + wait_s))
        come: list[ToEngine] = []
        while self.letters and self.letters[0][0] <= self.now_s:
            come.append(self.letters.popleft()[1])
        return come

    def send(self, message: ToClient) -> None:
        if isinstance(message, Outputs):
            self.now_s += self.machine.between_s
            for output in message.outputs:
                times_s = self.token_times_s.setdefault(output.sequence_id, [])
                times_s += [self.now_s + self.machine.after_s] * len(output.token_ids)
                self.num_ended += output.finish_reason is not None


def serve(
    folder: Path, config: SchedulerConfig, machine: Machine, requests: Sequence[Request], seed: int = 0
) -> list[int]:
    """Serve the requests. Writes steps.jsonl and run.json; returns the prompt tokens of steps with any."""
    letters = deque(
        (request.at_s + machine.before_s, _letter(number, request)) for number, request in enumerate(requests)
    )
    server, trace = _Server(machine, Random(seed), letters), StepTrace(folder / "steps.jsonl")
    loop = EngineLoop(Scheduler(config), server, server, lambda: server.now_s, trace)
    while server.num_ended < len(requests):
        loop.turn()
    trace.close()
    records = [
        _record(request, server.token_times_s[SequenceId(number)]) for number, request in enumerate(requests)
    ]
    (folder / "run.json").write_text(json.dumps({"requests": records}))
    return server.chunks


def _letter(number: int, request: Request) -> AddRequest:
    return AddRequest(
        sequence_ids=(SequenceId(number),),
        prompt_token_ids=tuple((number * 131 + place * 7) % 5000 for place in range(request.prompt_len)),
        params=SamplingParams(max_tokens=request.max_tokens),
        terms=ServiceTerms(),
    )


def _record(request: Request, times_s: list[float]) -> dict[str, object]:
    return {
        "outcome": "completed",
        "start_s": request.at_s,
        "ttft_s": times_s[0] - request.at_s,
        "e2e_s": times_s[-1] - request.at_s,
        "chunk_gaps_s": [after - before for before, after in pairwise(times_s)],
        "num_prompt_tokens": request.prompt_len,
        "num_cached_tokens": 0,
        "num_output_tokens": request.max_tokens,
        "priority": 0,
    }
