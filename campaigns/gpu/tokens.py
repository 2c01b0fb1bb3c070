"""The same tokens, whichever way they are computed.

Owns: the workload, and the ways: kernel by kernel or by graphs, alone or together, in chunks, preempted,
swapped, one step at a time or two.
Never: judges what the tokens say.

In float32, where the order of sums changes the last bits only and the two best tokens are well apart. In
bfloat16 rounding decides between equals: the share of equal tokens is told there, and nothing is asked.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaigns.gpu.driving import Drive, open_worker, scheduler_config
from campaigns.gpu.results import Record, Table
from campaigns.gpu.shapes import write_checkpoint
from scheduler.config import PreemptionMode, PrefixCaching

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings
    from worker.worker import Worker
    from worker.worker_config import ModelFacts


class TokensDiffer(Exception):
    """At least one way draws other tokens in float32; the table says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    chunk_tokens: int
    """Tokens of a step, where prompts are to be computed in chunks."""
    num_scarce_blocks: int
    """Blocks so few that a sequence is preempted."""
    worker: dict[str, Any] = field(default_factory=dict)


def run(record: Record, settings: "Settings") -> None:
    """Raises TokensDiffer."""
    workload = chosen_workload(settings)
    table = record.table("Ways", "Format", "Way", "Sequences alike", "Tokens alike", "Preempted", "Swapped")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint("tiny" if settings.is_smoke else "small", Path(folder))
        is_alike = compare(table, workload, checkpoint, settings.target, "float32")
        if not settings.is_smoke:
            compare(table, workload, checkpoint, settings.target, "bfloat16")
    record.figure("is_alike", is_alike)
    if not is_alike:
        raise TokensDiffer("some ways draw other tokens in float32")


def chosen_workload(settings: "Settings") -> Workload:
    return _smoke_workload() if settings.is_smoke else _workload()


def compare(
    table: Table, workload: Workload, checkpoint: Path, target: str, dtype: str, **options: str
) -> bool:
    """Whether all ways draw the tokens of the first: each prompt alone, step by step, kernel by kernel."""
    settings = {**workload.worker, **options}
    eager, facts = open_worker(checkpoint, target, dtype=dtype, enforce_eager=True, **settings)
    expected: list[list[int]] = []
    for prompt in workload.prompts:
        expected += _served(eager, facts, [prompt], workload.max_tokens, max_plans_in_flight=1)[0]
    is_alike = True
    told = " ".join(["", *options.values()])
    is_alike &= _try_ways(table, f"kernel by kernel{told}", (eager, facts), workload, expected)
    eager.close()
    graphs, facts = open_worker(checkpoint, target, dtype=dtype, **settings)
    is_alike &= _try_ways(table, f"graphs{told}", (graphs, facts), workload, expected)
    graphs.close()
    return is_alike


def _try_ways(
    table: Table,
    how: str,
    opened: "tuple[Worker, ModelFacts]",
    workload: Workload,
    expected: list[list[int]],
) -> bool:
    worker, facts = opened
    is_alike = True
    for way, changes in _ways(workload):
        tokens, drive = _served(worker, facts, workload.prompts, workload.max_tokens, **changes)
        num_alike = sum(got == wanted for got, wanted in zip(tokens, expected, strict=True))
        num_tokens = sum(_num_equal(got, wanted) for got, wanted in zip(tokens, expected, strict=True))
        preemptions = drive.scheduler.stats().num_preemptions
        table.add(
            facts.dtype,
            f"{how}, {way}",
            f"{num_alike} of {len(expected)}",
            f"{num_tokens / sum(map(len, expected)):.1%}",
            sum(preemptions.values()),
            sum(num for (_, was_swapped), num in preemptions.items() if was_swapped),
        )
        is_alike &= num_alike == len(expected)
    return is_alike


def _ways(workload: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    scarce = {"num_blocks": workload.num_scarce_blocks}
    yield "together, one step at a time", {"max_plans_in_flight": 1}
    yield "together, overlapped", {}
    yield "in chunks", {"max_chunk_tokens": workload.chunk_tokens}
    yield "preempted, computed again", {**scarce, "preemption_mode": PreemptionMode.RECOMPUTE}
    yield "preempted, swapped", {**scarce, "preemption_mode": PreemptionMode.SWAP}


def _served(
    worker: "Worker",
    facts: "ModelFacts",
    prompts: "tuple[tuple[int, ...], ...] | list[tuple[int, ...]]",
    max_tokens: int,
    **changes: Any,
) -> tuple[list[list[int]], Drive]:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": facts.max_model_len, "watermark": 0.0}
    config = scheduler_config(facts, **{**limits, "prefix_caching": PrefixCaching.OFF, **changes})
    drive = Drive(worker, config)
    for prompt in prompts:
        drive.add(list(prompt), max_tokens)
    drive.run()
    drive.free_rows()
    return list(drive.tokens.values()), drive


def _num_equal(got: list[int], wanted: list[int]) -> int:
    """Up to the first that differs."""
    for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return place
    return min(len(got), len(wanted))


def _prompt(number: int, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple((number * 7919 + place * place * 31 + place) % vocab_size for place in range(length))


def _workload() -> Workload:
    lengths = (1, 5, 16, 17, 33, 64, 100, 127, 200, 255, 300, 420)
    return Workload(
        prompts=tuple(_prompt(number, length, 1024) for number, length in enumerate(lengths, 1)),
        max_tokens=48,
        chunk_tokens=50,
        num_scarce_blocks=40,
        worker={
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "max_model_len": 512,
            "block_size": 16,
            "num_blocks": 512,
            "swap_space_bytes": 256 << 20,
        },
    )


def _smoke_workload() -> Workload:
    return Workload(
        prompts=tuple(_prompt(number, length, 64) for number, length in enumerate((3, 7, 8), 1)),
        max_tokens=5,
        chunk_tokens=4,
        num_scarce_blocks=3,
        worker={
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 32,
            "block_size": 8,
            "num_blocks": 16,
            "swap_space_bytes": 1 << 20,
        },
    )
