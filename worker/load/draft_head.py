"""The head of a checkpoint that drafts tokens (MTP): where its tensors are, and its build as one layer.

transformers passes over these tensors. A head is a layer of the model's family between two joined inputs and
the model's own output layer:

    token at p + 1 -> embedding -> norm -+
                                         +- joint -> layer -> norm -> the model's output layer
    hidden state at p ----------> norm -+

Owns: both layouts of names, and the refusal of a head that is not this model's.
Never: runs it (steps/head_steps.py).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from worker.attention.interface import ATTENTION_NAME, FULL_LAYER
from worker.checkpoint.checkpoint_files import WeightFile
from worker.load.build import compress, from_pretrained, in_plain_words, refuse_mismatched
from worker.load.draft_kind import WITHOUT_HEAD
from worker.load.model_kind import ModelKind
from worker.speculation.head_layer import DraftHead
from worker.worker_errors import StartupError

_PLAIN = frozenset({"F32", "F16", "BF16"})
_EMBEDDING = "embed_tokens.weight"
# Of a layer behind the model's last, as DeepSeek and GLM have it, and of a part by itself, as Qwen has it.
_NEXTN_NAMES = {"enorm": "token_norm", "hnorm": "hidden_norm", "eh_proj": "joint", "shared_head.norm": "norm"}
_MTP_NAMES = {
    "pre_fc_norm_embedding": "token_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "joint",
    "norm": "norm",
}
_OF_THE_MODEL = (_EMBEDDING, "shared_head.head.weight")
"""Copies of the model's own embedding and output layer, which are taken instead."""
_INPUTS = ("token_norm", "hidden_norm", "joint")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHead:
    """Tensors of a head in the files, each by the name that it has in a DraftHead."""

    names: Mapping[str, str]
    """Own name -> name in the files."""
    files: Sequence[WeightFile]
    """The files with these tensors alone."""


def find_head(kind: ModelKind, files: Sequence[WeightFile]) -> StoredHead | None:
    """Find the head of a checkpoint, the first where there are several; None where there is none.

    Raises StartupError for one that cannot be read, or that is another model's.
    """
    content = kind.checkpoint_config.get("text_config") or kind.checkpoint_config
    num_layers, hidden_size = content.get("num_hidden_layers"), content.get("hidden_size")
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    places = (
        (f"model.layers.{num_layers}.", f"model.layers.{num_layers}.", _NEXTN_NAMES),
        ("mtp.", "mtp.layers.0.", _MTP_NAMES),
    )
    for prefix, layer_prefix, words in places:
        inputs = {f"{prefix}{word}.weight": f"{own}.weight" for word, own in words.items()}
        if missing := tuple([each.removesuffix("weight") for each in inputs if each not in tensors]):
            _refuse_codes({name: each.dtype for name, each in tensors.items() if name.startswith(missing)})
            continue
        vocab_size = content.get("vocab_size")
        for name in (f"{prefix}{each}" for each in _OF_THE_MODEL):
            if name in tensors and tensors[name].shape != (vocab_size, hidden_size):
                raise _another_models(name, tensors[name].shape, (vocab_size, hidden_size))
        layer = {
            name: f"layers.0.{name.removeprefix(layer_prefix)}"
            for name in tensors
            if name.startswith(layer_prefix) and name not in inputs and not name.endswith(_OF_THE_MODEL)
        }
        names = {own: name for name, own in (inputs | layer).items()}
        _refuse_codes({name: tensors[name].dtype for name in names.values()})
        stored = {*names.values()}
        own_files = [
            replace(file, tensors={name: file.tensors[name] for name in file.tensors if name in stored})
            for file in files
        ]
        return StoredHead(names=names, files=[file for file in own_files if file.tensors])
    return None


def no_head(kind: ModelKind) -> StartupError:
    """Make the refusal of a checkpoint without a head."""
    return StartupError(f"{kind.folder} has no head that drafts (MTP)", fix=WITHOUT_HEAD)


def build_head(kind: ModelKind, stored: StoredHead, model: Any) -> DraftHead:
    """Build a head as a layer of `model`'s family, with the model's embedding. Raises StartupError."""
    config = _config_of_one_layer(model)
    state: dict[str, Tensor] = {}
    for file in stored.files:
        own = {name: own for own, name in stored.names.items() if name in file.tensors}
        with safe_open(file.path, framework="pt") as content:
            state |= {own[name]: content.get_tensor(name) for name in own}
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    hidden_size = config.hidden_size
    shapes = {
        "token_norm": (hidden_size,),
        "hidden_norm": (hidden_size,),
        "joint": (hidden_size, 2 * hidden_size),
    }
    inputs = {name: state.pop(f"{name}.weight").to(model.dtype) for name in _INPUTS}
    for name, shape in shapes.items():
        if inputs[name].shape != shape:
            raise _another_models(stored.names[f"{name}.weight"], inputs[name].shape, shape)
    if isinstance(getattr(embedding, "weight", None), Tensor):
        state[_EMBEDDING] = embedding.weight  # else one without meaning would be made
    with in_plain_words(kind.folder):
        body, loading = from_pretrained(
            type(decoder),
            None,
            config=config,
            dtype=model.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            state_dict=state,
        )
    names = stored.names
    refuse_mismatched(
        kind.folder, [(names.get(own, own), there, here) for own, there, here in loading["mismatched_keys"]]
    )
    strange = sorted({*loading["missing_keys"], *loading["unexpected_keys"]} - {_EMBEDDING})
    if strange:
        raise StartupError(
            f"the head that drafts is not one layer of {config.model_type}: {strange[0]} is on one side only",
            fix=WITHOUT_HEAD,
        )
    body.embed_tokens = embedding
    compress(body, None)
    norms = [copy.deepcopy(body.norm) for _ in range(2)]
    for norm, name in zip(norms, _INPUTS, strict=False):
        norm.weight = nn.Parameter(inputs[name], requires_grad=False)
    joint = nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")
    joint.weight = nn.Parameter(inputs["joint"], requires_grad=False)
    return DraftHead(body, norms[0], norms[1], joint).eval()


def _config_of_one_layer(model: Any) -> Any:
    """Copy the configuration of a model for one layer, of the kind of the model's last."""
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = [FULL_LAYER]
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def _refuse_codes(dtypes: Mapping[str, str]) -> None:
    """Raise StartupError for a head whose weights are codes."""
    for name, dtype in dtypes.items():
        if dtype not in _PLAIN:
            raise StartupError(
                f"{name} is {dtype}: a head that drafts is read in plain numbers only",
                fix=WITHOUT_HEAD,
            )


def _another_models(name: str, there: Sequence[int], here: Sequence[Any]) -> StartupError:
    return StartupError(
        f"{name} is {list(there)} in the files, and {list(here)} by config.json: the head is another model's",
        fix=WITHOUT_HEAD,
    )
