"""The environment variables of the processes that the API process starts.

Owns: that they find our packages, ask no hub for anything, and hold no API key.
Never: what a child does with them, or how it is started (child_process.py).
"""

import os

from engine.options.options import DECLARATIONS
from engine.processes.child_process import python_path

_SECRETS = frozenset(
    f"TOKENYARD_{name.upper()}" for name, declared in DECLARATIONS.items() if declared.is_secret
)
"""A child has no use for them; in its environment they would outlive the server's own care."""
_OFFLINE = {
    # Nothing is fetched after start: checkpoints are folders, or in the local cache already.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Whatever the operator's own environment says: a file that is missing must be an error, not a download."""


def child_environment(**defaults: str) -> dict[str, str]:
    """As ours; `defaults` are for what the operator has not set."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {**defaults, **inherited, **_OFFLINE, "PYTHONPATH": python_path()}
