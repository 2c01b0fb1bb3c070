"""The kernels between a layer's products compute what their definitions in torch do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from tests.worker.gpu.cross_compile import Compiled, Kernel, compile_kernels
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.gpu.kernels.activation import multiply_by_gates
from worker.gpu.kernels.copies import copy_blocks
from worker.gpu.kernels.norm import add, add_and_norm, norm
from worker.gpu.kernels.rotary import rotate_and_write
from worker.model.layer_call import HeadShape
from worker.model.layer_parts import GateActivation, RmsNorm

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = st.sampled_from(list(TOLERANCE))
few = settings(max_examples=15, deadline=None, derandomize=True)


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def defined_norm(x_TH: Tensor, by: RmsNorm) -> Tensor:
    return functional.rms_norm(x_TH.float(), x_TH.shape[-1:], by.weight_H, by.epsilon)


def random_norm(size: int, epsilon: float = 1e-5) -> RmsNorm:
    return RmsNorm(torch.rand(size) + 0.5, epsilon)


@few
@given(DTYPES, st.integers(1, 5), st.integers(1, 200), st.sampled_from([1.0, 1e-3]))
def test_a_norm_of_rows_of_any_size(dtype, num_tokens, size, scale):
    """Small numbers show the epsilon, which large ones hide."""
    torch.manual_seed(size)
    hidden_TH = (torch.randn(num_tokens, size) * scale).to(dtype)
    by = random_norm(size, epsilon=1e-6)
    assert_close(norm(hidden_TH, by), defined_norm(hidden_TH, by))


@few
@given(DTYPES, st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_an_addition_to_the_residual_and_the_norm_of_the_sum(dtype, num_tokens, size, norms_delta):
    torch.manual_seed(size)
    hidden_TH, delta_TH = torch.randn(2, num_tokens, size).to(dtype)
    delta_norm = random_norm(size, epsilon=0.1) if norms_delta else None
    by = random_norm(size)
    added_TH = delta_TH.float() if delta_norm is None else defined_norm(delta_TH, delta_norm)
    sum_TH = (hidden_TH.float() + added_TH).to(dtype)
    copy_TH = hidden_TH.clone()
    assert_close(add_and_norm(copy_TH, delta_TH, delta_norm, by), defined_norm(sum_TH, by))
    assert_close(copy_TH, sum_TH)
    add(hidden_TH, delta_TH, delta_norm)
    assert_close(hidden_TH, sum_TH)


@pytest.mark.parametrize("size", [8192, 16384])
def test_a_norm_of_the_largest_rows(size):
    hidden_TH, by = torch.randn(2, size), random_norm(size)
    assert_close(norm(hidden_TH, by), defined_norm(hidden_TH, by))


@few
@given(DTYPES, st.integers(1, 4), st.integers(1, 1100), st.sampled_from(["SILU", "GELU_TANH"]))
def test_gates_weigh_what_they_stand_beside(dtype, num_tokens, num_gates, name):
    torch.manual_seed(num_gates)
    merged = (torch.randn(num_tokens, 2 * num_gates) * 3).to(dtype)
    gate, up = merged.float().chunk(2, dim=-1)
    act = functional.silu(gate) if name == "SILU" else functional.gelu(gate, approximate="tanh")
    assert_close(multiply_by_gates(merged, GateActivation[name]), act * up)


def rotated_by_definition(x_THD: Tensor, cosines_TR: Tensor, sines_TR: Tensor) -> Tensor:
    """Turn the first R numbers of each head, halves with halves."""
    rotated, kept = x_THD.split([cosines_TR.shape[-1], x_THD.shape[-1] - cosines_TR.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    crossed = torch.cat([-second, first], dim=-1)
    return torch.cat([rotated * cosines_TR[:, None] + crossed * sines_TR[:, None], kept], dim=-1)


@st.composite
def head_cases(draw):
    heads = HeadShape(draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.sampled_from([8, 24, 80])), 0)
    value_dim = draw(st.sampled_from([heads.key_dim, 16, 40]))
    rotated_dim = draw(st.sampled_from([0, 8, heads.key_dim]))
    return heads._replace(value_dim=value_dim), rotated_dim


@few
@given(DTYPES, head_cases(), st.integers(1, 6), st.booleans(), st.booleans())
def test_queries_are_rotated_and_keys_and_values_find_their_slots(
    dtype, case, num_tokens, norms_queries, norms_keys
):
    heads, rotated_dim = case
    torch.manual_seed(num_tokens)
    num_queries, num_keys = heads.num_query_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim
    merged = torch.randn(num_tokens, num_queries + num_keys + heads.num_kv_heads * heads.value_dim).to(dtype)
    norms = (
        random_norm(heads.key_dim, 1e-2) if norms_queries else None,
        random_norm(heads.key_dim, 1e-2) if norms_keys else None,
    )
    angles_TR = (torch.rand(num_tokens, rotated_dim // 2) * 6).repeat(1, 2)
    rotation = (angles_TR.cos()[None], angles_TR.sin()[None]) if rotated_dim else None
    # Two layers, so that strides are not those of one; filled, so that what must stay is seen to stay.
    shape = LayerShape(heads.num_kv_heads, heads.key_dim, heads.value_dim)
    layout = BlockLayout(layers={0: shape, 5: shape}, block_size=4, dtype=dtype)
    cache = KVCache(layout, 3, torch.full((4 * layout.block_numel,), 7.0, dtype=dtype))
    expected_cache = KVCache(layout, 3, cache.pool_NE.clone().view(-1))
    slots = [3 * 4 + 1, 4, 2 * 4 + 3, 3 * 4 + 2, 5, 6][:num_tokens]
    slots[-1] = -1

    found_THD = rotate_and_write(merged, heads, norms, rotation, cache.layers[5], torch.tensor(slots))

    parts = merged.float().split([num_queries, num_keys, heads.num_kv_heads * heads.value_dim], dim=-1)
    rotated = []
    for part, part_norm in zip(parts, norms, strict=False):
        x_THD = part.view(num_tokens, -1, heads.key_dim)
        x_THD = x_THD if part_norm is None else defined_norm(x_THD, part_norm)
        rotated.append(
            x_THD if rotation is None else rotated_by_definition(x_THD, *(each[0] for each in rotation))
        )
    assert_close(found_THD, rotated[0])
    values_THV = parts[2].view(num_tokens, -1, heads.value_dim)
    for token, slot in enumerate(slots[:-1]):
        block, offset = divmod(slot, 4)
        expected_cache.layers[5].keys.blocks_NHSD[block, :, offset] = rotated[1][token].to(dtype)
        expected_cache.layers[5].values.blocks_NHSD[block, :, offset] = values_THV[token].to(dtype)
    assert_close(cache.pool_NE, expected_cache.pool_NE)


@few
@given(st.integers(1, 700), st.permutations(list(range(8))), st.integers(0, 4))
def test_blocks_are_copied_whole_and_others_stay(num_words, rows, num_pairs):
    pool_NE = torch.randn(8, num_words * 4).half()
    sources, targets = torch.tensor(rows[:num_pairs]).long(), torch.tensor(rows[4:][:num_pairs]).long()
    expected_NE = pool_NE.clone()
    expected_NE[targets] = pool_NE[sources]
    copy_blocks(pool_NE, sources, targets)
    assert torch.equal(pool_NE, expected_NE)


def test_a_pair_without_a_source_copies_nothing():
    pool_NE = torch.randn(4, 64)
    expected_NE = pool_NE.clone()
    expected_NE[2] = pool_NE[1]
    copy_blocks(pool_NE, torch.tensor([-1, 1]), torch.tensor([0, 2]))
    assert torch.equal(pool_NE, expected_NE)


def test_blocks_that_are_no_whole_number_of_words_are_refused():
    with pytest.raises(ValueError, match="no whole number of 8-byte words"):
        copy_blocks(torch.zeros(2, 3), torch.tensor([0]), torch.tensor([1]))


COLD = {"warmed_ptr": None, "warmed_bytes": 0, "WARMERS": 0}
"""Arguments of launches that bring no memory into the device's cache."""


