"""Values that the operator sets in the place of a checkpoint's own.

Owns: the reading of --override-generation-config, --default-chat-template-kwargs and --hf-overrides, the keys
that they may have, and the merge with config.json; the words that config.json may have for those of
transformers.
Never: a key that names code, other weights or another family: that is another checkpoint.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from worker.checkpoint.generation_config import check_sampling
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

_GENERATION_FLAG, _CONFIG_FLAG = "--override-generation-config", "--hf-overrides"
_TEMPLATE_FLAG = "--default-chat-template-kwargs"
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

_SAME_FAMILIES = {"kimi_k2": "deepseek_v3"}
"""Model types of checkpoints that bring code for what transformers has under another name."""
_DTYPES = {"half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "bf16": "bfloat16"}
# Angles by three positions (mrope) are the usual ones where the three are equal, and families that have
# pictures read the sections by themselves.
_ROPES = {"su": "longrope", "mrope": "default"}
_SAME_WORDS = {"dtype": _DTYPES, "torch_dtype": _DTYPES, "rope_type": _ROPES, "type": _ROPES}
"""Words of other libraries, or older ones, by the key whose value they are."""


def generation_overrides(text: str | None) -> dict[str, float]:
    """Parse and check defaults of sampling. Raises StartupError."""
    values = _object(_GENERATION_FLAG, text, '{"temperature": 0.7}')
    check_sampling(_GENERATION_FLAG, values)
    return values


def template_kwargs(text: str | None) -> dict[str, Any]:
    """Parse defaults of the chat template's variables. Raises StartupError."""
    return _object(_TEMPLATE_FLAG, text, '{"enable_thinking": false}')


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
    """Merge objects key by key, and replace other values; null takes a key away. Raises StartupError."""
    result = dict(content)
    parameters, others = result.get("rope_parameters"), overrides.get("rope_parameters", {})
    has_objects = all(isinstance(each, dict) for each in (overrides.get("rope_scaling"), parameters, others))
    if has_objects and parameters:
        overrides = _with_new_name(overrides, parameters)
    for key, value in overrides.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def _with_new_name(overrides: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Name rope_scaling as newer files do, where it would replace the base of all angles too."""
    scaling = dict(overrides["rope_scaling"])
    if any(isinstance(each, dict) for each in parameters.values()):
        raise StartupError(
            f"{_CONFIG_FLAG} sets rope_scaling, and config.json has rope_parameters for each kind of layers",
            fix='name the kind: {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2}}}',
        )
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    others = {key: value for key, value in overrides.items() if key != "rope_scaling"}
    return {**others, "rope_parameters": merged(scaling, others.get("rope_parameters", {}))}


def in_known_words(content: dict[str, Any]) -> dict[str, Any]:
    """Copy config.json with transformers' names of the family, of dtypes and of rotary embeddings."""
    result = {key: _renamed(key, value) for key, value in content.items()}
    named = content.get("model_type")
    known = _SAME_FAMILIES.get(named) if isinstance(named, str) else None
    if known is not None:
        log.info("model_type %s is served as %s", named, known)
        result["model_type"] = known
    elif named == "mistral" and "layer_types" in content:  # as AutoConfig reads it
        result["model_type"] = "ministral"
    return result


def _renamed(key: str, value: Any) -> Any:
    if isinstance(value, str) and key in _SAME_WORDS:
        word = value.removeprefix("torch.")
        return _SAME_WORDS[key].get(word, word)
    if isinstance(value, list):
        return [_renamed("", each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:  # an infinity, as transformers 5 writes it
        return float(value["__float__"])
    return {name: _renamed(name, each) for name, each in value.items()}


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
