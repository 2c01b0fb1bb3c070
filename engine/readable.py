"""Whether outputs of a call can be read, and which of its two readers is called.

Owns: the flag, and the wake-up of the task that waits, or of a function in its place.
Never: the outputs (frontend/active_text.py makes them).

To wake a task, and to pass through its generators, takes as long as all else that a streamed token costs.
"""

import asyncio
from collections.abc import Callable

from engine.types import TokenOutput


class Readable:
    """Set by the receiver of messages, for one reader at a time."""

    def __init__(self) -> None:
        self.is_set = False
        self.outputs: Callable[[], list[tuple[int, TokenOutput]] | None] | None = None
        """Take the new outputs, with the places of their requests. None: one has ended, the task has to."""
        self.read_at_once: Callable[[], bool] | None = None
        """Read in the place of the task that waits. False: nothing was read, the task has to."""
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        if self.is_set:
            return
        self.is_set = True
        if self._waiting is None or self._waiting.done():
            return
        if self.read_at_once is None:
            self._waiting.set_result(None)
        else:
            self._waiting.get_loop().call_soon(self._read)

    async def wait(self) -> None:
        """Wait until it is set, and clear it."""
        if not self.is_set:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self.is_set = False

    def _read(self) -> None:
        if self._waiting is None or self._waiting.done():  # its task was cancelled
            return
        self.is_set = False
        try:
            is_read = self.read_at_once is not None and self.read_at_once()
        except Exception as error:  # noqa: BLE001 - raised in the task
            self._waiting.set_exception(error)
            return
        if not is_read:
            self.is_set = True
            self._waiting.set_result(None)
