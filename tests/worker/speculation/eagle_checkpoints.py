"""Heads of EAGLE-3 with random weights, in both formats, and an oracle that computes one over whole texts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

NUM_GUESSED = 96
TAPPED = [1, 2, 4]


def write_eagle(
    folder: Path,
    target: Path,
    num_gates: int = 64,
    *,
    is_of_speculators: bool = True,
    own: bool = True,
    norm_first: bool = False,
) -> Path:
    """Write a head for the model in `target`: half as wide with an embedding of its own, else as wide."""
    content = json.loads((target / "config.json").read_text())
    wide, vocab_size = content["hidden_size"], content["vocab_size"]
    size = wide // 2 if own else wide
    layer = _layer(size, num_gates, vocab_size)
    generator = torch.Generator().manual_seed(9)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)

    prefix = "layers.0." if is_of_speculators else "midlayer."
    tensors = {
        "fc.weight": weight(size, 3 * wide),
        "norm.weight": weight(size),
        "lm_head.weight": weight(NUM_GUESSED, size),
        **{f"{prefix}{name}.weight": weight(size) for name in ("input_layernorm", "hidden_norm")},
        f"{prefix}post_attention_layernorm.weight": weight(size),
        f"{prefix}self_attn.q_proj.weight": weight(64, 2 * size),
        f"{prefix}self_attn.k_proj.weight": weight(32, 2 * size),
        f"{prefix}self_attn.v_proj.weight": weight(32, 2 * size),
        f"{prefix}self_attn.o_proj.weight": weight(size, 64),
        f"{prefix}mlp.gate_proj.weight": weight(num_gates, size),
        f"{prefix}mlp.up_proj.weight": weight(num_gates, size),
        f"{prefix}mlp.down_proj.weight": weight(size, num_gates),
    }
    tensors |= {"embed_tokens.weight": weight(vocab_size, size)} if own else {}
    chosen = torch.randperm(vocab_size, generator=generator)[:NUM_GUESSED].sort().values
    tensors["d2t"] = chosen - torch.arange(NUM_GUESSED)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, value=True)
    further: dict[str, Any] = {"draft_vocab_size": NUM_GUESSED, "norm_before_residual": norm_first}
    config = _of_speculators(layer) if is_of_speculators else _before_speculators(layer)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | further))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _of_speculators(layer: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": TAPPED,
        "transformer_layer_config": layer,
    }


def _before_speculators(layer: dict[str, Any]) -> dict[str, Any]:
    of_outputs = {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in TAPPED]}
    return {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": of_outputs, **layer}


def _layer(size: int, num_gates: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": num_gates,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }


class EagleOracle:
    """A head computed over whole texts, from its files and the published computation."""

    def __init__(self, folder: Path, target: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        content = json.loads((folder / "config.json").read_text())
        self._norm_first = content["norm_before_residual"]
        stored = load_file(folder / "model.safetensors")
        self._of = {name.replace("midlayer.", "layers.0."): each for name, each in stored.items()}
        self._embedding = self._of.get("embed_tokens.weight", self._model.get_input_embeddings().weight)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], num: int) -> list[int]:
        """Guess greedily behind tokens of which the last is yet to be computed by the model."""
        ids = torch.tensor(tokens)
        states = self._model(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states
        joined = torch.cat([states[place][0] for place in TAPPED], dim=-1)
        kept = joined @ self._of["fc.weight"].T
        found: list[int] = []
        for _ in range(num):
            output = self._layer(self._embedding[ids[1:]], kept)
            logits = self._normed(output[-1], "norm") @ self._of["lm_head.weight"].T
            guess = int(logits.argmax())
            found.append(guess + int(self._of["d2t"][guess]))
            ids = torch.cat([ids, torch.tensor([found[-1]])])
            kept = torch.cat([kept, output[-1:]])
        return found

    def _layer(self, embeds: Tensor, kept: Tensor) -> Tensor:
        normed = self._normed(kept, "layers.0.hidden_norm")
        residual = normed if self._norm_first else kept
        inputs = torch.cat([self._normed(embeds, "layers.0.input_layernorm"), normed], dim=-1)
        residual = residual + self._attention(inputs)
        inner = self._normed(residual, "layers.0.post_attention_layernorm")
        gates = functional.silu(inner @ self._of["layers.0.mlp.gate_proj.weight"].T)
        return residual + (gates * (inner @ self._of["layers.0.mlp.up_proj.weight"].T)) @ (
            self._of["layers.0.mlp.down_proj.weight"].T
        )

    def _attention(self, inputs: Tensor) -> Tensor:
        query, key, value = (
            (inputs @ self._of[f"layers.0.self_attn.{name}.weight"].T).view(len(inputs), -1, 16)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = (_rotated(each) for each in (query, key))
        heads = []
        for number in range(4):
            scores = query[:, number] @ key[:, number // 2].T / 4.0
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(dim=-1) @ value[:, number // 2])
        return torch.cat(heads, dim=-1) @ self._of["layers.0.self_attn.o_proj.weight"].T

    def _normed(self, states: Tensor, name: str) -> Tensor:
        size = states.pow(2).mean(dim=-1, keepdim=True).add(1e-5).sqrt()
        return states / size * self._of[f"{name}.weight"]


def _rotated(states_THD: Tensor) -> Tensor:
    """Turn pairs of numbers a half apart by angles that grow with the position."""
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    angles = torch.arange(len(states_THD))[:, None, None] * frequencies
    first, second = states_THD.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )
