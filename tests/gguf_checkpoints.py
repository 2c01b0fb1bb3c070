"""Tiny GGUF files from random blocks, each beside the plain checkpoint that it stands for.

Owns: the writing, by the package gguf, as llama.cpp's converter does it: names, orders and metadata
(gguf_conversion.py). Nothing is rounded: both hold the same numbers.
Never: reads GGUF files (worker/checkpoint and worker/quantized do).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf")

from tests.gguf_conversion import FAMILIES, add_shape, converted, extra_tensors  # noqa: E402 -- needs gguf

__all__ = ["FAMILIES", "RandomBlocks", "add_shape", "add_tokenizer", "gguf", "write_gguf"]

_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
"""Rows of whole blocks of any type."""
_EXPERTS = {"moe_intermediate_size": 256}
_DELTA_NET = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_LATENTS = {
    "head_dim": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    **_EXPERTS,
}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS,
    "llama4_scout": {
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "gemma4_text": {"global_head_dim": 128, "hidden_size_per_layer_input": 256},
    "gemma4_experts": {"global_head_dim": 128, **_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 256},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 256},
    "glm4_moe": {
        **_EXPERTS,
        "n_group": 2,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2": {**_LATENTS, "q_lora_rank": None},
    "deepseek_v3": {**_LATENTS, "q_lora_rank": 256, "first_k_dense_replace": 1},
    "phi3": {"head_dim": None},
    "phi3_longrope": {
        "head_dim": None,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.01 * each for each in range(32)],
            "long_factor": [1.0 + 0.5 * each for each in range(32)],
        },
    },
    "lfm2": {"head_dim": None, "block_ff_dim": 512},
    "lfm2_moe": {"head_dim": None, **_EXPERTS},
}
_PLACES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]}
_PLACES |= {"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": []}
_TYPICAL = {"Q4_0": 4.6, "Q4_1": 8, "Q5_0": 9, "Q5_1": 16, "Q8_0": 74, "Q4_K": 270, "Q5_K": 560, "Q6_K": 1300}
_TYPICAL |= {"IQ4_NL": 70, "IQ4_XS": 1100}
"""Size of a code times the whole number of its group."""
_SIZE = 0.15
_POWER = 123
"""Exponent of a block of MXFP4 whose numbers are of that size."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ALWAYS_FLOATS = ("ffn_gate_inp", "conv", "sinks", "ssm_conv1d", "layer_output_scale")
"""Parts of names of matrices that the converter writes as F32 in any file."""


class RandomBlocks:
    """Random bytes whose numbers are of a typical size."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def of(self, kind: str, num_rows: int, num_inputs: int) -> NDArray[np.uint8]:
        size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        shape = (num_rows, num_inputs // size, num_bytes)
        raw = torch.randint(256, shape, dtype=torch.uint8, generator=self._generator)
        place = None
        for place in _PLACES[kind]:
            values = torch.rand((*shape[:2], 1), generator=self._generator) + 0.5
            raw[:, :, place : place + 2] = (values * _SIZE / _TYPICAL[kind]).half().view(torch.uint8)
        if place is None:
            raw[:, :, 0] = raw[:, :, 0] % 2 + _POWER
        if place == 2:  # codes from 0 on: the offset brings their middle to 0
            factor = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
            scales = raw[:, :, :2].contiguous().view(torch.float16)
            raw[:, :, 2:4] = (scales * factor).view(torch.uint8)
        return raw.view(num_rows, -1).numpy()


def write_gguf(family: str, kinds: dict[str, str], root: Path, *, is_tied: bool) -> tuple[Path, Path]:
    """Write a file, and the plain checkpoint that it stands for; returns both paths.

    `kinds` are types of tensors by the end of their module's name; "" is for all others.
    """
    from transformers import AutoModelForCausalLM

    name = f"{family} {'-'.join(kinds.values())}{' tied' if is_tied else ''}"
    plain, path = root / f"{name} plain", root / f"{name}.gguf"
    sizes = _SIZES | _FAMILY_SIZES.get(family, {})
    make_checkpoint(family, plain, tie_word_embeddings=is_tied, **sizes)
    config = json.loads((plain / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, FAMILIES[family])
    add_shape(writer, config)
    add_tokenizer(writer, plain)
    random = RandomBlocks()
    for parameter, tensor in sorted(model.state_dict().items()):
        if is_tied and parameter == "lm_head.weight":
            continue
        module = parameter.removesuffix(".weight")
        kind = kinds[next(end for end in sorted(kinds, key=len, reverse=True) if module.endswith(end))]
        with torch.no_grad():
            for stored_name, stored in _stored(config, parameter, tensor, kind, random):
                raw, raw_kind = stored
                raw_type = gguf.GGMLQuantizationType[raw_kind]
                writer.add_tensor(stored_name, np.ascontiguousarray(raw), raw_dtype=raw_type)
    for stored_name, numbers in extra_tensors(config):
        writer.add_tensor(stored_name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.save_pretrained(plain)
    return path, plain


def _stored(
    config: dict[str, Any], name: str, tensor: torch.Tensor, kind: str, random: RandomBlocks
) -> Iterator[tuple[str, tuple[NDArray[Any], str]]]:
    """Yield what the file has for a parameter, and put the numbers that this stands for into it.

    A tensor of blocks has random ones. The place of each of its numbers in the parameter is found by what the
    converter does with a tensor of places.
    """
    places = torch.arange(tensor.numel()).view(tensor.shape)
    stored_places = dict(converted(config, name, places))
    for stored_name, numbers in converted(config, name, tensor):
        if tensor.dim() == 1 or kind == "F32" or any(part in stored_name for part in _ALWAYS_FLOATS):
            yield stored_name, (numbers.float().numpy(), "F32")
            continue
        if kind in _DTYPES:
            if numbers.dim() < 2 or stored_name.endswith("bias"):
                yield stored_name, (numbers.float().numpy(), "F32")
                continue
            rounded = numbers.to(_DTYPES[kind]).contiguous()
            values = rounded.float()
            raw = rounded.view(torch.uint8).numpy() if kind == "BF16" else rounded.numpy()
        elif stored_name.endswith("bias"):
            yield stored_name, (numbers.float().numpy(), "F32")
            continue
        else:
            rows = random.of(kind, numbers.numel() // numbers.shape[-1], numbers.shape[-1])
            found = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
            values = torch.from_numpy(found.copy()).view(numbers.shape)
            raw = rows.reshape(*numbers.shape[:-1], -1)
        yield stored_name, (raw, kind)
        tensor.view(-1)[stored_places[stored_name].reshape(-1)] = values.reshape(-1)


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
