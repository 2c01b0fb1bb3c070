"""A child process that answers one message after the other, as the API process sees it."""

import asyncio
import contextlib
import os
from typing import Any, TypeVar

import msgspec

from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.processes.frames import LENGTH, frame

AnswerT = TypeVar("AnswerT")


class ChildEnded(Exception):
    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class FramedChild:
    """A process of ours, begun by `start`; for one caller at a time."""

    def __init__(self, module: str, **environment: str) -> None:
        """Name the module to run, which gets the id of this process as its argument."""
        self._module = module
        self._environment = environment
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def start(self) -> None:
        """Start the process. Raises OSError."""
        self._child = await asyncio.create_subprocess_exec(
            *child_process.INTERPRETER,
            *("-m", self._module, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**child_environment(), **self._environment},
        )

    async def ask(self, message: Any, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """Send a message and wait for the answer; kill a late process. Raises TimeoutError, ChildEnded."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                child.stdin.write(frame(message))
                await child.stdin.drain()
                (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                return msgspec.msgpack.decode(await child.stdout.readexactly(length), type=kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ChildEnded(await child.wait()) from None
        except BaseException:
            # A late answer would be taken for the answer to the next message.
            await self.kill()
            raise

    async def kill(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
