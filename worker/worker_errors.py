"""Errors of the worker, by the party that can act on them.

WorkerError
├── StartupError           the operator can act: the text says what is wrong, and what to do
│   └── FamilyRefused      no option helps: this family cannot be served
├── UnsupportedAttention   a model asks attention for something that the backend would get wrong
├── SequenceRefused        one sequence of a plan cannot be computed; the others can
├── AdapterRefused         an adapter cannot be computed, or not exactly; the text names what is wrong with it
└── StepOutOfMemory        a step took more memory than the device has left; a smaller one may not
"""


class WorkerError(Exception):
    """Root of the worker's errors. Its text is for the log."""


class StartupError(WorkerError):
    """The model cannot be served as configured. One line: what is wrong; what to do."""

    def __init__(self, what: str, *, fix: str) -> None:
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


class StepOutOfMemory(WorkerError):
    """Raised by launch or result. Of this plan nothing counts as computed; what was launched before does."""
