"""Values that the operator sets in the place of a checkpoint's own.

Owns: the reading of --override-generation-config and --hf-overrides, the keys that they may have, and the
merge with config.json.
Never: a key that names code, other weights or another family: that is another checkpoint.
"""

import json
from collections.abc import Mapping
from typing import Any

from worker.checkpoint.generation_config import check_sampling
from worker.worker_errors import StartupError

_GENERATION_FLAG, _CONFIG_FLAG = "--override-generation-config", "--hf-overrides"
_FIXED = frozenset(
    {
        "auto_map",
        "architectures",
        "custom_pipelines",
        "model_type",
        "quantization_config",
        "transformers_version",
    }
)


def generation_overrides(text: str | None) -> dict[str, float]:
    """Parse and check defaults of sampling. Raises StartupError."""
    values = _object(_GENERATION_FLAG, text, '{"temperature": 0.7}')
    check_sampling(_GENERATION_FLAG, values)
    return values


def config_overrides(text: str | None) -> dict[str, Any]:
    """Parse the changes to config.json. Raises StartupError."""
    values = _object(_CONFIG_FLAG, text, '{"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}')
    fixed = sorted(_FIXED & values.keys())
    if fixed:
        raise StartupError(
            f"{_CONFIG_FLAG} sets {fixed[0]}, which says what the checkpoint is",
            fix="serve another checkpoint",
        )
    return values


def merged(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge objects key by key, and replace other values; null takes a key away."""
    result = dict(content)
    for key, value in overrides.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def _object(flag: str, text: str | None, example: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StartupError(f"{flag} is not a JSON object", fix=f"write '{example}', say")
    return found
