"""The first node takes in nodes that have the key, and passes on what ranks send each other."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq
from msgspec.structs import replace as replace_in

from campaigns.servers.free_ports import free_port
from engine.nodes import switchboard as switchboards
from engine.nodes.agent import Leader, NodeAgent
from engine.nodes.link_address import LinkAddress, write_link
from engine.nodes.links import Links
from engine.nodes.messages import (
    Alive,
    Begin,
    Dismissed,
    Hello,
    RankEnded,
    Refused,
    ToLeader,
    ToNode,
    Wait,
    decode_to_node,
)
from engine.nodes.rank_plans import RankStep
from engine.nodes.registry import NodeRegistry
from engine.nodes.switchboard import Switchboard
from engine.options.engine_config import EngineConfig, resolve
from engine.options.sources import read_options
from scheduler.messages import SchedulerOutput
from worker.ranks.places import RankPlace

KEY = "a secret that all nodes of a test share"
HELLO = Hello(node=1, num_nodes=2, software="0.9", checkpoint="abc", num_gpus=2)
PLAN = SchedulerOutput(3, (), (), {}, (), 0)
WAIT_S = 20.0


def config_of(node: int, port: int, num_nodes: int, **more: str) -> EngineConfig:
    given = {
        "nnodes": str(num_nodes),
        "pipeline_parallel_size": str(num_nodes),
        "tensor_parallel_size": "2",
        "node_rank": str(node),
        **more,
    }
    given |= {"master_addr": "127.0.0.1", "cluster_port": str(port), "cluster_key": KEY}
    return resolve(read_options(given, {}), environment={})[0]


class First:
    """A first node without an engine."""

    def __init__(self, directory: Path, num_nodes: int, port: int, **more: str) -> None:
        self.port, self.directory, self.losses = port, directory, list[str]()
        self.config = config_of(0, self.port, num_nodes, **more)
        assert self.config.cluster is not None
        roll = NodeRegistry(num_nodes, software=HELLO.software, checkpoint=HELLO.checkpoint, num_gpus=2)
        self.board = Switchboard(self.config, directory, self.config.cluster.address, roll)
        self.board.on_loss = lambda code, what: self.losses.append(f"{code}: {what}")

    def link_of_others(self) -> LinkAddress:
        """Return what a rank of another node reads."""
        assert self.config.cluster is not None
        return LinkAddress(self.config.cluster.address, self.board.life, KEY, host=self.config.cluster.host)

    @contextmanager
    def node(self, key: str = KEY) -> Iterator[Leader]:
        """Connect a second node; it says nothing by itself."""
        config = config_of(1, self.port, 2)
        assert config.cluster is not None
        agent = NodeAgent(replace(config, cluster=replace(config.cluster, key=key)))
        with agent.connected() as leader:
            yield leader


@pytest.fixture
def first(tmp_path: Path) -> Iterator[First]:
    first = First(tmp_path, num_nodes=2, port=free_port())
    yield first
    first.board.close()


def answer(leader: Leader) -> ToNode:
    assert leader.socket.poll(int(WAIT_S * 1000))
    return decode_to_node(leader.socket.recv())


def answer_to(leader: Leader, message: ToLeader) -> ToNode:
    leader.send(message)
    return answer(leader)


def until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_node_that_is_the_same_is_taken_on_and_gets_the_configuration_without_the_secret(
    first: First,
) -> None:
    with first.node() as leader:
        assert first.board.wait_for_nodes(0.0) == "waiting for node 1"
        assert answer_to(leader, HELLO) == Wait("all nodes are there")
        assert first.board.wait_for_nodes(WAIT_S) == ""
        first.board.begin()
        assert answer(leader) == Begin(life=first.board.life, config=replace(first.config, cluster=None))
        assert answer_to(leader, Alive("an engine before")) == Alive(first.board.life)
        first.board.dismiss_nodes()
        assert answer(leader) == Dismissed()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"software": "0.8"}, "node 1 has software that the first node has not: 0.8, not 0.9"),
        ({"checkpoint": "xyz"}, "node 1 has a checkpoint that the first node has not: xyz, not abc"),
        ({"num_nodes": 3}, "it is node 1 of 3, and the first counts 2"),
        ({"node": 2}, "it is node 2 of 2, and the first counts 2"),
        ({"num_gpus": 1}, "node 1 has 1 of 2 GPUs that its ranks take"),
    ],
)
def test_a_node_that_differs_is_refused_with_the_difference(
    first: First, wrong: dict[str, object], why: str
) -> None:
    with first.node() as leader:
        refused = answer_to(leader, replace_in(HELLO, **wrong))
    assert isinstance(refused, Refused)
    assert refused.what == why
    assert first.board.wait_for_nodes(0.0) == "waiting for node 1"


def test_a_peer_without_the_key_is_not_heard_and_changes_nothing(first: First) -> None:
    with first.node() as leader:
        answer_to(leader, HELLO)
        with first.node(KEY[::-1]) as stranger:
            stranger.send(HELLO)
            assert not stranger.socket.poll(300)
        plain = zmq.Context.instance().socket(zmq.DEALER)
        plain.identity = b"node/1/00"
        plain.connect(first.config.cluster.address)
        plain.send(b"anything")
        assert not plain.poll(300)
        plain.close(linger=0)
        assert first.board.wait_for_nodes(0.0) == ""
        assert answer_to(leader, HELLO) == Wait("all nodes are there")
    assert first.losses == []


def test_a_second_node_of_one_number_waits_as_long_as_the_first_is_there(first: First) -> None:
    with first.node() as leader, first.node() as other:
        answer_to(leader, HELLO)
        assert answer_to(other, HELLO) == Wait("another node 1 is there")


def test_bytes_that_are_no_message_are_answered_and_change_nothing(first: First, tmp_path: Path) -> None:
    """CVE-2025-30165, CVE-2025-32444 and CVE-2025-47277 ran what a peer had pickled."""
    pickled = f"cos\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR.".encode()
    with first.node() as leader:
        for message in (b"\xc1", pickled):
            leader.socket.send(message)
            assert isinstance(answer(leader), Refused)
        assert not (tmp_path / "ran").exists()
        assert answer_to(leader, HELLO) == Wait("all nodes are there")
    assert first.losses == []


def test_the_end_of_a_rank_is_the_end_of_the_engine(first: First) -> None:
    with first.node() as leader:
        answer_to(leader, HELLO)
        first.board.begin()
        answer(leader)
        leader.send(RankEnded(rank=3, exit_code=-9))
        until(lambda: first.losses)
    assert first.losses == ["70: rank 3 on node 1 ended with code -9"]


def test_a_node_that_falls_silent_is_the_end_of_the_engine(
    first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.nodes.registry.SILENCE_S", 0.3)
    with first.node() as leader:
        answer_to(leader, HELLO)
        first.board.begin()
        until(lambda: first.losses)
    assert first.losses == [f"70: node 1 has been silent for {switchboards.SILENCE_S:.0f} s"]


def test_a_connection_that_was_given_up_takes_no_place_when_the_first_node_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.nodes.agent.SILENCE_S", 0.1)
    port = free_port()
    agent = NodeAgent(config_of(1, port, 2))
    with agent.connected() as leader:
        assert agent._dial(leader, HELLO) is None
    first = First(tmp_path, num_nodes=2, port=port)
    with closing(first.board):
        assert first.board.wait_for_nodes(1.0) == "waiting for node 1"


@contextmanager
def repeating(leader: Leader, message: ToLeader) -> Iterator[None]:
    """Send so often that the first node never has a pause between two messages."""
    stopping = threading.Event()

    def repeat() -> None:
        while not stopping.wait(0.01):
            leader.send(message)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def test_a_silent_node_is_noticed_though_another_is_never_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.nodes.registry.SILENCE_S", 0.3)
    first = First(tmp_path, num_nodes=3, port=free_port())
    with closing(first.board), first.node() as silent, first.node() as other:
        for node, leader in ((1, silent), (2, other)):
            answer_to(leader, replace_in(HELLO, node=node, num_nodes=3))
        first.board.begin()
        with repeating(other, Alive(first.board.life)):
            until(lambda: first.losses)
    assert first.losses == [f"70: node 1 has been silent for {switchboards.SILENCE_S:.0f} s"]


def test_the_place_of_a_silent_node_goes_to_no_other_once_the_engine_has_begun(
    first: First, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.nodes.registry.SILENCE_S", 0.3)
    with first.node() as silent, first.node() as other:
        answer_to(silent, HELLO)
        first.board.begin()
        with repeating(other, HELLO):
            until(lambda: first.losses)
        assert answer(other) == Wait("another node 1 is there")
    assert first.losses == [f"70: node 1 has been silent for {switchboards.SILENCE_S:.0f} s"]


def test_a_second_node_of_one_number_ends_no_engine_that_goes_on(first: First) -> None:
    with first.node() as leader, first.node() as other:
        answer_to(leader, HELLO)
        first.board.begin()
        answer(leader)
        assert answer_to(other, HELLO) == Wait("another node 1 is there")
        assert answer_to(leader, Alive(first.board.life)) == Alive(first.board.life)
    assert first.losses == []


def places() -> list[RankPlace]:
    """Two stages of two ranks, on two nodes, without the memory that ranks of a node share."""
    return [
        RankPlace(
            stage=stage,
            shard=shard,
            num_stages=2,
            num_shards=2,
            num_here=2,
            page=-1,
            world=None,
            inlet=None,
            outlet=None,
        )
        for stage in range(2)
        for shard in range(2)
    ]


@pytest.fixture
def four(first: First, tmp_path: Path) -> Iterator[list[Links]]:
    """The links of all ranks: the first two within the first node, the others with its key."""
    there = tmp_path / "other node"
    there.mkdir()
    write_link(there, first.link_of_others())
    links = [Links(tmp_path if place.stage == 0 else there, place) for place in places()]
    yield links
    for each in links:
        each.close()


def test_ranks_on_both_nodes_get_plans_agree_and_send_hidden_states_on(
    first: First, four: list[Links]
) -> None:
    together = [threading.Thread(target=links.world().of_all, args=([7],)) for links in four[1:]]
    for thread in together:
        thread.start()
    assert four[0].world().of_all([5]).tolist() == [[5], [7], [7], [7]]
    for thread in together:
        thread.join()
    step = RankStep(PLAN, [[4, 5]])
    first.board.send(step)
    assert [links.receive() for links in four[1:]] == [step] * 3
    hidden = torch.arange(6, dtype=torch.bfloat16).view(1, 3, 2)
    four[1].outlet().send(hidden)
    four[0].outlet().send(hidden + 1)
    came = torch.zeros_like(hidden)
    for links, expected in ((four[2], hidden + 1), (four[3], hidden)):
        links.inlet().receive(came)
        assert torch.equal(came, expected)
    four[0].outlet().send(hidden)
    with pytest.raises(ValueError, match="stages do not compute the same: 12 bytes came for 4"):
        four[2].inlet().receive(came[:, :1])
    first.board.say_goodbye()
    assert [links.receive() for links in four[1:]] == [None] * 3
    assert first.losses == []
