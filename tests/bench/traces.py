"""Step traces of a small world, as the engine would write them."""

from pathlib import Path

from bench.simulate.fitting.fitted_step_time import LinearStepTime
from engine.core.step_trace import StepFacts, StepTrace
from engine.process_messages import AddRequest, StepTimes
from scheduler.config import SchedulingPolicy
from scheduler.messages import SamplingParams, SequenceId, ServiceTerms
from tests.fakes import make_sequence
from tests.world import World, small_config

MODEL = LinearStepTime(base_s=0.004, per_token_s=3e-5, per_decode_s=2e-5, per_context_token_s=1e-6)


def arrival(sequence_id: SequenceId) -> AddRequest:
    """A request as the trace notes it: by its sequences alone."""
    return AddRequest(
        sequence_ids=(sequence_id,),
        prompt_token_ids=(1,),
        params=SamplingParams(max_tokens=1, seed=0),
        terms=ServiceTerms(),
    )


def write_trace(path: Path, world: World, *, max_steps: int = 200) -> None:
    """Run `world` to its end; each step takes what MODEL says."""
    trace = StepTrace(path)
    for seq in world.scheduler.waiting_sequences():
        trace.note_arrivals(arrival(seq.sequence_id))
    execute_s = 0.0
    for _ in range(max_steps):
        if not world.scheduler.has_unfinished_requests:
            break
        now_s = world.now_s
        plan = world.step()
        num_decodes = sum(share.num_tokens == 1 for share in plan.scheduled)
        num_context_tokens = sum(share.start + share.num_tokens for share in plan.scheduled)
        execute_s += MODEL.seconds(plan.num_scheduled_tokens, num_decodes, num_context_tokens)
        trace.record(
            plan,
            StepFacts(
                now_s=now_s,
                stats=world.scheduler.stats(),
                waiting={"blocks": world.scheduler.get_request_counts().waiting},
                times=StepTimes(execute_s=execute_s),
            ),
        )
    trace.close()


def busy_world() -> World:
    """Eight blocks for four sequences that want more: somebody is preempted. The last one is urgent."""
    world = World(small_config(policy=SchedulingPolicy.PRIORITY))
    lengths = ((1, 6), (2, 9), (3, 5), (4, 11), (5, 7))
    world.add(*(make_sequence(n, list(range(n, n + length)), max_tokens=9) for n, length in lengths))
    world.step()
    world.step()
    world.add(make_sequence(6, list(range(50, 60)), max_tokens=5, priority=-5))
    return world


def traced(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    write_trace(path, busy_world())
    return path
