"""Checkpoints with the shape of well-known models and random weights, written as fast as the disk takes them.

Owns: the shapes, and the files. No tokenizer: nothing here has a text.
Never: torch. Each tensor is a piece of one row of random numbers: the time of a step depends on how many
there are, and a little on how random their bits are, but not on whether two layers have the same ones.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_RANDOM = 1 << 24
_SCALE = 0.02
_ONE_IN_BF16 = 0x3F80
_EVERY = 4
"""Layers of which the last attends, where others recur."""
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Shape of layers with the gated delta rule, in the place of attention in all but every fourth."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    width: int = 4
    """Inputs that a convolution sees."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model as far as it decides the time of a step."""

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    has_head_norms: bool
    is_tied: bool
    """The output layer is the input embedding."""
    longest: int = 8192
    """Its own context window."""
    scale: float = _SCALE
    """Standard deviation of the weights. Larger in the smallest: the two best tokens are well apart."""
    embedding_scale: float | None = None
    """Standard deviation of the embedding, if it is another. Where it is large beside what layers add,
    rounded weights give nearly the same logits, as in trained models; else layers amplify any error."""
    recurrent: RecurrentShape | None = None
    """Shape of recurrent layers; None: all attend. Those that attend have gates beside their queries then."""

    @property
    def attending(self) -> list[int]:
        """Layers with keys and values."""
        every = 1 if self.recurrent is None else _EVERY
        return list(range(every - 1, self.num_hidden_layers, every))


SHAPES = {
    "qwen3-0.6b": Shape(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        has_head_norms=True,
        is_tied=True,
        longest=40_960,
    ),
    "llama-3.1-8b": Shape(
        model_type="llama",
        architecture="LlamaForCausalLM",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        has_head_norms=False,
        is_tied=False,
        longest=131_072,
        scale=0.005,
        embedding_scale=1.0,
    ),
    "qwen3.5-4b": Shape(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        vocab_size=248_320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        has_head_norms=True,
        is_tied=True,
        longest=262_144,
        recurrent=RecurrentShape(num_key_heads=16, num_value_heads=32, head_dim=128),
    ),
    "tiny-recurrent": Shape(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        has_head_norms=True,
        is_tied=True,
        scale=0.3,
        recurrent=RecurrentShape(num_key_heads=1, num_value_heads=2, head_dim=16),
    ),
    "small": Shape(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        has_head_norms=True,
        is_tied=True,
        scale=0.2,
    ),
    "tiny": Shape(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        has_head_norms=True,
        is_tied=True,
        scale=0.3,
    ),
}


def products_of(shape: Shape) -> list[tuple[int, int]]:
    """List the products of a layer that attends, as outputs and inputs."""
    queries, keys = (
        heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    return [
        (queries + 2 * keys, shape.hidden_size),
        (shape.hidden_size, queries),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
    ]


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write config.json and model.safetensors into a folder that is made for it; returns the folder."""
    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)), encoding="utf-8")
    tensors = dict(_tensors(shape))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, size in tensors.items():
        end = offset + 2 * math.prod(size)
        header[tensor] = {"dtype": "BF16", "shape": size, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = _random_bf16(shape.scale)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, (tensor, size) in enumerate(tensors.items()):
            if tensor.endswith(("norm.weight", "layernorm.weight")):
                file.write(np.full(math.prod(size), _ONE_IN_BF16, np.uint16).tobytes())
            elif tensor == _EMBEDDING and shape.embedding_scale is not None:
                _write_piece(file, _random_bf16(shape.embedding_scale), start=0, count=math.prod(size))
            else:
                _write_piece(file, numbers, start=number * 7919, count=math.prod(size))
    return folder


def checkpoint(name: str, folder: Path) -> Path:
    """The one in a folder below this one, written unless another part has done that. Returns that folder."""
    whole = folder / name
    if not whole.exists():
        begun = folder / f"{name}.begun"
        shutil.rmtree(begun, ignore_errors=True)  # by a part that was cut off
        write_checkpoint(name, begun).rename(whole)
    return whole


def _config(shape: Shape) -> dict[str, Any]:
    recurrent = shape.recurrent
    own: dict[str, Any] = {}
    if recurrent is not None:
        kinds = ["linear_attention"] * shape.num_hidden_layers
        for layer in shape.attending:
            kinds[layer] = "full_attention"
        own = {
            "layer_types": kinds,
            "linear_num_key_heads": recurrent.num_key_heads,
            "linear_num_value_heads": recurrent.num_value_heads,
            "linear_key_head_dim": recurrent.head_dim,
            "linear_value_head_dim": recurrent.head_dim,
            "linear_conv_kernel_dim": recurrent.width,
        }
    return {
        **own,
        "model_type": shape.model_type,
        "architectures": [shape.architecture],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.longest,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


def _tensors(shape: Shape) -> list[tuple[str, list[int]]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query = shape.num_attention_heads * shape.head_dim
    key = shape.num_key_value_heads * shape.head_dim
    num_gates = 0 if shape.recurrent is None else query
    tensors = [(_EMBEDDING, [shape.vocab_size, hidden]), ("model.norm.weight", [hidden])]
    if not shape.is_tied:
        tensors.append(("lm_head.weight", [shape.vocab_size, hidden]))
    for layer in range(shape.num_hidden_layers):
        sizes = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        if shape.recurrent is not None and layer not in shape.attending:
            tensors += _recurrent_tensors(shape.recurrent, hidden, f"model.layers.{layer}.linear_attn")
            tensors += [(f"model.layers.{layer}.{name}.weight", size) for name, size in sizes.items()]
            continue
        sizes |= {
            "self_attn.q_proj": [query + num_gates, hidden],
            "self_attn.k_proj": [key, hidden],
            "self_attn.v_proj": [key, hidden],
            "self_attn.o_proj": [hidden, query],
        }
        if shape.has_head_norms:
            sizes |= {"self_attn.q_norm": [shape.head_dim], "self_attn.k_norm": [shape.head_dim]}
        tensors += [(f"model.layers.{layer}.{name}.weight", size) for name, size in sizes.items()]
    return tensors


def _recurrent_tensors(shape: RecurrentShape, hidden: int, prefix: str) -> list[tuple[str, list[int]]]:
    channels, heads = 2 * shape.key_size + shape.value_size, shape.num_value_heads
    return [
        (f"{prefix}.in_proj_qkv.weight", [channels, hidden]),
        (f"{prefix}.in_proj_z.weight", [shape.value_size, hidden]),
        (f"{prefix}.in_proj_b.weight", [heads, hidden]),
        (f"{prefix}.in_proj_a.weight", [heads, hidden]),
        (f"{prefix}.conv1d.weight", [channels, 1, shape.width]),
        (f"{prefix}.dt_bias", [heads]),
        (f"{prefix}.A_log", [heads]),
        (f"{prefix}.norm.weight", [shape.head_dim]),
        (f"{prefix}.out_proj.weight", [hidden, shape.value_size]),
    ]


def _random_bf16(scale: float) -> NDArray[np.uint16]:
    """The upper halves of float32 are bfloat16, cut instead of rounded."""
    numbers = np.random.default_rng(0).standard_normal(_NUM_RANDOM, dtype=np.float32) * np.float32(scale)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _write_piece(file: Any, numbers: NDArray[np.uint16], *, start: int, count: int) -> None:
    """`count` of them from `start` on, round and round."""
    start %= len(numbers)
    while count > 0:
        piece = numbers[start : start + count]
        file.write(piece.data)
        count -= len(piece)
        start = 0
