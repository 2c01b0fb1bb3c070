"""Tokens that transformers' own generate makes of a checkpoint: ours are held against them."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NUM_TOKENS = 10


@cache
def expected(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy(reference(folder), prompt)


def greedy(model: torch.nn.Module, prompt: tuple[int, ...]) -> list[int]:
    """Tokens of a whole reply: no token ends it."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


@cache
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
