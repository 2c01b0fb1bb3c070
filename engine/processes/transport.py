"""The two one-way streets between the API process and the engine process.

Owns: ZeroMQ sockets in a directory that only this user can enter; no port is opened.
Never: waits for a peer that may be dead. The supervisor watches the process; these only carry.
"""

import contextlib
from pathlib import Path

import zmq
import zmq.asyncio

from engine.process_messages import ToClient, ToEngine, decode_to_client, decode_to_engine, encode

_TO_ENGINE = "to-engine"
_TO_CLIENT = "to-client"


def _address(directory: Path, street: str) -> str:
    return f"ipc://{directory / street}"


class ClientSide:
    """Held by the API process, which binds both streets before the engine process exists."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.asyncio.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._out: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PUSH)
        for socket, street in ((self._out, _TO_ENGINE), (self._in, _TO_CLIENT)):
            # Unlimited here: what may be under way is bounded by admission, and a dropped or blocking
            # message would break the promise that every request ends once.
            socket.set_hwm(0)
            socket.linger = 0
            try:
                socket.bind(_address(directory, street))
            except zmq.ZMQError:
                self.close()
                raise

    def send(self, message: ToEngine) -> None:
        """Never blocks. Without a peer it is lost: then the engine is dead and all its requests failed."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._out.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> ToClient:
        message: ToClient = decode_to_client(await self._in.recv())
        return message

    def close(self) -> None:
        self._out.close()
        self._in.close()
        self._context.term()


class PulseSide:
    """Held by a thread beside the loop of the engine process: sockets are not for several threads."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._out = self._context.socket(zmq.PUSH)
        self._out.linger = 0
        self._out.connect(_address(directory, _TO_CLIENT))

    def send(self, message: ToClient) -> None:
        """Lost if nobody takes it."""
        with contextlib.suppress(zmq.Again):
            self._out.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy()


class EngineSide:
    """Held by the engine process; plain blocking calls, since its loop has nothing else to wait for."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket, street in ((self._in, _TO_ENGINE), (self._out, _TO_CLIENT)):
            socket.set_hwm(0)
            socket.connect(_address(directory, street))

    def receive(self, *, wait_s: float) -> list[ToEngine]:
        """All that has come; waits so long for the first, 0 does not wait."""
        messages: list[ToEngine] = []
        timeout_ms = int(wait_s * 1000)
        while self._in.poll(timeout_ms):
            messages.append(decode_to_engine(self._in.recv()))
            timeout_ms = 0
        return messages

    def send(self, message: ToClient) -> None:
        self._out.send(encode(message))

    def close(self) -> None:
        """Gives what was sent a second to leave."""
        self._context.destroy(linger=1000)
