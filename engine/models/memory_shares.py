"""The plan of the memory of several models, and models that keep to it.

Owns: the question to a process that may import torch, and the KV cache that each model is given by its share.
"""

import json
import logging
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace

from engine.models.entries import ModelSpec
from engine.models.ledger import DoesNotFit, describe, share_in_turns, share_out
from engine.models.placement import Reservation
from engine.options.declaration import OptionError
from engine.processes import child_process
from engine.processes.child_environment import child_environment
from worker.doctor_findings import Finding, MemoryNeeds

log = logging.getLogger(__name__)

MemoryPlan = dict[str, tuple[MemoryNeeds, int]]
"""The needs of each model and its bytes of KV cache, by its first name."""
MAX_SURVEY_S = 300.0
"""Time limit; importing torch from a cold disk takes most of it."""


def _shared_out(models: Sequence[ModelSpec], needs: dict[str, MemoryNeeds]) -> MemoryPlan:
    pinned = {each.names.served[0] for each in models if each.keep.is_pinned}
    try:
        if all(each.keep.is_always_loaded for each in models):
            shares = share_out(needs)
        else:
            shares = share_in_turns(needs, pinned)
    except DoesNotFit as error:
        fix = "serve fewer, take smaller or quantized ones, or ask for shorter contexts with max_model_len"
        raise OptionError("memory", str(error), fix) from error
    return {name: (each, shares[name]) for name, each in needs.items()}


def plan_lines(plan: MemoryPlan) -> list[str]:
    """Describe the part of each model."""
    return [describe(name, needs, share_bytes) for name, (needs, share_bytes) in plan.items()]


def with_shares(models: tuple[ModelSpec, ...]) -> tuple[ModelSpec, ...]:
    """Give each of several models its part of the memory, where one alone measures. Raises OptionError."""
    if len(models) == 1 and models[0].keep.is_always_loaded:
        return models
    models, plan = planned(models)
    for line in plan_lines(plan):
        log.info("memory: %s", line)
    return tuple(_with_share(spec, plan) for spec in models)


def planned(models: Sequence[ModelSpec]) -> tuple[tuple[ModelSpec, ...], MemoryPlan]:
    """Share out the memory among all that can be loaded, and note the faults of the others.

    Raises OptionError, with the numbers if the models do not fit together.
    """
    asked = [each for each in models if not each.fault]
    found = _ask(asked) if asked else {}
    models = tuple(_judged(spec, found.get(spec.names.served[0])) for spec in models)
    needs = {name: each for name, each in found.items() if isinstance(each, MemoryNeeds)}
    return models, _shared_out([each for each in models if not each.fault], needs)


def _judged(spec: ModelSpec, found: MemoryNeeds | Finding | None) -> ModelSpec:
    """Note what is wrong with a model on demand. Raises OptionError for one that is loaded at the start."""
    if not isinstance(found, Finding):
        return spec
    if spec.keep.at_start:
        raise OptionError("memory", found.what, found.fix)
    return spec.failed(found.what, found.fix)


def _with_share(spec: ModelSpec, plan: MemoryPlan) -> ModelSpec:
    if spec.fault:  # it is never loaded
        return replace(spec, room=Reservation(device="none", num_bytes=0, budget_bytes=0))
    needs, share_bytes = plan[spec.names.served[0]]
    room = Reservation(
        device=needs.device, num_bytes=needs.fixed_bytes + share_bytes, budget_bytes=needs.budget_bytes
    )
    spec = replace(spec, room=room)
    worker = spec.engine.worker
    if not share_bytes or worker.num_blocks is not None or worker.kv_cache_bytes is not None:
        return spec
    num_here = worker.num_engines if needs.device == "cpu" else 1  # engines that divide it
    worker = replace(worker, kv_cache_bytes=share_bytes // num_here)
    return replace(spec, engine=replace(spec.engine, worker=worker))


def run_survey(asked: str) -> subprocess.CompletedProcess[str]:
    """Ask the process that may import torch. Raises TimeoutExpired."""
    return subprocess.run(
        [*child_process.INTERPRETER, "-m", "worker.survey.process"],
        input=asked,
        capture_output=True,
        text=True,
        timeout=MAX_SURVEY_S,
        check=False,
        env=child_environment(),
    )


def _ask(models: Sequence[ModelSpec]) -> dict[str, MemoryNeeds | Finding]:
    """Ask a process of its own for the needs of each model, or its fault. Raises OptionError."""
    asked = json.dumps([asdict(each.engine.worker) for each in models])
    try:
        done = run_survey(asked)
    except subprocess.TimeoutExpired:
        why = f"torch and the devices gave no answer within {MAX_SURVEY_S:.0f} s"
        raise OptionError("memory", why, "see what `tokenyard doctor` says of each model") from None
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != len(models):
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        why = f"the process that foresees it {child_process.describe_exit(done.returncode)}: {reason}"
        raise OptionError("memory", why, "see what `tokenyard doctor` says of each model")
    return {
        spec.names.served[0]: Finding(**each) if "topic" in each else MemoryNeeds(**each)
        for spec, each in zip(models, lines, strict=True)
    }
