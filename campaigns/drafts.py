"""Tokens a second with and without drafts, side by side in one process: scheduler and worker, without HTTP.

    python -m campaigns.drafts --model FOLDER [--draft FOLDER | --head] [--clients 1,8,32] [--tokens 96]

The text that repeats is an edit: the prediction is the reply itself with a part of its tokens replaced, as a
file that is edited. Random text has no prediction; its drafts are n-grams of noise, or those of a smaller
model with --draft. A mistaken prediction has nothing to do with the reply: drafts are offered in each step,
and none is right. --head takes the checkpoint's own, compared with a worker without it, which keeps no hidden
states; and --prompts a file of prompts, one a line, since a head has learned what its model says.

A run ends with its first reply, so that all clients run meanwhile. Runs take turns, so that what else the
machine does falls on all of them. On a shared machine --cpu-seconds counts the processor time of one thread
instead.

Owns: the worlds that are compared, and the table.
Never: is a test: a time proves nothing about another machine.
"""

import argparse
import gc
import time
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from campaigns.gpu.driving import scheduler_config
from scheduler.config import DraftAdmission, DraftSupply
from scheduler.messages import FinishReason, ModelRunnerOutput, SamplingParams, SequenceId, SequenceInputs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.worker import Worker
from worker.worker_config import DraftMethod, ModelFacts, SpeculationConfig, WorkerConfig

_REPLACED = 0.08  # of the tokens of a reply, in the prediction of the same request


class World:
    """One loaded model, asked for the same requests in several ways."""

    def __init__(self, asked: argparse.Namespace, *, takes_head: bool) -> None:
        draft, speculation = asked.draft, SpeculationConfig(method=DraftMethod.NGRAM)
        if asked.head:
            speculation = SpeculationConfig(method=DraftMethod.MTP if takes_head else DraftMethod.PREDICTION)
        elif draft is not None:
            speculation = SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=draft)
        self._num_prompt_tokens = asked.prompt_tokens
        self._prompts = [] if asked.prompts is None else _read_prompts(asked.model, asked.prompts)
        self._clock = time.process_time if asked.cpu_seconds else time.perf_counter
        config = WorkerConfig(
            model_path=asked.model,
            max_model_len=1024,
            num_threads=1 if asked.cpu_seconds else None,
            speculation=speculation,
        )
        self._worker = Worker(config)
        self._facts: ModelFacts = self._worker.load(lambda _: None)
        gc.collect()
        gc.freeze()  # as a server does, whose steps are short
        steps: Any = self._worker._steps
        if self._facts.has_draft_model:
            steps._draft_model.clock = self._clock
        self._next_id = 1
        self._schedulers: dict[int | None, Scheduler] = {}

    def run(
        self, predictions: list[tuple[int, ...]], *, num_tokens: int, fixed: int | None
    ) -> tuple[float, list[list[int]]]:
        """Return tokens a second of decoding while all run, and the replies up to the first that ends.

        `fixed` drafts; None: as the rule has it.
        """
        admission = DraftAdmission.PAYING if fixed is None else DraftAdmission.ALL
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
        settings: dict[str, Any] = {"draft_admission": admission, "max_drafts": self._facts.max_drafts}
        if self._facts.has_draft_model and fixed != 0:
            settings |= {"draft_supply": DraftSupply.ASKED, "max_drafts": fixed or self._facts.max_drafts}
        scheduler = self._schedulers.get(fixed)
        if scheduler is None:
            scheduler = Scheduler(scheduler_config(self._facts, **limits, **settings))
            self._schedulers[fixed] = scheduler
        texts: dict[SequenceId, list[int]] = {}
        for number, prediction in enumerate(predictions):
            prompt = self._prompt(number)
            sequence_id = SequenceId(self._next_id + number)
            temperature = 0.0 if self._prompts else 1.0
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=num_tokens)
            inputs = SequenceInputs(prediction=prediction)
            scheduler.add_request(Sequence(sequence_id, prompt, params, inputs=inputs), now_s=self._clock())
            texts[sequence_id] = []
        self._next_id += len(predictions)
        seconds, num_decoded = 0.0, 0
        while scheduler.has_unfinished_requests and all(len(text) < num_tokens for text in texts.values()):
            started_s = self._clock()
            plan = scheduler.schedule(now_s=started_s)
            result = self._worker.execute(plan)
            took_s = self._clock() - started_s
            passes = result.draft_passes
            scheduler.observe_step(plan, took_s - sum(each for _, each in passes), passes)
            for output in scheduler.update_from_output(plan, result).get(0, []):
                texts[output.sequence_id] += output.token_ids
            scheduler.update_draft_token_ids(_cut(result, fixed))
            if not plan.new_sequences:
                seconds += self._clock() - started_s
                num_decoded += sum(map(len, result.token_ids.values()))
        scheduler.finish_requests(list(texts), FinishReason.ABORTED)
        scheduler.take_outputs()
        self._worker.execute(scheduler.schedule(now_s=self._clock())._replace(released=tuple(texts)))
        return num_decoded / seconds, list(texts.values())

    def _prompt(self, number: int) -> tuple[int, ...]:
        if self._prompts:
            return self._prompts[number % len(self._prompts)]
        random, most = Random(number), min(100_000, self._facts.vocab_size)
        return tuple(random.randrange(1000, most) for _ in range(self._num_prompt_tokens))


