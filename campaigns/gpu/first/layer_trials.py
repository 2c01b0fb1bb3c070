"""The kernels between a layer's products, each once.

Owns: small inputs, and what plain torch makes of them.
Never: shapes of any model: sizes are odd where a kernel masks.

Shapes: T tokens, H numbers of a hidden state, M numbers of a merged row.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from campaigns.gpu.first.trial import Build, Place, Trial, agreement
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.gpu.device_batch import TableChanges
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.copies import copy_blocks
from worker.gpu.kernels.input_fill import change_tables, fill_unknown_tokens, remember_tokens
from worker.gpu.kernels.kv_write import write_kv
from worker.gpu.kernels.norm import add_and_norm, norm
from worker.gpu.kernels.rotary import rotate_and_write
from worker.gpu.kernels.skinny_products import Folds, SkinnyTiles, multiply_skinny
from worker.model.layer_call import HeadShape
from worker.model.layer_parts import GateActivation, RmsNorm

_NUM_TOKENS = 5
_BLOCK_SIZE = 16
_NUM_BLOCKS = 3


def layer_trials(place: Place) -> list[Build]:
    return [
        partial(_norm, place),
        partial(_add_and_norm, place),
        partial(_gates, place, GateActivation.SILU),
        partial(_gates, place, GateActivation.GELU_TANH),
        *(partial(_few_rows, place, folds_in=folds_in) for folds_in in (False, True)),
        *(partial(build, place) for build in (_write, _turn, _copy, _remember, _fill, _spread)),
    ]


def _weights(place: Place, size: int) -> RmsNorm:
    return RmsNorm(torch.linspace(0.5, 1.5, size, device=place.device), 1e-5)


def _defined_norm(x_TH: Tensor, by: RmsNorm) -> Tensor:
    return functional.rms_norm(x_TH.float(), x_TH.shape[-1:], by.weight_H, by.epsilon)


def _norm(place: Place) -> Trial:
    hidden_TH, by = place.random(_NUM_TOKENS, 200), _weights(place, 200)
    return agreement(
        "norm", {"hidden": hidden_TH}, lambda: [norm(hidden_TH, by)], lambda: [_defined_norm(hidden_TH, by)]
    )(place.tolerance)


def _add_and_norm(place: Place) -> Trial:
    hidden_TH, delta_TH = place.random(_NUM_TOKENS, 256), place.random(_NUM_TOKENS, 256, scale=0.5)
    by, changed_TH = _weights(place, 256), hidden_TH.clone()
    sum_TH = (hidden_TH.float() + delta_TH.float()).to(place.dtype)
    return agreement(
        "norm of a sum",
        {"hidden": hidden_TH, "delta": delta_TH},
        lambda: [add_and_norm(changed_TH, delta_TH, None, by), changed_TH],
        lambda: [_defined_norm(sum_TH, by), sum_TH],
    )(place.tolerance)


def _gates(place: Place, activation: GateActivation) -> Trial:
    merged_TM = place.random(_NUM_TOKENS, 2 * 1100)

    def define() -> list[Tensor]:
        gate, up = merged_TM.float().chunk(2, dim=-1)
        is_silu = activation is GateActivation.SILU
        return [(functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up]

    name = f"gate, {activation.name.lower()}"
    return agreement(name, {"merged": merged_TM}, lambda: [multiply_by_gates(merged_TM, activation)], define)(
        place.tolerance
    )


def _few_rows(place: Place, *, folds_in: bool) -> Trial:
    """Multiply few rows: with a norm and gates, or divided by their inputs and added."""
    x_TK, weight_NK = place.random(_NUM_TOKENS, 600), place.random(96, 600, scale=0.1)
    arrivals = place.integers([0] * 96)
    before_TN = place.random(_NUM_TOKENS, 96)
    folds = Folds(is_added=True, multiplier=0.5)
    if folds_in:
        folds = Folds(norm=_weights(place, 600), activation=GateActivation.SILU)
    tiles = SkinnyTiles(outputs=16, inputs=64, splits=1 if folds_in else 3)

    def compute() -> list[Tensor]:
        out_TN = None if folds_in else before_TN.clone()
        return [multiply_skinny(x_TK, weight_NK, None, folds, tiles, out_TN=out_TN, arrivals=arrivals)]

    def define() -> list[Tensor]:
        if folds.norm is None:
            return [before_TN.float() + 0.5 * functional.linear(x_TK.float(), weight_NK.float())]
        normed_TK = _defined_norm(x_TK, folds.norm)
        gate, up = functional.linear(normed_TK, weight_NK.float()).chunk(2, dim=-1)
        return [functional.silu(gate) * up]

    name = "few rows, with norm and gates" if folds_in else "few rows, in parts, added"
    return agreement(name, {"rows": x_TK, "weight": weight_NK}, compute, define)(place.tolerance)


def _cache(place: Place, num_heads: int, dim: int) -> KVCache:
    shape = LayerShape(num_heads, dim, dim)
    layout = BlockLayout(layers={0: shape, 1: shape}, block_size=_BLOCK_SIZE, dtype=place.dtype)
    memory = torch.zeros((_NUM_BLOCKS + 1) * layout.block_numel, dtype=place.dtype, device=place.device)
    return KVCache(layout, _NUM_BLOCKS, memory)


def _slots(place: Place) -> Tensor:
    """Inputs of two blocks and of padding."""
    return place.integers(
        [3 * _BLOCK_SIZE + 1, _BLOCK_SIZE, 3 * _BLOCK_SIZE + 2, 2 * _BLOCK_SIZE, -1], torch.int64
    )


def _put(cache: KVCache, key_HTD: Tensor, value_HTD: Tensor, slots_T: Tensor) -> Tensor:
    """Write into layer 1 by plain indexing; returns the pool."""
    layer = cache.layers[1]
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, _BLOCK_SIZE)
            layer.keys.blocks_NHSD[block, :, offset] = key_HTD[:, token].to(key_HTD.dtype)
            layer.values.blocks_NHSD[block, :, offset] = value_HTD[:, token]
    return cache.pool_NE


def _write(place: Place) -> Trial:
    key_HTD, value_HTD = place.random(2, _NUM_TOKENS, 80), place.random(2, _NUM_TOKENS, 80, scale=2.0)
    cache, slots_T = _cache(place, 2, 80), _slots(place)

    def compute() -> list[Tensor]:
        write_kv(key_HTD, value_HTD, cache.layers[1], slots_T)
        return [cache.pool_NE]

    return agreement(
        "keys and values into the cache",
        {"keys": key_HTD, "values": value_HTD, "slots": slots_T, "pool": cache.pool_NE},
        compute,
        lambda: [_put(_cache(place, 2, 80), key_HTD, value_HTD, slots_T)],
    )(0.0)


def _turn(place: Place) -> Trial:
    heads, dim = HeadShape(4, 2, 64, 64), 64
    merged_TM, by = place.random(_NUM_TOKENS, (4 + 2 + 2) * dim), _weights(place, dim)
    angles_TR = torch.arange(_NUM_TOKENS * dim // 2, device=place.device).view(_NUM_TOKENS, -1).float() / 9
    angles_TR = torch.cat([angles_TR, angles_TR], dim=-1)
    rotation = (angles_TR.cos()[None], angles_TR.sin()[None])
    cache, slots_T = _cache(place, 2, dim), _slots(place)

    def compute() -> list[Tensor]:
        return [
            rotate_and_write(merged_TM, heads, (by, by), rotation, cache.layers[1], slots_T),
            cache.pool_NE,
        ]

    def turned(x_THD: Tensor) -> Tensor:
        x_THD = _defined_norm(x_THD, by)
        first, second = x_THD.chunk(2, dim=-1)
        crossed = torch.cat([-second, first], dim=-1)
        return x_THD * angles_TR.cos()[:, None] + crossed * angles_TR.sin()[:, None]

    def define() -> list[Tensor]:
        heads_THD = merged_TM.view(_NUM_TOKENS, -1, dim)
        keys_HTD = turned(heads_THD[:, 4:6]).to(place.dtype).transpose(0, 1)
        values_HTD = heads_THD[:, 6:].transpose(0, 1)
        return [turned(heads_THD[:, :4]), _put(_cache(place, 2, dim), keys_HTD, values_HTD, slots_T)]

    return agreement(
        "heads normed, turned and written",
        {"merged": merged_TM, "angles": angles_TR, "slots": slots_T, "pool": cache.pool_NE},
        compute,
        define,
    )(place.tolerance)


def _copy(place: Place) -> Trial:
    pool_NE = place.random(6, 3000)
    sources_P, targets_P = place.integers([1, -1, 4]), place.integers([3, 2, 5])
    expected_NE = pool_NE.clone()
    expected_NE[[3, 5]] = pool_NE[[1, 4]]

    def compute() -> list[Tensor]:
        copy_blocks(pool_NE, sources_P, targets_P)
        return [pool_NE]

    return agreement(
        "blocks copied", {"pool": pool_NE, "sources": sources_P}, compute, lambda: [expected_NE]
    )(0.0)


def _remember(place: Place) -> Trial:
    last_token_C = place.integers([0] * 9, torch.int64)
    rows_N, drawn_N = place.integers([4, 0, 8, 8]), place.integers([11, 12], torch.int64)

    def compute() -> list[Tensor]:
        remember_tokens(last_token_C, rows_N, drawn_N)
        return [last_token_C]

    expected_C = place.integers([12, 0, 0, 0, 11, 0, 0, 0, 0], torch.int64)
    inputs = {"last tokens": last_token_C, "rows": rows_N, "drawn": drawn_N}
    return agreement("drawn tokens remembered", inputs, compute, lambda: [expected_C])(0.0)


def _fill(place: Place) -> Trial:
    last_token_C = place.integers([70, 71, 72, 73], torch.int64)
    input_ids_1T, rows_T = place.integers([[5, -1, 6, -1]], torch.int64), place.integers([0, 2, 0, 3])

    def compute() -> list[Tensor]:
        fill_unknown_tokens(input_ids_1T, rows_T, last_token_C)
        return [input_ids_1T]

    expected_1T = place.integers([[5, 72, 6, 73]], torch.int64)
    inputs = {"token ids": input_ids_1T, "rows": rows_T}
    return agreement("unknown tokens filled in", inputs, compute, lambda: [expected_1T])(0.0)


def _spread(place: Place) -> Trial:
    blocks, tables_CB = place.integers([1, 2, 3, 4, 5]), place.integers([[9] * 4] * 3)
    rows_R, firsts_R, starts_R = place.integers([2, 0]), place.integers([1, 0]), place.integers([0, 3, 5])

    def compute() -> list[Tensor]:
        change_tables(TableChanges(rows_R, firsts_R, starts_R, blocks), tables_CB)
        return [tables_CB]

    expected_CB = torch.tensor([[4, 5, 9, 9], [9] * 4, [9, 1, 2, 3]])
    inputs = {"blocks": blocks, "tables": tables_CB}
    return agreement("new blocks of tables", inputs, compute, lambda: [expected_CB])(0.0)
