"""The head of a checkpoint that drafts tokens (MTP): where its tensors are, and its build as one layer.

transformers passes over these tensors. A head is a layer of the model's family between two joined inputs and
the model's own output layer:

    token at p + 1 -> embedding -> norm -+
                                         +- joint -> layer -> norm -> the model's output layer
    hidden state at p ----------> norm -+
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from worker.attention.interface import ATTENTION_NAME, FULL_LAYER
from worker.checkpoint.checkpoint_files import WeightFile, module_of
from worker.checkpoint.passed_over import is_scale_of_values
from worker.load.build import compress, from_pretrained, in_plain_words, refuse_mismatched
from worker.load.draft_kind import WITHOUT_HEAD
from worker.load.model_kind import ModelKind
from worker.load.quantized_loading import QuantizedModules, arguments_of, group_by_module
from worker.load.stored_weights import StoredLinear, StoredModule
from worker.quantized.scheme import MARKERS, find_reader
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
    codes: QuantizedModules | None
    """Modules whose weights are codes, each with its place in a DraftHead; None where there are none."""


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
        modules = {f"{prefix}{word}": own for word, own in words.items()}
        inputs = {
            name: f"{modules[module]}.{last_name}"
            for name, (module, last_name) in ((name, module_of(name)) for name in tensors)
            if module in modules
        }
        if {module_of(name)[0] for name in inputs} != modules.keys():
            continue
        vocab_size = content.get("vocab_size")
        for name in (f"{prefix}{each}" for each in _OF_THE_MODEL):
            if name in tensors and tensors[name].shape != (vocab_size, hidden_size):
                raise _another_models(name, tensors[name].shape, (vocab_size, hidden_size))
        layer = {
            name: f"layers.0.{name.removeprefix(layer_prefix)}"
            for name in tensors
            if name.startswith(layer_prefix) and name not in inputs and not name.endswith(_OF_THE_MODEL)
            if not is_scale_of_values(module_of(name)[1])
        }
        names = {own: name for name, own in (inputs | layer).items()}
        stored = {*names.values()}
        own_files = [
            replace(file, tensors=own)
            for file in files
            if (own := {name: each for name, each in file.tensors.items() if name in stored})
        ]
        return StoredHead(names=names, files=own_files, codes=_find_codes(kind, names, own_files))
    return None


def _find_codes(
    kind: ModelKind, names: Mapping[str, str], files: Sequence[WeightFile]
) -> QuantizedModules | None:
    """Find the modules of codes. What is plain is read as it is, whatever quantization_config says of it.

    Raises StartupError for codes of which nothing says how they are read.
    """
    places = {module_of(name)[0]: module_of(own)[0] for own, name in names.items()}
    found: dict[str, StoredModule] = {}
    for name, stored in group_by_module(files).items():
        has_codes = stored.has_stacks or not MARKERS.isdisjoint(stored.last_names)
        if kind.quantization is not None and has_codes:
            found[name] = replace(stored, place=places[name])
            continue
        for last_name, tensor in stored.places.items():
            if tensor.dtype not in _PLAIN:
                raise StartupError(
                    f"{name}.{last_name} is {tensor.dtype}, and config.json does not say how to read it",
                    fix=WITHOUT_HEAD,
                )
    return QuantizedModules(kind.quantization, found) if kind.quantization and found else None


def no_head(kind: ModelKind) -> StartupError:
    """Make the refusal of a checkpoint without a head."""
    return StartupError(f"{kind.folder} has no head that drafts (MTP)", fix=WITHOUT_HEAD)


def build_head(kind: ModelKind, stored: StoredHead, model: Any) -> DraftHead:
    """Build a head as a layer of `model`'s family, with the model's embedding. Raises StartupError."""
    config = _config_of_one_layer(model)
    state, codes = _plain_tensors(stored), stored.codes
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    inputs = _take_inputs(state, stored, config.hidden_size, model.dtype)
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
            **arguments_of(codes),
        )
    names = stored.names
    refuse_mismatched(
        kind.folder, [(names.get(own, own), there, here) for own, there, here in loading["mismatched_keys"]]
    )
    strange = {*loading["missing_keys"], *loading["unexpected_keys"], *_without_place(state, codes)}
    if codes is not None:
        strange -= {f"{name}.weight" for name in codes.numbers}
        codes.fill(body, model.device)
    if strange := strange - {_EMBEDDING}:
        name = min(strange)
        raise StartupError(
            f"the head that drafts is not one layer of {config.model_type}: {name} is on one side only",
            fix=WITHOUT_HEAD,
        )
    body.embed_tokens = embedding
    compress(body, codes)
    norms = [copy.deepcopy(body.norm) for _ in range(2)]
    for norm, name in zip(norms, _INPUTS, strict=False):
        norm.weight = nn.Parameter(inputs[name], requires_grad=False)
    joint = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, device="meta")
    joint.weight = nn.Parameter(inputs["joint"], requires_grad=False)
    return DraftHead(body, norms[0], norms[1], joint).eval()


def _take_inputs(
    state: dict[str, Tensor], stored: StoredHead, size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Take the weights before the layer out of all. Raises StartupError for those of another model."""
    shapes = {"token_norm": (size,), "hidden_norm": (size,), "joint": (size, 2 * size)}
    if stored.codes is not None:
        state |= _read_joint(stored.codes, (size, 2 * size), dtype)
    inputs = {name: state.pop(f"{name}.weight").to(dtype) for name in _INPUTS}
    for name, shape in shapes.items():
        if inputs[name].shape != shape:
            raise _another_models(stored.names[f"{name}.weight"], inputs[name].shape, shape)
    return inputs


def _plain_tensors(stored: StoredHead) -> dict[str, Tensor]:
    """Read the tensors that are no part of a weight of codes, by their own names."""
    weights: Collection[str] = () if stored.codes is None else stored.codes.stored
    own = {
        name: own
        for own, name in stored.names.items()
        if module_of(name)[0] not in weights or name.endswith("bias")
    }
    state: dict[str, Tensor] = {}
    for file in stored.files:
        with safe_open(file.path, framework="pt") as content:
            state |= {own[name]: content.get_tensor(name) for name in file.tensors if name in own}
    return state


def _read_joint(codes: QuantizedModules, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a joint of codes as numbers, by its own name. Raises QuantizationRefused."""
    for stored in codes.stored.values():
        reader = (
            find_reader(codes.rules, stored.module, stored.last_names) if stored.place == "joint" else None
        )
        if reader is not None:
            weight = StoredLinear(stored, reader, dtype, shape).read()
            return {"joint.weight": weight.dequantized(dtype)}
    return {}


def _without_place(state: Mapping[str, Tensor], codes: QuantizedModules | None) -> set[str]:
    """Find what the layer of a head in codes has no place for; biases that are all 0 need none."""
    if codes is None or codes.places is None:
        return set()
    biases = {name for name, tensor in state.items() if name.endswith("bias") and not tensor.any()}
    weights = {
        f"{each.place}.{'down_proj' if each.has_stacks else 'weight'}"
        for each in codes.stored.values()
        if each.place not in _INPUTS
    }
    return {name for name in (weights | state.keys()) - biases if codes.places.find(name) is None}


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


def _another_models(name: str, there: Sequence[int], here: Sequence[Any]) -> StartupError:
    return StartupError(
        f"{name} is {list(there)} in the files, and {list(here)} by config.json: the head is another model's",
        fix=WITHOUT_HEAD,
    )
