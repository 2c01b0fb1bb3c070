"""The health of the engine: whether it is ready, and whether its loop still moves.

Owns: the state that is reported to clients and probes. It is judged by the loop's turns and never by a test
generation, which a long prefill would fail and a hung engine could pass from a cache.
"""

import asyncio
from enum import Enum

from engine.errors import EngineUnavailable, without_folders
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
    """The health of all engines together; read by probes and by admission.

    One that is ready makes the whole ready: it serves what the others would.
    """

    def __init__(self, heartbeat_timeout_s: float, num_engines: int = 1) -> None:
        self.engines = tuple(
            EngineHealth(heartbeat_timeout_s=heartbeat_timeout_s) for _ in range(num_engines)
        )
        self.welcome = Welcome.OPEN
        self.became_ready = asyncio.Event()
        self.given_up = ""
        """Reason why no process is started any more; empty while one may be."""
        self.last_failure = ""
        """While the model is unloaded, the reason why it was not by intent; empty if it was."""
        self.is_optional = False
        """Whether the server is ready without this model."""
        self.is_asleep = False
        """Whether the model is unloaded by intent."""

    def ready(self, engine: int, *, now_s: float) -> None:
        self.engines[engine].ready(now_s=now_s)
        self.became_ready.set()

    def died(self, engine: int, cause: str) -> None:
        self.engines[engine].died(cause)
        if not any(each.is_ready for each in self.engines):
            self.became_ready.clear()

    def engine_is_given_up(self, engine: int) -> None:
        """Note that one engine among several comes no more."""
        self.engines[engine].is_given_up = True

    def sleep(self, *, given_up: str = "", failure: str = "") -> None:
        """Note that the model is unloaded; from then on the server is ready without it.

        `given_up` is the reason why it is never loaded, `failure` that of the last end.
        """
        for each in self.engines:
            each.sleep()
        self.became_ready.clear()
        self.given_up, self.last_failure, self.is_asleep, self.is_optional = given_up, failure, True, True

    def ready_engines(self) -> list[int]:
        """List the numbers of engines whose model is loaded."""
        return [number for number, each in enumerate(self.engines) if each.is_ready]

    def judge(self, *, now_s: float) -> Health:
        best = self._best(now_s)
        is_open = self.welcome is Welcome.OPEN
        is_live = best.is_live(now_s)
        return Health(
            state=best.state if is_open else EngineState.DRAINING,
            is_live=is_live,
            detail=self._detail(best, now_s) if is_open or not is_live else _LEAVES,
            num_steps=sum(each.num_steps for each in self.engines),
            progress=best.progress,
            is_given_up=bool(self.given_up),
            is_optional=self.is_optional,
        )

    def require_ready(self, *, now_s: float) -> None:
        """Raise EngineUnavailable with the reason, unless new requests can be served."""
        if self.welcome is Welcome.CLOSED:
            raise EngineUnavailable(_LEAVES, code="shutting_down", retry_after_s=_MIN_RETRY_S)
        best = self._best(now_s)
        if not best.is_ready or not best.is_live(now_s):
            raise EngineUnavailable(self.judge(now_s=now_s).detail, retry_after_s=best.retry_after_s(now_s))

    def _best(self, now_s: float) -> "EngineHealth":
        """Engine that is nearest to serving."""
        return max(self.engines, key=lambda each: (each.is_ready, each.is_live(now_s), each.progress))

    def _detail(self, best: "EngineHealth", now_s: float) -> str:
        """Describe the best engine and, among several, each that is not ready."""
        if self.given_up:
            return f"given up: {without_folders(self.given_up)}"
        if self.is_asleep:
            return self.last_failure or "not loaded"
        if len(self.engines) == 1 or not best.is_ready:
            return best.detail(now_s)
        others = [
            f"engine {number}: {each.detail(now_s)}"
            for number, each in enumerate(self.engines)
            if not each.is_ready or not each.is_live(now_s)
        ]
        num_ready = len(self.engines) - len(others)
        return f"ready, {num_ready} of {len(self.engines)} engines" + "".join(f"; {each}" for each in others)


class EngineHealth:
    """The health of one engine as of the last message of its process."""

    def __init__(self, *, heartbeat_timeout_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._progress: LoadProgress | None = None
        self._cause_of_death: str | None = None
        self._last_beat_s = 0.0
        self._num_steps = 0
        self._load_s = _GUESSED_LOAD_S
        self._loading_since_s = 0.0
        self.is_ready = False
        self.is_given_up = False

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def state(self) -> EngineState:
        if self.is_ready:
            return EngineState.READY
        return EngineState.DEAD if self._cause_of_death else EngineState.LOADING

    @property
    def progress(self) -> float:
        """Loaded share of the model, 0 to 1."""
        if self.is_ready:
            return 1.0
        return self._progress.fraction if self._progress else 0.0

    def loading(self, progress: LoadProgress, *, now_s: float) -> None:
        if self._progress is None:
            self._loading_since_s = now_s
        self._progress = progress
        self._cause_of_death = None

    def ready(self, *, now_s: float) -> None:
        self._last_beat_s = now_s
        self._load_s = now_s - self._loading_since_s
        self._num_steps = 0
        self.is_ready = True

    def beat(self, beat: Beat, *, now_s: float) -> None:
        self._last_beat_s = now_s
        self._num_steps = beat.stats.num_steps

    def moved(self, *, now_s: float) -> None:
        """Note that a long step makes progress."""
        self._last_beat_s = now_s

    def died(self, cause: str) -> None:
        self.is_ready = False
        self._progress = None
        self._cause_of_death = cause

    def sleep(self) -> None:
        self.is_ready, self._progress, self._cause_of_death = False, None, None
        self.is_given_up = False

    def is_live(self, now_s: float) -> bool:
        return not self.is_ready or now_s - self._last_beat_s <= self._heartbeat_timeout_s

    def retry_after_s(self, now_s: float) -> float:
        """Estimate the rest of the load from the duration of the last one."""
        if self.is_ready:
            return _MIN_RETRY_S
        return max(self._load_s - (now_s - self._loading_since_s), _MIN_RETRY_S)

    def detail(self, now_s: float) -> str:
        if not self.is_live(now_s):
            return f"the engine has not moved for {now_s - self._last_beat_s:.0f} s"
        match self.state:
            case EngineState.READY:
                return "ready"
            case EngineState.DEAD:
                what_next = "it is given up" if self.is_given_up else "it is being replaced"
                return f"the engine process {self._cause_of_death}; {what_next}"
            case _:
                return f"loading the model{_describe(self._progress)}"


def _describe(progress: LoadProgress | None) -> str:
    if progress is None:
        return ""
    if not progress.total_bytes:
        return f": {progress.stage}"
    return f": {progress.stage}, {progress.done_bytes / 1e6:,.1f} of {progress.total_bytes / 1e6:,.1f} MB"
