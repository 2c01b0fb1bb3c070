"""Steps of models in several forms of weights, by turns in one process.

    python -m campaigns.step_ratio MODEL ... --forms plain int4 int4+head8+int8 --turns 8

A form is `plain`, or what `--quantization` takes; `+head8` adds `--quantize-head int8`, and `+int8` adds
`--activations int8`. Machines, and their memory above all, change from minute to minute: forms take turns,
so that each has the same minutes, and what counts are ratios to the first one. A turn is a prompt of one
sequence and the steps of its reply, or the prompt alone (`--prefill`); with `--sequences N`, of N sequences
together. `--thread-time` counts the time that one thread computes, for a machine that is shared. Set
OMP_WAIT_POLICY=PASSIVE, as the engine process has it.

Owns: the table. Never: judges, or serves.
"""

import argparse
import gc
import statistics
import time
from itertools import count
from pathlib import Path
from random import Random

import torch

from scheduler.config import SchedulerConfig, SchedulingPolicy
from scheduler.messages import SamplingParams, SequenceId, ServiceTerms
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.worker import Worker
from worker.worker_config import WorkerConfig

_CACHE_BYTES = 1 << 30
_MOST_TOKENS = 1024
_WARM_STEPS = 4
"""First steps of a reply that do not count, the prompt's among them."""


class _Form:
    """A worker of its own and a scheduler, which plans for nobody else."""

    def __init__(self, name: str, model: Path, options: argparse.Namespace) -> None:
        quantization, *others = name.split("+")
        self.name = f"{model.name} {name}"
        self._num_sequences: int = options.sequences
        self._clock = time.process_time if options.thread_time else time.perf_counter
        self.times_ms: list[list[float]] = []
        self._random, self._numbers = Random(0), count()
        self._worker = Worker(
            WorkerConfig(
                model_path=str(model),
                quantization="none" if quantization == "plain" else quantization,
                quantize_head="int8" if "head8" in others else "none",
                activations="int8" if "int8" in others else "none",
                kv_cache_bytes=_CACHE_BYTES,
                max_model_len=_MOST_TOKENS,
                max_num_seqs=options.sequences,
                max_num_batched_tokens=_MOST_TOKENS,
                num_threads=1 if options.thread_time else options.num_threads,
            )
        )
        facts = self._worker.load(lambda _: None)
        self._vocab_size = facts.vocab_size
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=facts.num_blocks,
                block_size=facts.block_size,
                groups=facts.groups,
                max_num_seqs=options.sequences,
                max_num_batched_tokens=_MOST_TOKENS,
                max_model_len=_MOST_TOKENS,
                policy=SchedulingPolicy.FCFS,
            )
        )

    def take_turn(self, num_prompt_tokens: int, num_reply_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=num_reply_tokens, temperature=0.0)
        for _ in range(self._num_sequences):
            prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(num_prompt_tokens))
            number = SequenceId(next(self._numbers))
            self._scheduler.add_request(
                Sequence(number, prompt, sampling, ServiceTerms(tenant="")), now_s=0.0
            )
        times_ms = []
        while self._scheduler.has_unfinished_requests:
            times_ms.append(self._step_ms())
        self.times_ms.append(times_ms[_WARM_STEPS:] or times_ms)

    def _step_ms(self) -> float:
        started_s = self._clock()
        plan = self._scheduler.schedule(now_s=0.0)
        self._scheduler.update_from_output(plan, self._worker.execute(plan))
        return (self._clock() - started_s) * 1e3

    def close(self) -> None:
        self._worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="checkpoint folder")
    parser.add_argument("--forms", nargs="+", default=["plain", "int4+head8+int8"], metavar="FORM")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--thread-time", action="store_true", help="processor time; implies one thread")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="of each turn, side by side")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--reply-tokens", type=int, default=40)
    parser.add_argument("--prefill", action="store_true", help="of each turn the prompt's step counts")
    options = parser.parse_args()
    reply_tokens = 1 if options.prefill else options.reply_tokens
    if options.prompt_tokens + reply_tokens > _MOST_TOKENS:
        parser.error(f"a sequence has at most {_MOST_TOKENS} tokens here")
    if options.thread_time:
        torch.set_num_threads(1)
    forms = [_Form(name, model, options) for model in options.models for name in options.forms]
    gc.collect()
    gc.freeze()  # a collection would be somebody's step
    for _ in range(options.turns):
        for form in forms:
            form.take_turn(options.prompt_tokens, reply_tokens)
    _print_table(forms)
    for form in forms:
        form.close()


def _print_table(forms: list[_Form]) -> None:
    print(f"{'form':32}{'median ms':>12}{'best ms':>10}{'of medians':>12}{'of best':>10}{'by turns':>10}")
    medians = [[statistics.median(turn) for turn in form.times_ms] for form in forms]
    all_ms = [[time_ms for turn in form.times_ms for time_ms in turn] for form in forms]
    for form, of_turns, times_ms in zip(forms, medians, all_ms, strict=True):
        middle, best = statistics.median(times_ms), min(times_ms)
        by_turns = statistics.median(here / first for here, first in zip(of_turns, medians[0], strict=True))
        of_medians, of_best = middle / statistics.median(all_ms[0]), best / min(all_ms[0])
        print(f"{form.name:32}{middle:12.2f}{best:10.2f}{of_medians:12.3f}{of_best:10.3f}{by_turns:10.3f}")


if __name__ == "__main__":
    main()
