"""The environment variables of the processes that the API process starts.

Owns: that child processes find our packages, ask no hub for anything, and hold no API key.
"""

import os

from engine.options.options import DECLARATIONS
from engine.processes.child_process import python_path

_SECRETS = frozenset(
    f"TOKENYARD_{name.upper()}" for name, declared in DECLARATIONS.items() if declared.is_secret
)
"""Variables that children do not need and should not hold."""
_OFFLINE = {
    # Nothing is fetched after start: checkpoints are folders, or in the local cache already.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Override the operator's environment: a missing file must be an error, not a download."""


def child_environment(**defaults: str) -> dict[str, str]:
    """Copy our environment without secrets; `defaults` hold where the operator has set nothing."""
    inherited = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return {**defaults, **inherited, **_OFFLINE, "PYTHONPATH": python_path()}
