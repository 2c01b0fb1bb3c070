"""FlashAttention 3 of an installed vLLM, by its library alone: vLLM itself changes torch, and is not loaded.

Raises ImportError where vLLM, its library, or an argument that is known here is missing.

Source: `flash_attn_interface.py` of vLLM 0.24, and the schema that the library registers.

Shapes: T tokens, Hq query heads, D key and value size.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_LIBRARY = "vllm_flash_attn/_vllm_fa3_C*.so"
_SETTINGS: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Values that vLLM gives to the arguments that may not be None."""
_NAMES_OF_VLLM = {
    **{name: name for name in ("page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "softcap")},
    "cache_seqlens": "seqused_k",
    "causal": "is_causal",
}
_GIVEN = ("q", "k", "v", *_NAMES_OF_VLLM.values())


def _load() -> Any:
    spec = find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = [path for folder in folders for path in Path(folder).glob(_LIBRARY)]
    if not libraries:
        raise ImportError("neither flash_attn_interface nor vLLM's library of it is installed")
    torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    return torch.ops._vllm_fa3_C.fwd.default


_fwd = _load()
_NAMES = tuple(argument.name for argument in _fwd._schema.arguments)
_unknown = [
    argument.name
    for argument in _fwd._schema.arguments
    if argument.name not in (*_GIVEN, *_SETTINGS) and not isinstance(argument.type, torch.OptionalType)
]
_missing = [name for name in _GIVEN if name not in _NAMES]
if _unknown or _missing:
    raise ImportError(f"vLLM's FlashAttention 3 has other arguments: {', '.join(_unknown + _missing)}")


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **others: Any) -> Tensor:
    """Return [T, Hq, D], as the function of that name in `flash_attn_interface` does."""
    given = {"q": q, "k": k_cache, "v": v_cache, **_SETTINGS}
    given |= {_NAMES_OF_VLLM[name]: value for name, value in others.items()}
    found_THD: Tensor = _fwd(*(given.get(name) for name in _NAMES))[0]
    return found_THD
