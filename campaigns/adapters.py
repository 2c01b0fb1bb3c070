"""Tokens a second with four adapters among the clients, beside the same clients on the base alone.

    python -m campaigns.adapters --model FOLDER [--clients 8] [--tokens 96] [--rank 16]

Scheduler and worker in one process, without HTTP. Three worlds take turns, so that what else the machine does
falls on all of them: a worker without adapters, one that could have some while all clients use the base, and
one where every second client has one of four adapters (of random numbers) and where all have.

Owns: the worlds that are compared, and the table.
Never: is a test: a time proves nothing about another machine.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from campaigns.gpu.driving import scheduler_config
from scheduler.messages import SamplingParams, SequenceId, SequenceInputs
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from worker.worker import Worker
from worker.worker_config import AdapterFolder, AdapterLimits, ModelFacts, WorkerConfig

_PROMPT_TOKENS = 64
_NUM_ADAPTERS = 4
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Path, *, rank: int, seed: int) -> None:
    """Write an adapter with an update of every projection."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                module = name.removesuffix(".weight")
                if module.split(".")[-1] in _TARGETS:
                    num_outputs, num_inputs = weights.get_slice(name).get_shape()
                    key = f"base_model.model.{module}"
                    down = torch.randn((rank, num_inputs), generator=generator) / num_inputs
                    up = torch.randn((num_outputs, rank), generator=generator) / rank
                    tensors[f"{key}.lora_A.weight"] = down.bfloat16()
                    tensors[f"{key}.lora_B.weight"] = up.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


class World:
    """A loaded model, with or without adapters."""

    def __init__(self, model: str, adapters: tuple[AdapterFolder, ...]) -> None:
        limits = AdapterLimits(max_in_step=len(adapters), max_in_memory=len(adapters))
        config = WorkerConfig(model_path=model, max_model_len=1024, adapter_limits=limits, adapters=adapters)
        self._worker = Worker(config)
        self._facts: ModelFacts = self._worker.load(lambda _: None)
        self.identities = [facts.identity for facts in self._facts.adapters]
        self._next_id = 1

    def run(self, adapters: list[str], *, num_tokens: int) -> float:
        """Return tokens a second of decoding, of one client for each entry; empty: the base."""
        limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_adapters": _NUM_ADAPTERS}
        scheduler = Scheduler(scheduler_config(self._facts, **limits))
        ids = []
        for number, adapter in enumerate(adapters):
            random = Random(number)
            prompt = tuple(random.randrange(self._facts.vocab_size) for _ in range(_PROMPT_TOKENS))
            ids.append(SequenceId(self._next_id + number))
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
            inputs = SequenceInputs(adapter=adapter)
            scheduler.add_request(Sequence(ids[-1], prompt, params, inputs=inputs), now_s=0.0)
        self._next_id += len(adapters)
        seconds, num_decoded = 0.0, 0
        while scheduler.has_unfinished_requests:
            started_s = time.perf_counter()
            plan = scheduler.schedule(now_s=0.0)
            result = self._worker.execute(plan)
            scheduler.update_from_output(plan, result)
            if not plan.new_sequences:
                seconds += time.perf_counter() - started_s
                num_decoded += sum(map(len, result.token_ids.values()))
        self._worker.execute(scheduler.schedule(now_s=0.0)._replace(released=tuple(ids)))
        return num_decoded / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for number in range(_NUM_ADAPTERS):
            folder = Path(root) / f"adapter-{number}"
            write_adapter(folder, Path(asked.model), rank=asked.rank, seed=number)
            folders.append(AdapterFolder(folder.name, str(folder)))
        plain, adapted = World(asked.model, ()), World(asked.model, tuple(folders))
    base = [""] * asked.clients
    four = [adapted.identities[number % _NUM_ADAPTERS] for number in range(asked.clients)]
    half = [adapter if number % 2 else "" for number, adapter in enumerate(four)]
    ways = {
        "a worker without adapters": (plain, base),
        "all on the base, beside adapters": (adapted, base),
        "every second client with an adapter": (adapted, half),
        "all clients with one of four": (adapted, four),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(asked.runs):
        for way, (world, adapters) in ways.items():
            speeds[way].append(world.run(adapters, num_tokens=asked.tokens))
    print(
        f"{asked.clients} clients, rank {asked.rank}; median and best of {asked.runs}, beside the first line"
    )
    first = sorted(speeds[next(iter(ways))])
    for way, each in speeds.items():
        median, best = sorted(each)[len(each) // 2], max(each)
        shares = f"{median / first[len(first) // 2]:.3f} {best / first[-1]:.3f}"
        print(f"{way:36} {median:7.1f} {best:7.1f} tokens/s  {shares}", flush=True)


if __name__ == "__main__":
    main()
