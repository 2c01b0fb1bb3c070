"""A head of EAGLE-3 in a folder of its own: its configuration and tensors, and a refusal of another model's.

Both published formats are read: that of speculators, which has the layer's configuration in a part by itself,
and the one before it, LlamaForCausalLMEagle3.

Never: runs it (steps/head_steps.py), or decides whether a folder is a head (draft_kind.py).
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from worker.attention.interface import ATTENTION_NAME
from worker.checkpoint.checkpoint_files import find_weights
from worker.load.build import in_plain_words, refuse_mismatched
from worker.speculation.eagle_layer import EagleHead
from worker.worker_errors import StartupError

_NUM_TAPPED = 3
_EMBEDDING = "body.embed_tokens.weight"
_FIX = "take the head that was trained for this model"


def eagle_config(folder: Path, content: dict[str, Any], text_config: Any) -> Any:
    """Make the configuration of a head's layer for a model. Raises StartupError for another model's head."""
    layer = dict(content.get("transformer_layer_config") or content)
    if layer.get("model_type", "llama") != "llama" or layer.get("num_hidden_layers", 1) != 1:
        raise StartupError("its layer is not one of llama", fix=_FIX)
    with in_plain_words(folder):
        config = LlamaConfig.from_dict(layer)
    if config.vocab_size != text_config.vocab_size:
        reason = f"its vocabulary has {config.vocab_size} tokens, and the model's {text_config.vocab_size}"
        raise StartupError(reason, fix=_FIX)
    config.draft_vocab_size = content.get("draft_vocab_size") or config.vocab_size
    config.norm_before_residual = bool(content.get("norm_before_residual"))
    config.tapped = _tapped(content, text_config.num_hidden_layers)
    config._attn_implementation = ATTENTION_NAME
    return config


def _tapped(content: dict[str, Any], num_layers: int) -> list[int]:
    """Find the layers before which hidden states are read; names without a part count outputs of layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    of_outputs = (content.get("eagle_config") or {}).get(key)
    found = content.get(key) or [each + 1 for each in of_outputs or ()]
    found = found or [2, num_layers // 2, num_layers - 3]
    if len(found) != _NUM_TAPPED or sorted({*found}) != found or not 0 <= found[0] <= found[-1] < num_layers:
        raise StartupError(f"it reads before layers {found} of a model of {num_layers}", fix=_FIX)
    return list(found)


def build_eagle(folder: Path, content: dict[str, Any], model: Any, vocab_size: int) -> EagleHead:
    """Build a head for a model that samples so many tokens. Raises StartupError for another model's."""
    text_config = model.config.get_text_config(decoder=True)
    config = eagle_config(folder, content, text_config)
    state: dict[str, Tensor] = {}
    for file in find_weights(folder):
        with safe_open(file.path, framework="pt") as stored:
            state |= {_own_name(name): stored.get_tensor(name) for name in file.tensors}
    offsets_D = state.pop("d2t", None)
    state.pop("t2d", None)  # the same, the other way
    with torch.device("meta"):
        head = EagleHead(config, text_config.hidden_size, vocab_size)
    shapes = {name: each.shape for name, each in head.state_dict().items()}
    head.has_embedding = _EMBEDDING in state or config.hidden_size != text_config.hidden_size
    if not head.has_embedding:
        del shapes[_EMBEDDING]
    if strange := shapes.keys() ^ state.keys():
        raise StartupError(f"{min(strange)} is on one side only, of its files and its layer", fix=_FIX)
    different = [name for name, shape in shapes.items() if state[name].shape != shape]
    refuse_mismatched(folder, [(name, state[name].shape, shapes[name]) for name in different])
    state = {name: each.to(model.dtype) for name, each in state.items()}
    head.load_state_dict(state, strict=False, assign=True)
    if not head.has_embedding:
        head.body.embed_tokens = model.get_input_embeddings()
    head.body.rotary_emb = LlamaRotaryEmbedding(config)
    head.token_ids_D = _token_ids(offsets_D, config.draft_vocab_size, vocab_size)
    head.dtype = model.dtype
    return head.eval()


def _own_name(name: str) -> str:
    """Turn a name of either format into that of an EagleHead's tensor."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    return f"body.{name}" if name.startswith(("layers.", "embed_tokens.")) else name


def _token_ids(offsets_D: Tensor | None, num_guessed: int, vocab_size: int) -> Tensor:
    """Find the model's numbers of the tokens that are guessed. Raises StartupError."""
    ids_D = torch.arange(num_guessed)
    if offsets_D is not None and offsets_D.shape != ids_D.shape:
        raise StartupError(f"d2t has no number for each of its {num_guessed} tokens", fix=_FIX)
    ids_D += 0 if offsets_D is None else offsets_D.long()
    if len({*ids_D.tolist()}) < num_guessed or not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab_size:
        raise StartupError(f"d2t names other tokens than the model's {vocab_size}", fix=_FIX)
    return ids_D
