"""The recurrences and the convolution in plain torch, on any device: the definition of correct.

Owns: one token after the other, so that results do not depend on how a prompt is cut.
Source: Gated Delta Networks, arXiv:2412.06464; Mamba-2, arXiv:2405.21060; Mamba, arXiv:2312.00752.

Shapes as in interface.py; N sequences that are computed together, each by as many tokens.
"""

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from worker.states.interface import Convolution, Recurrence

LENGTH_EPSILON = 1e-6


def recur(given: Recurrence, state_NHVK: Tensor) -> Tensor:
    """Compute outputs [T, H, V], and change the states; the N sequences have T / N tokens each."""
    num_tokens, num_heads, value_dim = given.value_THV.shape
    num_sharing = num_heads // given.key_TGK.shape[1]
    queries, keys = (
        _of_length_one(each.float()) if given.has_unit_keys else each.float()
        for each in (given.query_TGK, given.key_TGK)
    )

    def by_sequence(x: Tensor) -> Tensor:
        return x.reshape(len(state_NHVK), -1, *x.shape[1:])

    queries_NLHK = by_sequence((queries * given.scaling).repeat_interleave(num_sharing, 1))
    keys_NLHK = by_sequence(keys.repeat_interleave(num_sharing, 1))
    values_NLHV = by_sequence(given.value_THV.float())
    decay = given.log_decay.exp()
    decays = by_sequence(decay[..., None, None] if decay.dim() == 2 else decay[..., None, :])
    betas = None if given.beta_TH is None else by_sequence(given.beta_TH.float()[..., None])
    out_NLHV = torch.empty_like(values_NLHV)
    for place in range(values_NLHV.shape[1]):
        state_NHVK *= decays[:, place]
        key_NH1K, added_NHV = keys_NLHK[:, place, :, None], values_NLHV[:, place]
        if betas is not None:
            added_NHV = (added_NHV - (state_NHVK * key_NH1K).sum(-1)) * betas[:, place]
        state_NHVK += added_NHV[..., None] * key_NH1K
        out_NLHV[:, place] = (state_NHVK * queries_NLHK[:, place, :, None]).sum(-1)
    return out_NLHV.reshape(num_tokens, num_heads, value_dim)


def convolve(given: Convolution, earlier_NJC: Tensor) -> Tensor:
    """Compute outputs [T, C] behind the J = W - 1 earlier inputs of N sequences, and change these."""
    num_columns, dtype = earlier_NJC.shape[1], given.input_TC.dtype
    inputs_NLC = given.input_TC.reshape(len(earlier_NJC), -1, given.input_TC.shape[-1])
    all_NLC = torch.cat([earlier_NJC.to(dtype), inputs_NLC], dim=1)
    earlier_NJC.copy_(all_NLC[:, all_NLC.shape[1] - num_columns :])
    num_tokens, weight_CW = inputs_NLC.shape[1], given.weight_CW.float()
    sums = torch.zeros_like(inputs_NLC, dtype=torch.float32)
    if given.bias_C is not None:
        sums += given.bias_C.float()
    for place in range(weight_CW.shape[1]):
        sums += all_NLC[:, place : place + num_tokens].float() * weight_CW[:, place]
    out_NLC = sums.to(given.weight_CW.dtype)
    if given.activation is not None:
        out_NLC = ACT2FN[given.activation](out_NLC)
    return out_NLC.to(dtype).flatten(0, 1)


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + LENGTH_EPSILON)