def norm_kernel(size: int, num_warps: int, *, has_delta: bool) -> Kernel:
    return Kernel(
        function="worker.gpu.kernels.norm:_norm_kernel",
        signature={
            "hidden_ptr": "*bf16",
            "delta_ptr": "*bf16" if has_delta else "constexpr",
            "normed_ptr": "*bf16",
            "delta_weight_ptr": "*fp32" if has_delta else "constexpr",
            "weight_ptr": "*fp32",
            "num_numbers": "i32",
            "delta_epsilon": "fp32",
            "epsilon": "fp32",
            **dict.fromkeys(("HAS_DELTA", "NORMS_DELTA", "NORMS_SUM", "BLOCK", "WAITS", *COLD), "constexpr"),
        },
        constants={
            **COLD,
            **({} if has_delta else {"delta_ptr": None, "delta_weight_ptr": None}),
            "HAS_DELTA": has_delta,
            "NORMS_DELTA": has_delta,
            "NORMS_SUM": True,
            "BLOCK": size,
            "WAITS": False,
        },
        num_warps=num_warps,
    )


def gate_kernel() -> Kernel:
    return Kernel(
        function="worker.gpu.kernels.activation:_gate_kernel",
        signature={
            "gate_up_ptr": "*bf16",
            "out_ptr": "*bf16",
            "num_gates": "i32",
            **dict.fromkeys(("ACTIVATION", "BLOCK", "WAITS"), "constexpr"),
        },
        constants={"ACTIVATION": 1, "BLOCK": 1024, "WAITS": False},
    )


