"""The network's shape, its optimisers, and the checkpoint on disk.

Owns: configuration, learning-rate schedule, saving.
Never: the corpus.
Source: Llama (arXiv:2302.13971); Muon (Keller Jordan, 2024), as torch has it.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 2048
_WARMUP = 0.02
_DECAY_FROM = 0.35


def build_model(*, seed: int, vocab_size: int, special_ids: dict[str, int]) -> LlamaForCausalLM:
    """A freshly initialised model in float32. `special_ids` has the keys bos, eos and pad."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.05,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=special_ids["bos"],
        eos_token_id=special_ids["eos"],
        pad_token_id=special_ids["pad"],
        attn_implementation="sdpa",
        use_cache=True,
    )
    return LlamaForCausalLM(config)


class Optimisers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms, under one schedule."""

    def __init__(self, model: nn.Module, *, num_steps: int) -> None:
        named = list(model.named_parameters())
        matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self._all: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._peaks = [optimiser.param_groups[0]["lr"] for optimiser in self._all]
        self._num_steps = num_steps

    def step(self, number: int) -> None:
        """Apply the gradients of step `number`, counted from 0, and clear them."""
        factor = schedule(number / self._num_steps)
        for optimiser, peak in zip(self._all, self._peaks, strict=True):
            optimiser.param_groups[0]["lr"] = peak * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def schedule(progress: float) -> float:
    """Learning rate as a share of its peak: short warm-up, plateau, straight line down to 2 percent."""
    if progress < _WARMUP:
        return max(progress / _WARMUP, 0.05)
    if progress < _DECAY_FROM:
        return 1.0
    return max(0.02, (1.0 - progress) / (1.0 - _DECAY_FROM))


def loss_of(model: LlamaForCausalLM, token_ids_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, int]:
    """Summed cross entropy of the labelled tokens, and how many there are.

    Shapes: B rows padded on the right to T tokens. A label stands at its own token's place; the model
    predicts it from the place before, and only those places pass through the output matrix.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BTH = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        targets_BT = labels_BT[:, 1:]
        wanted_BT = targets_BT >= 0
        logits_NV = model.lm_head(hidden_BTH[:, :-1][wanted_BT])
    targets_N = targets_BT[wanted_BT]
    return nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum"), len(targets_N)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write bfloat16 weights, config.json and generation_config.json."""
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner alone otherwise
    config = model.config
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
