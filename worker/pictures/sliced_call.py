"""A call that is carried out in slices of time, between which its caller goes on.

Owns: the turns of two threads, of which one always waits for the other: what the call changes needs no lock.
Never: knows what is called. The call asks, at points of its own, whether its slice is over.
"""

from collections.abc import Callable
from threading import Semaphore, Thread
from time import monotonic
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class _Abandoned(BaseException):
    """Ends a call that is not wanted any more; no handler of errors catches it."""


class SlicedCall(Generic[_Result]):
    """One call. Its thread lives until the call is done or abandoned."""

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function = function
        self._mine, self._callers = Semaphore(0), Semaphore(0)  # turns
        self._until_s = 0.0
        self._is_abandoned = False
        self._result: _Result | None = None
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="sliced call", daemon=True)
        self._thread.start()

    def go_on(self, seconds: float) -> _Result | None:
        """Let the call go on until its part at that time is done; returns its result once it is done.

        Raises what it raised.
        """
        self._until_s = monotonic() + seconds
        self._mine.release()
        self._callers.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback would keep itself, and the call's tensors
        return self._result

    def pause(self) -> None:
        """Wait for the next slice if this one is over.

        Called by the call, in its thread, before each part.
        """
        if monotonic() < self._until_s:
            return
        self._callers.release()
        self._mine.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End a call that is not done."""
        self._is_abandoned = True
        self._mine.release()
        self._thread.join()

    def _run(self) -> None:
        self._mine.acquire()
        try:
            if not self._is_abandoned:
                self._result = self._function()
        except _Abandoned:
            pass
        except Exception as error:  # noqa: BLE001 - raised again, in the caller's thread
            self._error = error
        self._callers.release()
