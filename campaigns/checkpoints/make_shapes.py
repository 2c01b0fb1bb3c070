"""Write checkpoints that have the shape of well-known models and random weights, for measuring speed.

    python -m campaigns.checkpoints.make_shapes --out FOLDER [--shapes smollm2-135m,qwen3-0.6b,llama-3.2-1b]

Owns: the shapes, and a tokenizer that has a text for every row of the vocabulary. The same bytes every time.
Never: the network, or weights that mean anything: what these models say is noise.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from bench.load.workload import words
from tests.checkpoints import write_tokenizer

_SEED = 20261121
_NUM_DRAWN_WORDS = 5000  # enough to draw each word of the workload
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwxz", "aeiou"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The configuration of a published model, as far as it decides the time of a step."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    rms_norm_eps: float = 1e-5
    others: dict[str, Any] = field(default_factory=dict)


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES = {
    "smollm2-135m": Shape(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "qwen3-0.6b": Shape(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        rms_norm_eps=1e-6,
    ),
    "qwen3.5-0.8b": Shape(
        model_type="qwen3_5_text",
        vocab_size=248_320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=262_144,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        rms_norm_eps=1e-6,
        others={
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "llama-3.2-1b": Shape(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_parameters=_LLAMA_3_ROPE,
    ),
}


def make_shape(name: str, folder: Path) -> None:
    """Write a shape by its name."""
    write_shape(SHAPES[name], folder)


def write_shape(shape: Shape, folder: Path) -> None:
    """Write a checkpoint into `folder`; one that is whole already stays as it is."""
    if (folder / "model.safetensors").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    eos_token_id = write_full_tokenizer(folder, shape.vocab_size)
    _write_model(shape, eos_token_id, folder)


def write_full_tokenizer(folder: Path, num_tokens: int) -> int:
    """Write a byte-level tokenizer of exactly `num_tokens`, special ones at the end; returns that of the end.

    Each word of the load client's prompts is one token, as common words are in real tokenizers. The rest are
    made-up words, so that whatever is drawn has a text.
    """
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    special, model = tokenizer["added_tokens"], tokenizer["model"]
    alphabet = list(model["vocab"])[:256]
    tokens = {token: number for number, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for left, right in _merges():
        if len(tokens) == num_tokens - len(special):
            break
        if left + right not in tokens:
            tokens[left + right] = len(tokens)
            merges.append((left, right))
    for number, token in enumerate(special):
        token["id"] = len(tokens) + number
    model["vocab"], model["merges"] = tokens, merges
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return int(special[-1]["id"])


def _merges() -> Iterator[tuple[str, str]]:
    # "Ġ" is the space before a word. Chains that all begin with it cannot cut each other up.
    for word in sorted(set(words(_NUM_DRAWN_WORDS, random.Random(0)).split())):
        for end in range(len(word)):
            yield "Ġ" + word[:end], word[end]
    pairs = list(product(_CONSONANTS, _VOWELS))
    yield from pairs
    syllables = ["".join(pair) for pair in pairs]
    yield from product(syllables, syllables)
    longer = ["".join(pair) for pair in product(syllables, syllables)]
    yield from product(longer, syllables)


def _write_model(shape: Shape, eos_token_id: int, folder: Path) -> None:
    # Here, because importing these takes seconds and a wrong --shapes should be told at once.
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    settings = {
        name: getattr(shape, name) for name in Shape.__slots__ if name not in ("model_type", "others")
    }
    ids = {"bos_token_id": None, "eos_token_id": eos_token_id, "pad_token_id": None}
    config = CONFIG_MAPPING[shape.model_type](**settings, **shape.others, **ids, tie_word_embeddings=True)
    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        # Its logit is 0, and some other one is always larger: greedy text has its full length on servers,
        # too, that cannot be asked to ignore the end of sequence.
        model.get_input_embeddings().weight[eos_token_id] = 0
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write checkpoints of real shapes with random weights.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="each gets a folder below")
    parser.add_argument(
        "--shapes",
        default="smollm2-135m",
        metavar="NAME,...",
        help=f"of {', '.join(SHAPES)}; default %(default)s",
    )
    options = parser.parse_args()
    names = options.shapes.split(",")
    for name in names:
        if name not in SHAPES:
            parser.error(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    for name in names:
        make_shape(name, options.out / name)
        print(options.out / name)


if __name__ == "__main__":
    main()