def rotary_kernel(*, has_norms: bool, value_dim: int = 128, cache: str = "*bf16") -> Kernel:
    pointers = {"merged": "*bf16", "queries": "*bf16", "key_cache": cache, "value_cache": cache}
    weights = dict.fromkeys(("query_weight_ptr", "key_weight_ptr"), "*fp32" if has_norms else "constexpr")
    counts = ("num_tokens", "angle_stride", "block_stride")
    constants = {
        "NUM_QUERY_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "KEY_DIM": 128,
        "VALUE_DIM": value_dim,
        "ROTATED_DIM": 128,
        "HAS_QUERY_NORM": has_norms,
        "HAS_KEY_NORM": has_norms,
        "BLOCK_SIZE": 16,
        "ROWS": 8,
        "WAITS": False,
        **COLD,
    }
    return Kernel(
        function="worker.gpu.kernels.rotary:_rotate_and_write_kernel",
        signature={
            **{f"{name}_ptr": type_name for name, type_name in pointers.items()},
            "slots_ptr": "*i64",
            "cosines_ptr": "*bf16",
            "sines_ptr": "*bf16",
            **weights,
            **dict.fromkeys(("query_epsilon", "key_epsilon", "key_factor", "value_factor"), "fp32"),
            **dict.fromkeys(counts, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        constants=constants | ({} if has_norms else dict.fromkeys(weights)),
        unaligned=("num_tokens",),
        num_warps=2,
    )


def copy_kernel() -> Kernel:
    return Kernel(
        function="worker.gpu.kernels.copies:_copy_kernel",
        signature={
            "pool_ptr": "*i64",
            "sources_ptr": "*i64",
            "targets_ptr": "*i64",
            "num_words": "i32",
            "BLOCK": "constexpr",
        },
        constants={"BLOCK": 2048},
        num_warps=8,
    )


FOR_HOPPER = {
    "norm": norm_kernel(1024, 2, has_delta=False),
    "norm of large rows": norm_kernel(16384, 16, has_delta=False),
    "addition and norms": norm_kernel(4096, 8, has_delta=True),
    "gates": gate_kernel(),
    "rotation": rotary_kernel(has_norms=False),
    "norms and rotation": rotary_kernel(has_norms=True),
    "values of another size": rotary_kernel(has_norms=False, value_dim=64),
    "rotation into 8 bits": rotary_kernel(has_norms=True, cache="*fp8e4nv"),
    "block copies": copy_kernel(),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    return dict(zip(FOR_HOPPER, compile_kernels(list(FOR_HOPPER.values())), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", FOR_HOPPER)
def test_a_hopper_gpu_runs_them_without_spilling_and_with_wide_loads(compiled, name):
    assert compiled[name].local_bytes == 0
    assert compiled[name].widest_load_bytes == 16
