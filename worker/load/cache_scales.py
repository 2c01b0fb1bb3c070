"""Scales of stored keys and values that a checkpoint was calibrated with, for a KV cache of eight bits.

Owns: their names in the files. Kept keys are divided by them and multiplied again, as values are.
"""

import logging
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from safetensors import safe_open

from worker.checkpoint.checkpoint_files import WeightFile
from worker.worker_errors import StartupError

log = logging.getLogger(__name__)

# A layer of the language model, then the name: of compressed-tensors, ModelOpt, and older writers.
_SCALE = re.compile(
    r"(?:(?:model|language_model|text_model|transformer)\.)*(?:layers|h)\.(?P<layer>\d+)\.\w+\.(?:attn\.)?"
    r"(?:(?:k_proj\.)?(?P<key>k_scale)|(?:v_proj\.)?(?P<value>v_scale)"
    r"|k_proj\.(?P<key_output>output_scale)|v_proj\.(?P<value_output>output_scale)|(?P<both>kv_(?:cache_)?scale))"
)
_KEY, _VALUE = 0, 1
_MEANT = {"key": (_KEY,), "value": (_VALUE,), "both": (_KEY, _VALUE)}
_MEANT |= {"key_output": (_KEY,), "value_output": (_VALUE,)}


def read_cache_scales(files: Sequence[WeightFile]) -> dict[int, tuple[float, float]]:
    """Read the scales of keys and of values by layer, of those that have both.

    A layer has one scale for all heads: the largest of several. Raises StartupError for no finite number.
    """
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for file in files:
        names = {name: match for name in file.tensors if (match := _SCALE.fullmatch(name)) is not None}
        if not names:
            continue
        with safe_open(file.path, framework="pt") as stored:
            for name, match in names.items():
                scale = float(stored.get_tensor(name).float().max())
                if not (math.isfinite(scale) and scale > 0):
                    raise StartupError(
                        f"{name} is {scale}, which is no scale of a KV cache",
                        fix="leave --kv-cache-dtype out",
                    )
                assert match.lastgroup is not None
                for part in _MEANT[match.lastgroup]:
                    found[int(match["layer"])][part] = scale
    scales = {
        layer: (both[_KEY], both[_VALUE]) for layer, both in found.items() if len(both) == len(_MEANT["both"])
    }
    if scales:
        log.info("the KV cache has the checkpoint's own scales in %d layers", len(scales))
    return scales
