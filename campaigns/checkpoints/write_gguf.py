"""Write a checkpoint of make_shapes.py as GGUF, so that llama.cpp computes with the same weights.

    .peers/llama-cpp/bin/python campaigns/checkpoints/write_gguf.py FOLDER FILE

Runs in the environment of that peer, which has the package gguf; needs neither torch nor transformers.
Owns: names, order of rows, and the tokenizer, in the words of that format. Matrices stay bfloat16.
Never: quantizes, or converts what make_shapes.py does not write: llama, qwen3 and qwen3.5 with tied
embeddings.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_RECURRENT_NAMES = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "post_attention_layernorm": "post_attention_norm",
}
"""Further names in layers of Qwen3.5."""
_DTYPES = {"BF16": np.uint16, "F32": np.float32}
_ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}


def write_gguf(folder: Path, file: Path) -> None:
    """Raises ValueError for a checkpoint that is not one of ours."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = _ARCHITECTURES.get(config["model_type"])
    if architecture is None or not config["tie_word_embeddings"]:
        raise ValueError(f"only {', '.join(_ARCHITECTURES)} with tied embeddings, not {config['model_type']}")
    writer = gguf.GGUFWriter(file, architecture)
    _add_shape(writer, config)
    _add_tokenizer(writer, folder, config)
    for name, values in _tensors(folder / "model.safetensors"):
        _add_tensor(writer, config, name, values)
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama_3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if config["model_type"] == "qwen3_5_text":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(number) or special[number] for number in range(config["vocab_size"])])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[number in special] for number in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)  # noqa: FBT003 -- the package's own signature


def _tensors(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Names and values; of bfloat16 the 16 bits of each."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    for name, about in header.items():
        if about["dtype"] not in _DTYPES:
            raise ValueError(f"{name} is {about['dtype']}, not BF16 or F32")
        start, end = (8 + length + offset for offset in about["data_offsets"])
        yield name, data[start:end].view(_DTYPES[about["dtype"]]).reshape(about["shape"])


def _add_tensor(writer: Any, config: dict[str, Any], name: str, values: NDArray[Any]) -> None:
    part, is_recurrent = name.removeprefix("model.").removesuffix(".weight"), "linear_attn" in name
    if part == "embed_tokens":
        target = "token_embd.weight"
    elif part == "norm":
        target = "output_norm.weight"
    else:
        _, number, inner = part.split(".", 2)
        target = f"blk.{number}.{_name_in_layer(config, inner)}"
        if config["model_type"] == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            values = _interleaved(values, config["head_dim"])
    if values.ndim != 2:  # norms and the like are float32 there
        values = values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)
        if part.endswith("A_log"):
            values = -np.exp(values)
        elif config["model_type"] == "qwen3_5_text" and part.endswith("norm") and not is_recurrent:
            values = values + 1
        writer.add_tensor(target, values.squeeze(1) if values.ndim == 3 else values)
        return
    as_bytes = np.ascontiguousarray(values).view(np.uint8)
    writer.add_tensor(target, as_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _name_in_layer(config: dict[str, Any], inner: str) -> str:
    if inner == "linear_attn.A_log":
        return "ssm_a"
    if inner == "linear_attn.dt_bias":
        return "ssm_dt.bias"
    names = _NAMES | _RECURRENT_NAMES if config["model_type"] == "qwen3_5_text" else _NAMES
    return f"{names[inner]}.weight"


def _interleaved(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of each head so that the two halves of a rotary pair are neighbours, as llama.cpp rotates them."""
    heads = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _llama_3_factors(config: dict[str, Any]) -> NDArray[Any]:
    """Divisor of each rotary frequency."""
    rope = config["rope_parameters"]
    frequencies = rope["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    wavelengths = 2 * np.pi / frequencies
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[Any] = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.astype(np.float32)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: write_gguf.py FOLDER FILE")
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
