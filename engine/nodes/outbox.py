"""The key-value store by which ranks on GPUs of several nodes meet before torch.distributed connects them.

Never: reads a text, or waits: a rank asks again (links.py).
"""

import msgspec

_MAX_BYTES = 16 << 20
_BESIDE_BYTES = 128
"""Memory of a text, without its content and its key."""


class Put(msgspec.Struct, frozen=True, tag=True):
    """Leave a text, in the place of an earlier one."""

    key: str
    value: bytes


class Add(msgspec.Struct, frozen=True, tag=True):
    """Add to a number in decimal digits, which is 0 before."""

    key: str
    number: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """Read a text."""

    key: str


ShelfCall = Put | Add | Look
decode_call = msgspec.msgpack.Decoder(ShelfCall).decode


class Outbox:
    """Texts that the ranks of one engine leave for each other, kept in the switchboard."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}
        self._num_bytes = 0

    def answer(self, payload: bytes) -> bytes:
        """Carry out a call; return the text that is there now, or None, encoded."""
        call = decode_call(payload)
        if isinstance(call, Put):
            self._leave(call.key, call.value)
        elif isinstance(call, Add):
            number = int(self._texts.get(call.key, b"0")) + call.number
            self._leave(call.key, str(number).encode())
        return msgspec.msgpack.encode(self._texts.get(call.key))

    def _leave(self, key: str, value: bytes) -> None:
        old = self._texts.get(key)
        num_bytes = self._num_bytes + len(value)
        num_bytes += len(key.encode()) + _BESIDE_BYTES if old is None else -len(old)
        if num_bytes > _MAX_BYTES:
            raise ValueError(f"ranks leave more than they need to meet: {num_bytes} bytes, key {key[:80]}")
        self._num_bytes = num_bytes
        self._texts[key] = value
