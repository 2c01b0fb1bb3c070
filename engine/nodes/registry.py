"""The nodes that have come, and whether each may take part.

Owns: the comparison with the first node, and the time since each was heard.
"""

from dataclasses import dataclass

from engine.nodes.messages import SILENCE_S, Hello, Refused, Wait


@dataclass(slots=True)
class _Present:
    agent: bytes
    heard_s: float


class NodeRegistry:
    """All nodes but the first. `software` and `checkpoint` are those of the first.

    `num_gpus` are those that the ranks of each node take.
    """

    def __init__(self, num_nodes: int, *, software: str, checkpoint: str, num_gpus: int) -> None:
        self._num_nodes = num_nodes
        self._software, self._checkpoint, self._num_gpus = software, checkpoint, num_gpus
        self._present: dict[int, _Present] = {}
        self._is_begun = False

    @property
    def agents(self) -> list[bytes]:
        """Addresses of all nodes that are there."""
        return [each.agent for each in self._present.values()]

    @property
    def missing(self) -> list[int]:
        return [node for node in range(1, self._num_nodes) if node not in self._present]

    def node_of(self, agent: bytes) -> int | None:
        """Return the number of a node that has come; None for a stranger."""
        return next((node for node, each in self._present.items() if each.agent == agent), None)

    def begin(self) -> None:
        """Keep each place for its node from now on: another one would hide that the first was lost."""
        self._is_begun = True

    def take(self, agent: bytes, hello: Hello, now_s: float) -> Wait | Refused:
        """Enter a node, or say why not."""
        refusal = self._refuse(hello)
        if refusal is not None:
            return refusal
        present = self._present.get(hello.node)
        is_taken = present is not None and (self._is_begun or now_s - present.heard_s < SILENCE_S)
        if present is not None and is_taken and present.agent != agent:
            return Wait(f"another node {hello.node} is there")
        self._present[hello.node] = _Present(agent, now_s)
        return Wait(describe_missing(self.missing))

    def hear(self, agent: bytes, now_s: float) -> None:
        for each in self._present.values():
            if each.agent == agent:
                each.heard_s = now_s

    def silent(self, now_s: float) -> list[int]:
        return [node for node, each in self._present.items() if now_s - each.heard_s > SILENCE_S]

    def forget(self, node: int) -> None:
        self._present.pop(node, None)

    def _refuse(self, hello: Hello) -> Refused | None:
        if hello.num_nodes != self._num_nodes or not 0 < hello.node < self._num_nodes:
            return Refused(
                what=f"it is node {hello.node} of {hello.num_nodes}, and the first counts {self._num_nodes}",
                fix="give the same --nnodes on all, and each a --node-rank of its own",
            )
        for name, theirs, ours in (
            ("software", hello.software, self._software),
            ("a checkpoint", hello.checkpoint, self._checkpoint),
        ):
            if theirs != ours:
                return Refused(
                    what=f"node {hello.node} has {name} that the first node has not: {theirs}, not {ours}",
                    fix="install and copy the same on all nodes",
                )
        if hello.num_gpus < self._num_gpus:
            return Refused(
                what=f"node {hello.node} has {hello.num_gpus} of {self._num_gpus} GPUs that its ranks take",
                fix="let it see more (CUDA_VISIBLE_DEVICES), or divide the model among more nodes",
            )
        return None


def describe_missing(nodes: list[int]) -> str:
    if not nodes:
        return "all nodes are there"
    return f"waiting for node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"
