"""Workloads, sent to every server: the same prompts in the same order.

Owns: the named workloads, and prompts that are counted by the checkpoint's own tokenizer.
Never: the network.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from bench.load.workload import Pace, PlannedRequest, Shape, WordCost, plan, synthetic_prompts, words

_FEW_WORDS, _MANY_WORDS = 16, 256
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests and their pace, the same for every peer. Lengths in tokens.

    In a closed loop each client sends its next request when the last one is answered. With a `share` the
    same requests arrive as a Poisson process instead, at this share of what Tokenyard answers per second
    when so many clients are in a closed loop: its saturation.
    """

    name: str
    title: str
    concurrency: int
    input_len: int
    output_len: int
    shared_prefix_len: int = 0
    share: float | None = None

    def num_requests(self, per_client: int) -> int:
        return self.concurrency * per_client

    def requests(
        self, cost: WordCost, *, per_client: int, seed: int, saturation: float | None = None
    ) -> list[PlannedRequest]:
        """Plan the requests; `saturation`, in requests per second, is needed where there is a share of it."""
        pace = None
        if self.share is not None:
            assert saturation is not None
            pace = Pace(requests_per_s=self.share * saturation)
        return self._plan(cost, self.num_requests(per_client), self.output_len, seed, pace)

    def warm_up(self, cost: WordCost, *, seed: int) -> list[PlannedRequest]:
        """One short request of each client, so that nothing happens for the first time later on."""
        return self._plan(cost, self.concurrency, _WARM_UP_TOKENS, seed, None)

    def _plan(
        self, cost: WordCost, num: int, output_len: int, seed: int, pace: Pace | None
    ) -> list[PlannedRequest]:
        shape = Shape(
            num_prompts=num,
            input_len=self.input_len,
            output_len=output_len,
            shared_prefix_len=self.shared_prefix_len,
        )
        prompts = synthetic_prompts(shape, cost, seed)
        return plan(prompts, pace=pace, priority_mix=(), seed=seed)


SATURATION = Workload(
    name="thirty-two", title="32 clients, 128 in, 64 out", concurrency=32, input_len=128, output_len=64
)


def _poisson(percent: int) -> Workload:
    return replace(
        SATURATION,
        name=f"poisson-{percent}",
        title=f"Poisson arrivals at {percent} % of our saturation, 128 in, 64 out",
        share=percent / 100,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="one", title="1 client, 128 in, 64 out", concurrency=1, input_len=128, output_len=64),
        Workload(
            name="eight", title="8 clients, 128 in, 64 out", concurrency=8, input_len=128, output_len=64
        ),
        SATURATION,
        Workload(
            name="shared-prefix",
            title="8 clients, 512 in, of which 448 the same, 32 out",
            concurrency=8,
            input_len=512,
            output_len=32,
            shared_prefix_len=448,
        ),
        _poisson(50),
        _poisson(80),
    )
}


def word_cost(model: Path) -> WordCost:
    """Tokens of this checkpoint that words cost. Raises OSError where there is no tokenizer.json."""
    path = model / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    tokenizer = Tokenizer.from_file(str(path))
    few, many = (len(tokenizer.encode(words(num, Random(0))).ids) for num in (_FEW_WORDS, _MANY_WORDS))
    per_word = (many - few) / (_MANY_WORDS - _FEW_WORDS)
    return WordCost(per_word=per_word, per_prompt=max(0.0, few - _FEW_WORDS * per_word))
