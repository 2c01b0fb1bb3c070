"""The health of the engine: whether it is ready, and whether its loop still moves.

Owns: the state that is reported to clients and probes. It is judged by the loop's turns and never by a test
generation, which a long prefill would fail and a hung engine could pass from a cache.
Never: reads a clock; time is an argument.
"""

import asyncio
from enum import Enum

from engine.errors import EngineUnavailable
from engine.process_messages import Beat
from engine.types import EngineState, Health
from worker.worker_config import LoadProgress

_GUESSED_LOAD_S = 10.0
_MIN_RETRY_S = 1.0
_LEAVES = "the server is shutting down"


class Welcome(Enum):
    """The treatment of new requests."""

    OPEN = "open"
    LEAVING = "leaving"
    """Probes fail, so that load balancers send no more; new requests are still accepted."""
    CLOSED = "closed"


class HealthMonitor:
    """The health as of the last message of the engine process; read by probes and by admission."""

    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._progress: LoadProgress | None = None
        self._cause_of_death: str | None = None
        self._last_beat_s = 0.0
        self._num_steps = 0
        self._load_s = _GUESSED_LOAD_S
        self._loading_since_s = 0.0
        self.welcome = Welcome.OPEN
        self.became_ready = asyncio.Event()

    def loading(self, progress: LoadProgress, *, now_s: float) -> None:
        if self._progress is None:
            self._loading_since_s = now_s
        self._progress = progress
        self._cause_of_death = None

    def ready(self, *, now_s: float) -> None:
        self._last_beat_s = now_s
        self._load_s = now_s - self._loading_since_s
        self._num_steps = 0
        self.became_ready.set()

    def beat(self, beat: Beat, *, now_s: float) -> None:
        self._last_beat_s = now_s
        self._num_steps = beat.stats.num_steps

    def moved(self, *, now_s: float) -> None:
        """Note that a long step makes progress."""
        self._last_beat_s = now_s

    def died(self, cause: str) -> None:
        self.became_ready.clear()
        self._progress = None
        self._cause_of_death = cause

    def judge(self, *, now_s: float) -> Health:
        is_loaded = self.became_ready.is_set()
        is_live = self._is_live(now_s)
        silence_s = now_s - self._last_beat_s
        return Health(
            state=self._state(),
            is_live=is_live,
            detail=self._detail() if is_live else f"the engine has not moved for {silence_s:.0f} s",
            num_steps=self._num_steps,
            progress=1.0 if is_loaded else self._progress.fraction if self._progress else 0.0,
        )

    def require_ready(self, *, now_s: float) -> None:
        """Raise EngineUnavailable with the reason, unless new requests can be served."""
        if self.welcome is Welcome.CLOSED:
            raise EngineUnavailable(_LEAVES, code="shutting_down", retry_after_s=_MIN_RETRY_S)
        if not self.became_ready.is_set() or not self._is_live(now_s):
            health = self.judge(now_s=now_s)
            raise EngineUnavailable(health.detail, retry_after_s=self._retry_after_s(now_s))

    def _retry_after_s(self, now_s: float) -> float:
        """Estimate the rest of the load from the duration of the last one."""
        if self.became_ready.is_set():
            return _MIN_RETRY_S
        return max(self._load_s - (now_s - self._loading_since_s), _MIN_RETRY_S)

    def _is_live(self, now_s: float) -> bool:
        return not self.became_ready.is_set() or now_s - self._last_beat_s <= self._heartbeat_timeout_s

    def _state(self) -> EngineState:
        if self.welcome is not Welcome.OPEN:
            return EngineState.DRAINING
        if self.became_ready.is_set():
            return EngineState.READY
        return EngineState.DEAD if self._cause_of_death else EngineState.LOADING

    def _detail(self) -> str:
        match self._state():
            case EngineState.DRAINING:
                return _LEAVES
            case EngineState.READY:
                return "ready"
            case EngineState.DEAD:
                return f"the engine process {self._cause_of_death}; it is being replaced"
            case EngineState.LOADING:
                return f"loading the model{_describe(self._progress)}"


def _describe(progress: LoadProgress | None) -> str:
    if progress is None:
        return ""
    if not progress.total_bytes:
        return f": {progress.stage}"
    return f": {progress.stage}, {progress.done_bytes / 1e6:,.1f} of {progress.total_bytes / 1e6:,.1f} MB"