def _read_prompts(folder: str, path: str) -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [tuple(tokenizer.encode(line.replace("\\n", "\n")).ids) for line in lines if line]


def _cut(result: ModelRunnerOutput, fixed: int | None) -> dict[SequenceId, tuple[int, ...]]:
    drafts = result.draft_token_ids
    return {each: ids if fixed is None else ids[:fixed] for each, ids in drafts.items()}


def _begin_alike(one: list[int], other: list[int]) -> bool:
    """Whether they agree as far as both go: each run ends with the first reply that does."""
    return all(here == there for here, there in zip(one, other, strict=False))


def _edited(reply: list[int], seed: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(1000) if random.random() < _REPLACED else token for token in reply)


def _mistaken(reply: list[int], seed: int) -> tuple[int, ...]:
    random = Random(-1 - seed)
    return tuple(random.randrange(1000) for _ in reply)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--head", action="store_true", help="drafts by the checkpoint's own head")
    parser.add_argument("--prompts", help="file of prompts, one a line, answered greedily")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fixed", default="2,4,8")
    parser.add_argument("--kinds", default="edit,random,mistaken", help="texts without a draft model")
    parser.add_argument("--cpu-seconds", action="store_true", help="one thread, for a machine that is shared")
    asked = parser.parse_args()
    world = World(asked, takes_head=True)
    without = World(asked, takes_head=False) if asked.head else world
    ways: dict[str, int | None] = {"none": 0, "rule": None}
    ways |= {number: int(number) for number in asked.fixed.split(",")}
    for num_clients in map(int, asked.clients.split(",")):
        plain: list[tuple[int, ...]] = [()] * num_clients
        _, replies = without.run(plain, num_tokens=asked.tokens, fixed=0)
        edits = [_edited(reply, seed) for seed, reply in enumerate(replies)]
        mistaken = [_mistaken(reply, seed) for seed, reply in enumerate(replies)]
        texts = {"edit": edits, "random": plain, "mistaken": mistaken, "model": plain}
        wanted = ["model"] if asked.head or asked.draft is not None else asked.kinds.split(",")
        kinds = [(kind, texts[kind]) for kind in wanted]
        for kind, predictions in kinds:
            # To verify what is never right takes its time, which teaches nothing.
            tried = {way: ways[way] for way in ("none", "rule")} if kind == "mistaken" else ways
            speeds: dict[str, list[float]] = {way: [] for way in tried}
            for _ in range(1 + asked.runs):
                for way, fixed in tried.items():
                    of_way = without if way == "none" else world
                    speed, found = of_way.run(predictions, num_tokens=asked.tokens, fixed=fixed)
                    assert all(map(_begin_alike, replies, found)), "drafts changed a token"
                    speeds[way].append(speed)
            # As in a server, the rule goes on with what it has learnt: the first run of each way is for that.
            best = {way: sorted(each[1:])[asked.runs // 2] for way, each in speeds.items()}
            shown = "  ".join(f"{way} {speed / best['none']:.2f}" for way, speed in best.items())
            at_first = speeds["rule"][0] / best["none"]
            print(
                f"{kind:8} {num_clients:3} clients: {best['none']:6.1f} tok/s without; {shown}; "
                f"rule, first run {at_first:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
