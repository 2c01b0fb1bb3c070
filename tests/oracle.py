"""A slow and obvious simulator of the scheduler: plain counts, everything recomputed in every step.

It knows no blocks, only how many each sequence holds, and no prefix cache. What it says about who gets
how many tokens and who is preempted must agree with the real one.
"""

from dataclasses import dataclass, field

from scheduler.config import SchedulerConfig, SchedulingPolicy


@dataclass
class Client:
    """One sequence as the oracle sees it."""

    id: int
    priority: int
    num_tokens: int
    num_left: int  # to generate
    num_computed: int = 0
    num_blocks: int = 0


@dataclass
class Oracle:
    config: SchedulerConfig
    waiting: list[Client] = field(default_factory=list)
    running: list[Client] = field(default_factory=list)
    num_preemptions: int = 0
    """Preemptions of the last step."""

    def step(self) -> dict[int, int]:
        """Tokens of each sequence in a step; one that reaches the end of what is known gains a token."""
        self.running.sort(key=self._rank)
        self.num_preemptions = 0
        num_tokens = self.config.max_num_batched_tokens
        num_prefill = self.config.max_prefill_tokens or num_tokens
        granted: dict[int, int] = {}
        preempted = False
        for client in list(self.running):
            if client not in self.running:
                continue
            while client in self.running and self._free() < self._missing(client):
                victim = self.running[-1]
                if victim is client and len(self.running) == 1:
                    self.running.remove(client)  # outgrew the pool
                    break
                preempted = True
                self._preempt(victim)
            if client not in self.running:
                break
            client.num_blocks += self._missing(client)
            wanted = client.num_tokens - client.num_computed
            if wanted > 1:
                after = self.running[self.running.index(client) + 1 :]
                wanted = min(wanted, num_tokens - sum(1 for c in after if c.num_tokens - c.num_computed == 1))
                wanted = max(min(wanted, num_prefill), 0)
                num_prefill -= wanted
            if wanted:
                granted[client.id] = wanted
                num_tokens -= wanted
        if not preempted:
            self._admit(num_tokens, num_prefill, granted)
        self._compute(granted)
        return granted

    def _admit(self, num_tokens: int, num_prefill: int, granted: dict[int, int]) -> None:
        while self.waiting and min(num_tokens, num_prefill) and len(self.running) < self.config.max_num_seqs:
            self.waiting.sort(key=self._rank)
            client = self.waiting[0]
            watermark = int(self.config.watermark * self.config.num_blocks) if self.running else 0
            if self._free() < self._missing(client) + watermark:
                return
            self.running.append(self.waiting.pop(0))
            client.num_blocks = self._missing(client)
            granted[client.id] = min(client.num_tokens, num_tokens, num_prefill)
            num_tokens -= granted[client.id]
            num_prefill -= granted[client.id]

    def _compute(self, granted: dict[int, int]) -> None:
        for client in list(self.running):
            client.num_computed += granted.get(client.id, 0)
            if client.num_computed == client.num_tokens:
                client.num_tokens += 1
                client.num_left -= 1
                if client.num_left == 0 or client.num_tokens >= self.config.max_model_len:
                    self.running.remove(client)

    def _preempt(self, victim: Client) -> None:
        self.running.remove(victim)
        self.waiting.append(victim)
        victim.num_blocks = victim.num_computed = 0
        self.num_preemptions += 1

    def _free(self) -> int:
        return self.config.num_blocks - sum(client.num_blocks for client in self.running)

    def _missing(self, client: Client) -> int:
        return -(-client.num_tokens // self.config.block_size) - client.num_blocks

    def _rank(self, client: Client) -> tuple[int, ...]:
        by_priority = self.config.policy is SchedulingPolicy.PRIORITY
        return (client.priority if by_priority else 0, client.id)
