"""The frame of messages between the API process and a child that answers on its standard output (both)."""

import os
import struct
import sys
from typing import Any, BinaryIO, TypeVar

import msgspec

LENGTH = struct.Struct(">I")

MessageT = TypeVar("MessageT")


def frame(message: Any) -> bytes:
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def take_standard_output() -> BinaryIO:
    """Return the stream of answers; prints of libraries go to the log from here on."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


def read_message(kind: type[MessageT]) -> MessageT | None:
    """Read a message from standard input; None at its end."""
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgspec.msgpack.decode(sys.stdin.buffer.read(LENGTH.unpack(head)[0]), type=kind)


def answer(stream: BinaryIO, message: Any) -> None:
    stream.write(frame(message))
    stream.flush()
