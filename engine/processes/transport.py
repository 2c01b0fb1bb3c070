"""The two one-way channels between the API process and the engine process.

Owns: ZeroMQ sockets in a directory that only this user can enter; no port is opened.
Never: waits for a peer that may be dead; the supervisor watches the process.
"""

import asyncio
import contextlib
from pathlib import Path

import zmq

from engine.process_messages import ToClient, ToEngine, decode_to_client, decode_to_engine, encode

_TO_ENGINE = "to-engine"
_TO_CLIENT = "to-client"


def _address(directory: Path, channel: str) -> str:
    return f"ipc://{directory / channel}"


class ClientSide:
    """The API process's end, which binds both channels before the engine process exists."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in, self._out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, channel in ((self._out, _TO_ENGINE), (self._in, _TO_CLIENT)):
            # Unlimited: admission bounds the messages under way, and a dropped or blocking message
            # would break the promise that every request ends once.
            socket.set_hwm(0)
            socket.linger = 0
            try:
                socket.bind(_address(directory, channel))
            except zmq.ZMQError:
                self.close()
                raise

    def send(self, message: ToEngine) -> None:
        """Post without blocking. Lost without a peer: a dead engine's requests fail or are held."""
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._out.send(encode(message), zmq.NOBLOCK)

    async def receive(self) -> ToClient:
        # Not by pyzmq's own futures: several for each message, which take longer than the outputs of a step.
        while True:
            with contextlib.suppress(zmq.Again):
                message: ToClient = decode_to_client(self._in.recv(zmq.NOBLOCK))
                return message
            await self._until_changed()

    async def _until_changed(self) -> None:
        """Wait until a message may have come.

        The descriptor stays readable until the socket is asked again: it is watched during this wait alone.
        """
        loop, has_changed = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._in.fileno(), has_changed.set)
        try:
            await has_changed.wait()
        finally:
            loop.remove_reader(self._in.fileno())

    def close(self) -> None:
        self._out.close()
        self._in.close()
        self._context.term()


class PulseSide:
    """An end for another thread than the engine's loop, since threads cannot share a socket."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._out = self._context.socket(zmq.PUSH)
        self._out.linger = 0
        self._out.connect(_address(directory, _TO_CLIENT))

    def send(self, message: ToClient) -> None:
        """Post without blocking; lost if the queue is full."""
        with contextlib.suppress(zmq.Again):
            self._out.send(encode(message), zmq.NOBLOCK)

    def send_last(self, message: ToClient) -> None:
        """Post, and close; the message has a second to leave."""
        self._out.send(encode(message))
        self._context.destroy(linger=1000)

    def close(self) -> None:
        self._context.destroy()


class RankReports:
    """The end of a node without an API process, for what its ranks say; blocking calls."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._in.set_hwm(0)
        self._in.bind(_address(directory, _TO_CLIENT))

    def receive(self) -> list[ToClient]:
        """Return all messages that have come."""
        messages: list[ToClient] = []
        while self._in.poll(0):
            messages.append(decode_to_client(self._in.recv()))
        return messages

    def close(self) -> None:
        self._context.destroy(linger=0)


class EngineSide:
    """The engine process's end, with blocking calls: its loop has no other wait."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket, channel in ((self._in, _TO_ENGINE), (self._out, _TO_CLIENT)):
            socket.set_hwm(0)
            socket.connect(_address(directory, channel))

    def receive(self, *, wait_s: float) -> list[ToEngine]:
        """Return all messages that have come; wait `wait_s` for the first, 0 does not wait."""
        messages: list[ToEngine] = []
        timeout_ms = int(wait_s * 1000)
        while self._in.poll(timeout_ms):
            messages.append(decode_to_engine(self._in.recv()))
            timeout_ms = 0
        return messages

    def send(self, message: ToClient) -> None:
        self._out.send(encode(message))

    def close(self) -> None:
        """Close; posted messages have a second to leave."""
        self._context.destroy(linger=1000)
