"""Tiny GGUF files from random blocks, each beside the plain checkpoint that it stands for.

Owns: the writing, by the package gguf, as llama.cpp's converter does it. Nothing is rounded: both hold the
same numbers.
Never: reads GGUF files (worker/checkpoint and worker/quantized do).
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf")

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
FAMILIES |= {"mixtral": "llama", "qwen3_moe": "qwen3moe", "smollm3": "smollm3", "granite": "granite"}
"""Families of tests/checkpoints.py, and their names in GGUF files."""
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
"""Rows of whole blocks of any type."""
_PLACES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
_PLACES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0]}
_TYPICAL = {"Q4_0": 4.6, "Q4_1": 8, "Q5_0": 9, "Q5_1": 16, "Q8_0": 74, "Q4_K": 270, "Q5_K": 560, "Q6_K": 1300}
_TYPICAL |= {"IQ4_NL": 70, "IQ4_XS": 1100}
"""Size of a code times the whole number of its group."""
_SIZE = 0.15
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_INTERLEAVED = {"llama", "mixtral", "smollm3", "granite"}
_EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_STACKS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class RandomBlocks:
    """Random bytes whose numbers are of a typical size."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def of(self, kind: str, num_rows: int, num_inputs: int) -> NDArray[np.uint8]:
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        shape = (num_rows, num_inputs // size, num_bytes)
        raw = torch.randint(256, shape, dtype=torch.uint8, generator=self._generator)
        for place in _PLACES[kind]:
            values = torch.rand((*shape[:2], 1), generator=self._generator) + 0.5
            raw[:, :, place : place + 2] = (values * _SIZE / _TYPICAL[kind]).half().view(torch.uint8)
        if place == 2:  # codes from 0 on: the offset brings their middle to 0
            factor = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
            scales = raw[:, :, :2].contiguous().view(torch.float16)
            raw[:, :, 2:4] = (scales * factor).view(torch.uint8)
        return raw.view(num_rows, -1).numpy()


def write_gguf(family: str, kinds: dict[str, str], root: Path, *, is_tied: bool) -> tuple[Path, Path]:
    """Write a file, and the plain checkpoint that it stands for; returns both paths.

    `kinds` are types of tensors by the end of their module's name; "" is for all others.
    """
    name = f"{family} {'-'.join(kinds.values())}{' tied' if is_tied else ''}"
    plain, path = root / f"{name} plain", root / f"{name}.gguf"
    sizes = _SIZES | ({"moe_intermediate_size": 256} if family == "qwen3_moe" else {})
    sizes |= {"query_pre_attn_scalar": _SIZES["head_dim"]} if family.startswith("gemma") else {}
    make_checkpoint(family, plain, tie_word_embeddings=is_tied, **sizes)
    config = json.loads((plain / "config.json").read_text())
    config |= {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    writer = gguf.GGUFWriter(path, FAMILIES[family])
    add_shape(writer, config)
    add_tokenizer(writer, plain)
    tensors, random = load_file(plain / "model.safetensors"), RandomBlocks()
    stacks: dict[str, list[Any]] = {}
    for tensor_name in sorted(tensors):
        module = tensor_name.removesuffix(".weight")
        ending = next(end for end in sorted(kinds, key=len, reverse=True) if module.endswith(end))
        tensor, kind = tensors[tensor_name], kinds[ending]
        if tensor.dim() == 1 or kind in ("F32", "F16", "BF16"):
            if tensor.dim() > 1 and kind != "F32":
                tensors[tensor_name] = tensor = tensor.to(_DTYPES[kind]).float()
            kind, stored = _plain(tensor, kind, FAMILIES[family], tensor_name)
        else:
            stored = random.of(kind, *tensor.shape)
            numbers = gguf.dequantize(stored, gguf.GGMLQuantizationType[kind])
            tensors[tensor_name] = torch.from_numpy(numbers.copy())
        expert = _EXPERT.fullmatch(tensor_name)
        if expert is not None:  # sorted by name, and of fewer than ten
            layer = expert[1].replace("model.layers", "blk")
            stacks.setdefault(f"{layer}.ffn_{_STACKS[expert[3]]}_exps.weight {kind}", []).append(stored)
            continue
        if family in _INTERLEAVED and re.search(r"self_attn\.[qk]_proj", tensor_name):
            stored = _interleaved(stored, config["head_dim"])
        writer.add_tensor(_name_of(tensor_name, family), stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    for stack, parts in stacks.items():
        stack_name, kind = stack.split()
        writer.add_tensor(stack_name, np.stack(parts), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    return path, plain


def _plain(tensor: torch.Tensor, kind: str, family: str, name: str) -> tuple[str, NDArray[Any]]:
    """Type and numbers: norms and biases are float32, and Gemma's norms have a 1 in them."""
    if tensor.dim() == 1:
        added = 1.0 if family.startswith("gemma") and name.endswith("norm.weight") else 0.0
        return "F32", (tensor.float() + added).numpy()
    numbers = tensor.to(_DTYPES[kind])
    return kind, numbers.view(torch.uint8).numpy() if kind == "BF16" else numbers.numpy()


def _interleaved(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(rows.shape))


def _name_of(name: str, family: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    number, inner = module.removeprefix("model.layers.").split(".", 1)
    norms = _FOUR_NORMS if family.startswith("gemma") else _TWO_NORMS
    return f"blk.{number}.{(_NAMES | norms)[inner]}.{kind}"


def add_shape(writer: Any, config: dict[str, Any]) -> None:
    """The metadata of a family."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    if config["model_type"] == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("sliding_window") and "layer_types" in config and "gemma" in config["model_type"]:
        writer.add_sliding_window(config["sliding_window"])
        slides = [each == "sliding_attention" for each in config["layer_types"]]
        writer.add_sliding_window_pattern(slides)
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_tokenizer(writer: Any, folder: Path) -> None:
    """The byte-level tokenizer of tests/checkpoints.py."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    tokens = [by_id.get(number) or special[number] for number in range(len(by_id) + len(special))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[number in special] for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_pad_token_id(tokens.index(settings["pad_token"]))
    writer.add_chat_template(settings["chat_template"])
