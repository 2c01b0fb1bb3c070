"""A head of EAGLE-3 in a folder of its own: its configuration and tensors, and a refusal of another model's.

Both published formats are read: that of speculators, which has the layer's configuration in a part by itself,
and the one before it, LlamaForCausalLMEagle3.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.attention.interface import ATTENTION_NAME
from worker.checkpoint.checkpoint_files import WeightFile, find_weights
from worker.checkpoint.plausible_sizes import check_sizes
from worker.load.model_sizes import vocab_size_of
from worker.speculation.eagle_layer import EagleHead
from worker.worker_errors import StartupError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of texts alone, of plain layers, before which hidden states can be read."""
_NUM_TAPPED = 3
_EMBEDDING, _OFFSETS = "body.embed_tokens.weight", "d2t"
_NOT_COMPUTED = ("quantization_config", "norm_output", "norm_before_fc")
_FIX = "take the head that was trained for this model"


def _eagle_config(content: dict[str, Any], model_config: Any, files: list[WeightFile]) -> Any:
    """Make the configuration of a head's layer for a model. Raises StartupError for another model's head."""
    if model_config.model_type not in _FAMILIES:
        reason = (
            f"heads of EAGLE-3 go with {', '.join(_FAMILIES)}, and the model is {model_config.model_type}"
        )
        raise StartupError(reason, fix="leave it out; what is generated is the same")
    check_sizes(content, files)
    layer = dict(content.get("transformer_layer_config") or content)
    settings = {**layer, **content, **(content.get("eagle_config") or {})}
    asked = [key for key in _NOT_COMPUTED if settings.get(key)]
    if asked or settings.get("use_aux_hidden_state") is False:
        raise StartupError(
            f"its {[*asked, 'use_aux_hidden_state'][0]} is not computed", fix="take another head"
        )
    if layer.get("model_type", "llama") != "llama" or layer.setdefault("num_hidden_layers", 1) != 1:
        raise StartupError("its layer is not one of llama", fix=_FIX)
    config = LlamaConfig.from_dict(layer)
    if config.vocab_size != model_config.vocab_size:
        reason = f"its vocabulary has {config.vocab_size} tokens, and the model's {model_config.vocab_size}"
        raise StartupError(reason, fix=_FIX)
    config.draft_vocab_size = content.get("draft_vocab_size") or config.vocab_size
    config.norm_before_residual = content.get("norm_before_residual") is True
    config.tapped = _tapped(content, model_config.num_hidden_layers)
    config._attn_implementation = ATTENTION_NAME
    return config


def _tapped(content: dict[str, Any], num_layers: int) -> list[int]:
    """Find the layers before which hidden states are read; names without a part count outputs of layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    named, of_outputs = content.get(key) or [], (content.get("eagle_config") or {}).get(key) or []
    found = named or [each + 1 for each in of_outputs] or [2, num_layers // 2, num_layers - 3]
    is_whole = all(type(each) is int for each in (*named, *of_outputs))
    is_rising = is_whole and sorted({*found}) == found and 0 <= found[0] <= found[-1] < num_layers
    if len(found) != _NUM_TAPPED or not is_rising:
        raise StartupError(f"it reads before layers {found} of a model of {num_layers}", fix=_FIX)
    return list(found)


def outline_eagle(folder: Path, content: dict[str, Any], model: Any) -> tuple[EagleHead, dict[str, str]]:
    """Make a head without content, and map names of its tensors to those of its files.

    Raises StartupError for another model's, by the headers of the files.
    """
    files = find_weights(folder)
    config = _eagle_config(content, model.config, files)
    stored = {name: each.shape for file in files for name, each in file.tensors.items() if name != "t2d"}
    names = {_own_name(name): name for name in stored}
    with torch.device("meta"):
        head = EagleHead(config, model.config.hidden_size, vocab_size_of(model))
    shapes = {name: tuple(each.shape) for name, each in head.state_dict().items()}
    head.has_embedding = _EMBEDDING in names or config.hidden_size != model.config.hidden_size
    if not head.has_embedding:
        del shapes[_EMBEDDING]
    if _OFFSETS in names:
        shapes[_OFFSETS] = (config.draft_vocab_size,)
    for name in sorted(shapes.keys() | names.keys()):
        own = names.get(name, name.removeprefix("body."))
        found, expected = stored.get(own, "not there"), shapes.get(name, "not there")
        if found != expected:
            raise StartupError(
                f"{own} is {found} in its files, and {expected} by its configuration", fix=_FIX
            )
    return head, names


def build_eagle(folder: Path, content: dict[str, Any], model: Any) -> EagleHead:
    """Build a head for a model. Raises StartupError for another model's."""
    head, names = outline_eagle(folder, content, model)
    state: dict[str, Tensor] = {}
    for file in find_weights(folder):
        with safe_open(file.path, framework="pt") as stored:
            state |= {own: stored.get_tensor(name) for own, name in names.items() if name in file.tensors}
    offsets_D = state.pop(_OFFSETS, None)
    state = {name: each.to(model.dtype) for name, each in state.items()}
    head.load_state_dict(state, strict=False, assign=True)
    if not head.has_embedding:
        head.body.embed_tokens = model.get_input_embeddings()
    head.body.rotary_emb = LlamaRotaryEmbedding(head.body.config)
    head.token_ids_D = _token_ids(offsets_D, head.lm_head.out_features, vocab_size_of(model))
    head.dtype = model.dtype
    return head.eval()


def _own_name(name: str) -> str:
    """Turn a name of either format into that of an EagleHead's tensor."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"body.{name}" if name.startswith(("layers.", "embed_tokens.")) else name


def _token_ids(offsets_D: Tensor | None, num_guessed: int, vocab_size: int) -> Tensor:
    """Find the model's numbers of the tokens that are guessed. Raises StartupError."""
    ids_D = torch.arange(num_guessed)
    ids_D += 0 if offsets_D is None else offsets_D.long()
    num_different = ids_D.unique().numel()  # type: ignore[no-untyped-call]
    if num_different < num_guessed or not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab_size:
        raise StartupError(f"d2t names other tokens than the model's {vocab_size}", fix=_FIX)
    return ids_D
