"""Messages between rank 0 and other ranks: plans and orders one way, results of the last stage the other."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
import zmq

from scheduler.messages import Grammar, ModelRunnerOutput, SchedulerOutput, SequenceId

_GOODBYE = b""


def _plain(value: Any) -> Mapping[Any, Any]:
    """Encode the empty mappings of a plan, which cannot be changed."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"a plan with a {type(value).__name__}")


encode_plan = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_RESULTS = "results"


class RankStep(NamedTuple):
    """A plan, and the tokens of earlier steps that the rank does not know yet, oldest step first."""

    plan: SchedulerOutput
    sampled: list[list[int]]


class AdapterOrder(msgspec.Struct, frozen=True, tag=True):
    """A call of the store of adapters, which all ranks make between the same two steps."""

    call: Literal["load", "introduce", "forget"]
    arguments: tuple[str, ...]


class GrammarOrder(msgspec.Struct, frozen=True, tag=True):
    """A call of the side that compiles grammars during steps, for the rank that samples."""

    call: Literal["begin", "give_up", "hand_out", "discard"]
    sequence_ids: tuple[SequenceId, ...]
    grammar: Grammar | None = None
    """Set with `begin`; `generated` are the tokens so far."""
    generated: tuple[int, ...] = ()


Order = RankStep | AdapterOrder | GrammarOrder
"""Message to a rank."""


class StageResult(NamedTuple):
    """The result of a step, and its tokens in the order of rows."""

    output: ModelRunnerOutput
    token_ids: list[int]


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """Sequences whose grammars are compiled."""

    sequence_ids: tuple[SequenceId, ...]


decode_order = msgspec.msgpack.Decoder(Order).decode
decode_result = msgspec.msgpack.Decoder(StageResult | Compiled).decode


def _address(directory: Path, rank: int) -> str:
    return f"ipc://{directory / f'rank-{rank}'}"


class PlansOut:
    """The end of rank 0, which binds all channels before the other ranks exist."""

    def __init__(self, directory: Path, *, num_ranks: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets = [self._context.socket(zmq.PUSH) for _ in range(1, num_ranks)]
        for rank, socket in enumerate(self._sockets, start=1):
            # Unlimited: the plans in flight bound it.
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(_address(directory, rank))

    def send(self, order: Order) -> None:
        """Post to all ranks without waiting for any."""
        self._send(encode_plan(order))

    def say_goodbye(self) -> None:
        """Let all ranks end once they have carried out all orders."""
        self._send(_GOODBYE)

    def close(self) -> None:
        self._context.destroy()

    def _send(self, message: bytes) -> None:
        for socket in self._sockets:
            socket.send(message)


class PlansIn:
    """The end of one of the other ranks. It sleeps in the system while there is no plan."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.connect(_address(directory, rank))

    def has_any(self, wait_s: float = 0.0) -> bool:
        """Wait up to `wait_s` seconds for an order; return whether there is one."""
        return bool(self._socket.poll(int(wait_s * 1000)))

    def receive(self) -> Order | None:
        """Wait for the next step, or for what comes before it; None at the end."""
        message = self._socket.recv()
        return None if message == _GOODBYE else decode_order(message)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Reports:
    """Results of steps and reports of compiled grammars, which come over one socket."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._results: deque[StageResult] = deque()
        self._compiled: list[SequenceId] = []

    def has_any(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds for a result; return whether there is one."""
        if not self._results and self._socket.poll(int(wait_s * 1000)):
            self._read()
        return bool(self._results)

    def receive(self) -> StageResult:
        """Wait for the result of the oldest step. A rank that ends meanwhile ends this process."""
        while not self._results:
            self._read()
        return self._results.popleft()

    def take_compiled(self) -> list[SequenceId]:
        """Sequences of which it was reported, since the last call, that their grammars are compiled."""
        while self._socket.poll(0):
            self._read()
        compiled, self._compiled = self._compiled, []
        return compiled

    def _read(self) -> None:
        report = decode_result(self._socket.recv())
        if isinstance(report, Compiled):
            self._compiled += report.sequence_ids
        else:
            self._results.append(report)


class ResultsIn(Reports):
    """The end of rank 0, which binds the channel before the last stage exists."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.bind(f"ipc://{directory / _RESULTS}")
        super().__init__(socket)

    def close(self) -> None:
        self._context.destroy(linger=0)


class ResultsOut:
    """The end of the rank that samples."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(f"ipc://{directory / _RESULTS}")

    def send(self, report: StageResult | Compiled) -> None:
        """Post without waiting."""
        self._socket.send(encode_plan(report))

    def close(self) -> None:
        self._context.destroy(linger=0)
