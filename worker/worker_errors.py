"""Errors of the worker, by the party that can act on them.

WorkerError
├── StartupError           the operator can act: the text says what is wrong, and what to do
│   └── FamilyRefused      no option helps: this family cannot be served
├── UnsupportedAttention   a model asks attention for something that the backend would get wrong
├── SequenceRefused        one sequence of a plan cannot be computed; the others can
├── AdapterRefused         an adapter cannot be computed, or not exactly; the text names what is wrong with it
└── StepOutOfMemory        a step took more memory than the device has left; a smaller one may not
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_MAX_CHARS, _MAX_REASON_CHARS = 2000, 200


def one_line(text: str) -> str:
    """Make one line of a text, no longer than is read; files may have put anything into it."""
    return " ".join(text.split())[:_MAX_CHARS]


class WorkerError(Exception):
    """Root of the worker's errors. Its text is for the log."""


class StartupError(WorkerError):
    """The model cannot be served as configured. One line: what is wrong; what to do."""

    def __init__(self, what: str, *, fix: str) -> None:
        what = one_line(what)
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


class FamilyRefused(StartupError):
    """A model family that would come out wrong, or not at all, through a paged KV cache."""

    def __init__(self, what: str) -> None:
        super().__init__(what, fix="serve a model of another family")


class UnsupportedAttention(WorkerError):
    """Raised while a model is tried at load; the loader turns it into a StartupError."""


class SequenceRefused(WorkerError):
    """Ends as an entry in ModelRunnerOutput.failures."""


class AdapterRefused(WorkerError):
    """An adapter that is not taken. Which one it is, its caller knows."""

    def __init__(self, what: str) -> None:
        super().__init__(one_line(what))


class StepOutOfMemory(WorkerError):
    """Raised by launch or result. Of this plan nothing counts as computed; what was launched before does."""


@contextmanager
def refused_as(
    refusal: Callable[[str], Exception], what: object, *, but: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Let whatever a stranger's file makes its reader raise be the refusal of that file.

    Errors of the worker pass as they are, and so do exits and the errors of `but`. `refusal` makes an error
    of one line that names the file and what was raised. The traceback is in the log, at level debug: the
    fault may be ours.
    """
    passing: tuple[type[BaseException], ...] = (WorkerError, KeyboardInterrupt, SystemExit, GeneratorExit)
    try:
        yield
    except passing + but:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        log.debug("while %s was read", what, exc_info=True)
        kind = "" if type(error) is ValueError else type(error).__name__
        reason = one_line(f"{kind} {error}")[:_MAX_REASON_CHARS]
        raise refusal(f"{what} cannot be read: {reason}") from error
