"""A tiny model on the device, loaded as the server loads one.

Owns: whether it draws the same tokens with graphs and without, with two plans in flight, and after a swap.
Never: many ways (campaigns/gpu/tokens.py has them), or a model of any size.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.gpu.driving import Drive, open_worker, scheduler_config
from campaigns.gpu.first.trial import Build, Disagreement, Trial
from campaigns.gpu.shapes import write_checkpoint
from scheduler.config import PreemptionMode, PrefixCaching
from worker.worker import Worker
from worker.worker_config import ModelFacts

_PROMPTS = tuple([(number * 7 + place * place) % 64 for place in range(5 + number)] for number in (1, 2, 3))
_MAX_TOKENS = 5
_INPUTS = f"{len(_PROMPTS)} prompts of {len(_PROMPTS[0])} to {len(_PROMPTS[-1])} tokens, float32"
# A sequence needs two of them in the end.
_SCARCE_BLOCKS = 3


def worker_trials(folder: Path, target: str) -> list[Build]:
    """`folder` is empty; target is as for open_worker. Each trial builds on those before it."""
    model = _Model(folder, target)
    scarce = {"num_blocks": _SCARCE_BLOCKS, "preemption_mode": PreemptionMode.SWAP}
    works: dict[str, Callable[[], str]] = {
        "a model is loaded, kernel by kernel": model.load_without_graphs,
        "it draws tokens": model.draw_one_at_a_time,
        "a model is loaded, with graphs": model.load_with_graphs,
        "graphs draw the same tokens": partial(model.draw_again, max_plans_in_flight=1),
        "two plans in flight draw them, too": partial(model.draw_again, max_plans_in_flight=2),
        "and so does who was swapped": partial(model.draw_again, **scarce),
    }
    return [partial(Trial, name=name, inputs=_INPUTS, work=work) for name, work in works.items()]


class _Model:
    def __init__(self, folder: Path, target: str) -> None:
        self._folder, self._target = folder, target
        self._opened: tuple[Worker, ModelFacts] | None = None
        self._expected: list[list[int]] = []

    def load_without_graphs(self) -> str:
        write_checkpoint("tiny", self._folder)
        return self._load(enforce_eager=True)

    def load_with_graphs(self) -> str:
        return self._load(enforce_eager=False)

    def draw_one_at_a_time(self) -> str:
        self._expected, _ = self._draw(max_plans_in_flight=1)
        return " ".join(map(str, self._expected[0]))

    def draw_again(self, **changes: Any) -> str:
        found, drive = self._draw(**changes)
        if found != self._expected:
            raise Disagreement(f"{found} instead of {self._expected}")
        preemptions = drive.scheduler.stats().preemptions
        num_swapped = sum(each.num for each in preemptions if each.was_swapped)
        if changes.get("preemption_mode") is PreemptionMode.SWAP and not num_swapped:
            raise Disagreement("nobody was swapped")
        return f"{num_swapped} swapped" if num_swapped else f"{len(drive.steps)} steps"

    def _load(self, **settings: Any) -> str:
        if self._opened is not None:
            self._opened[0].close()
            self._opened = None
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 32, "block_size": 8}
        memory = {"num_blocks": 16, "swap_space_bytes": 1 << 20}
        self._opened = open_worker(
            self._folder, self._target, dtype="float32", **limits, **memory, **settings
        )
        facts = self._opened[1]
        if not facts.runs_ahead:
            raise Disagreement("it is served without the kernels; the log says why")
        return f"{facts.num_blocks} blocks"

    def _draw(self, **changes: Any) -> tuple[list[list[int]], Drive]:
        if self._opened is None:
            raise Disagreement("no model was loaded")
        worker, facts = self._opened
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "watermark": 0.0}
        config = scheduler_config(facts, **{**limits, "prefix_caching": PrefixCaching.OFF, **changes})
        drive = Drive(worker, config)
        for prompt in _PROMPTS:
            drive.add(prompt, _MAX_TOKENS)
        drive.run().free_rows()
        return list(drive.tokens.values()), drive
