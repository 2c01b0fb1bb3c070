"""Refusals of speculation where drafts cannot be verified.

Owns: the error, which names the option.
Never: decides whether they can; the start of each kind of steps does.
"""

from worker.worker_config import DraftMethod, WorkerConfig
from worker.worker_errors import StartupError


def refuse_speculation(config: WorkerConfig, reason: str) -> None:
    """Raise StartupError if --speculative-config was given; `reason` says what drafts are in the way of."""
    if config.speculation.method is not DraftMethod.PREDICTION:
        raise StartupError(
            f"--speculative-config: {reason}",
            fix="leave it out; what is generated is the same without it",
        )
