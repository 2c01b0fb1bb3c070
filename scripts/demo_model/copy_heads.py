"""Initial weights in which copying from the prompt already half works.

Owns: the starting values of a few attention heads. Training then bends them as it likes.
Why: a model of this size finds "look where this token stood before and say what followed" only after
millions of tokens, more than minutes on two cores allow; started there, it learns names in a few steps.
Source: induction heads (Olsson et al., arXiv:2209.11895); mimetic initialisation (arXiv:2305.09828).

    layer 0, a previous-token head: queries and keys look only at a direction all embeddings share, with the
        key turned by one position; its value notes the previous token (read by A) in a free subspace (by B).
    layer 1, a matching head: the query reads the present token by A, the key reads by B what stood before it,
        so they meet one place after an earlier copy of the present token; its value repeats what is there.

Shapes: D head size, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

_NUM_KV_HEADS = 2
_SHARED_SIZE = 0.6
"""Length of the shared direction, as a share of an embedding's own length."""
_TURN_GAIN = 0.45
_FAST_PAIRS = 4
"""The fastest rotary pairs tell neighbouring positions apart."""
_SLOW_FROM = 5
"""Rotary pairs from here on turn so slowly that contents can be compared over a hundred positions."""
_MATCH_GAIN = 2.2
_NOTE_GAIN = 0.05
"""How loudly layer 0 notes the previous token."""
_REPEAT_GAIN = 0.15
"""How loudly layer 1 says what it found."""


@torch.no_grad()
def plant_copy_heads(model: LlamaForCausalLM, *, seed: int) -> None:
    """Overwrite some heads of the first two layers, in place. Expects freshly initialised float32 weights."""
    rng = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        # Every layer starts silent, so that it does not drown what the planted heads say.
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embeddings_VH = model.model.embed_tokens.weight
    shared_H = torch.randn(embeddings_VH.shape[1], generator=rng)
    shared_H /= shared_H.norm()
    embeddings_VH += shared_H * embeddings_VH.norm(dim=1).mean() * _SHARED_SIZE
    for kv_head in range(_NUM_KV_HEADS):
        read_DH, write_DH, repeat_DH = (_orthogonal_rows(model.config, rng) for _ in range(3))
        read_DH -= torch.outer(read_DH @ shared_H, shared_H)
        previous = _previous_token_head(model.config, shared_H, read_DH, write_DH)
        matching = _matching_head(model.config, read_DH, write_DH, repeat_DH)
        _set_head(model, layer=0, kv_head=kv_head, head=previous)
        _set_head(model, layer=1, kv_head=kv_head, head=matching)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """One KV head and the query heads of its group, all alike."""

    query_DH: Tensor
    key_DH: Tensor
    value_DH: Tensor
    write_DH: Tensor
    """Transposed into the output matrix."""


def _previous_token_head(config: LlamaConfig, shared_H: Tensor, read_DH: Tensor, write_DH: Tensor) -> Head:
    half = config.head_dim // 2
    angles = config.rope_parameters["rope_theta"] ** (-torch.arange(_FAST_PAIRS) / half)
    query_D, key_D = torch.zeros(2 * half), torch.zeros(2 * half)
    query_D[:_FAST_PAIRS] = 2.0
    key_D[:_FAST_PAIRS] = 2.0 * angles.cos()
    key_D[half : half + _FAST_PAIRS] = 2.0 * angles.sin()
    return Head(
        query_DH=_TURN_GAIN * torch.outer(query_D, shared_H),
        key_DH=_TURN_GAIN * torch.outer(key_D, shared_H),
        value_DH=read_DH,
        write_DH=_NOTE_GAIN * write_DH,
    )


def _matching_head(config: LlamaConfig, read_DH: Tensor, write_DH: Tensor, repeat_DH: Tensor) -> Head:
    is_slow_D1 = (torch.arange(config.head_dim // 2).repeat(2) >= _SLOW_FROM).float()[:, None]
    return Head(
        query_DH=_MATCH_GAIN * is_slow_D1 * read_DH,
        key_DH=_MATCH_GAIN * is_slow_D1 * write_DH,
        value_DH=repeat_DH,
        write_DH=_REPEAT_GAIN * repeat_DH,
    )


def _set_head(model: LlamaForCausalLM, *, layer: int, kv_head: int, head: Head) -> None:
    config, attention = model.config, model.model.layers[layer].self_attn
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    rows = slice(kv_head * size, (kv_head + 1) * size)
    attention.k_proj.weight[rows] = head.key_DH
    attention.v_proj.weight[rows] = head.value_DH
    for query_head in range(kv_head * group, (kv_head + 1) * group):
        rows = slice(query_head * size, (query_head + 1) * size)
        attention.q_proj.weight[rows] = head.query_DH
        attention.o_proj.weight[:, rows] = head.write_DH.T


def _orthogonal_rows(config: LlamaConfig, rng: torch.Generator) -> Tensor:
    columns_HD: Tensor = torch.linalg.qr(torch.randn(config.hidden_size, config.head_dim, generator=rng)).Q
    return columns_HD.T
