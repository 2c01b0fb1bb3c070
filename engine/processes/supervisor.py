"""One engine process as a child, with a directory of its own that goes with it.

Owns: the child process, its environment, and the directory with its sockets and configuration; and the spare
process, which has imported torch before a model is asked for.
"""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import msgspec
import zmq

from engine.options.engine_config import EngineConfig
from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.processes.child_process import CONFIG_FILE, IMPORTED_FILE, SIGNAL_FOR_STACKS
from engine.processes.runtime_directory import RuntimeDirectory
from engine.processes.transport import ClientSide
from worker.machine import visible_gpus

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    # OpenMP's threads spin between two parallel regions by default, and a decode step on a CPU has more than
    # a hundred. One busy neighbour (our own API process) then makes a step of 38 ms take 1,130 ms. Passive
    # waiting takes 43 ms on the idle machine and 52 ms with the neighbour (Qwen3-0.6B's shape, one
    # sequence, 2 cores of a Zen 4). It must be set before torch is loaded; the operator's environment wins.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


class EngineProcess:
    """A child started by `start`; `side` carries messages until `wait` returns."""

    def __init__(
        self, child: asyncio.subprocess.Process, directory: RuntimeDirectory, side: ClientSide
    ) -> None:
        self._child = child
        self._directory = directory
        self.side = side

    @classmethod
    async def start(cls, config: EngineConfig | None) -> "EngineProcess":
        """Start a process; without a configuration it imports what any model needs and waits for one."""
        directory = RuntimeDirectory.make()
        side: ClientSide | None = None
        try:
            side = ClientSide(directory.path)
            own = {} if config is None else device_environment(config)
            if config is not None:
                _write_config(directory, config)
            child = await asyncio.create_subprocess_exec(
                *child_process.INTERPRETER,
                *_child_arguments(directory.path),
                stdin=asyncio.subprocess.PIPE if config is None else asyncio.subprocess.DEVNULL,
                env=compute_environment(directory.path) | own,
            )
        except BaseException:
            if side is not None:
                side.close()
            directory.remove()
            raise
        return cls(child, directory, side)

    def configure(self, config: EngineConfig) -> None:
        """Let a process that waits for its configuration go on, or end it. Raises OSError."""
        assert self._child.stdin is not None
        try:
            _write_config(self._directory, config)
        except OSError:
            self.kill()
            self.clean_up()
            raise
        self._child.stdin.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_configurable(self) -> bool:
        return self._child.returncode is None and self._directory.path.exists()

    @property
    def has_imported(self) -> bool:
        return (self._directory.path / IMPORTED_FILE).exists()

    async def wait(self) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        return await self._child.wait()

    async def stop(self, *, grace_s: float) -> None:
        """Wait `grace_s` for the process to end by itself, then kill it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), grace_s)
        self.kill()
        await self._child.wait()

    def kill(self) -> None:
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    def ask_for_stacks(self) -> None:
        """Ask a loaded process to write the stacks of its threads to stderr; return at once."""
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(SIGNAL_FOR_STACKS)

    def clean_up(self) -> None:
        self.side.close()
        self._directory.remove()


class Spare:
    """At most one process that imports, then waits for its configuration. For use from one event loop."""

    def __init__(self) -> None:
        self._starting: asyncio.Task[EngineProcess] | None = None

    def prepare(self) -> None:
        """Start the process if there is none, and return at once; it imports at low precedence."""
        self._forget_lost()
        if self._starting is None:
            self._starting = asyncio.create_task(EngineProcess.start(None))

    def take(self) -> EngineProcess | None:
        """Return the process, which the caller ends; None while there is none that has imported."""
        self._forget_lost()
        if self._starting is None or not self._starting.done() or not self._starting.result().has_imported:
            return None
        process, self._starting = self._starting.result(), None
        return process

    def _forget_lost(self) -> None:
        """Forget a process that could not be started, has died, or has lost its folder."""
        if self._starting is None or not self._starting.done():
            return
        if self._starting.exception() is None:
            process = self._starting.result()
            if process.is_configurable:
                return
            process.kill()
            process.clean_up()
        self._starting = None

    async def close(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            with contextlib.suppress(OSError, zmq.ZMQError):
                process = await starting
                await process.stop(grace_s=0)
                process.clean_up()


def _write_config(directory: RuntimeDirectory, config: EngineConfig) -> None:
    (directory.path / CONFIG_FILE).write_bytes(msgspec.msgpack.encode(config))


def compute_environment(directory: Path) -> dict[str, str]:
    """Return the environment of a process that computes, with a directory of its own."""
    # torch would make a folder of a name that others can foresee, in the folder that all share.
    return child_environment(**_ENVIRONMENT, TORCHINDUCTOR_CACHE_DIR=str(directory / "torch"))


def device_environment(config: EngineConfig) -> dict[str, str]:
    """Let each of several engines see the GPUs of its ranks."""
    if config.num_engines == 1 or config.worker.device != "cuda":
        return {}
    num_ranks = config.worker.num_stages * config.worker.num_ranks
    own = visible_gpus()[config.engine * num_ranks : (config.engine + 1) * num_ranks]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _child_arguments(directory: Path) -> list[str]:
    """Return the arguments of engine/core/process.py."""
    log_level = log.getEffectiveLevel()
    return ["-m", "engine.core.process", str(directory), str(os.getpid()), str(log_level)]
