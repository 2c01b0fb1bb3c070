"""Convolutions and recurrences by the CPU's kernels, against plain torch, and bit for bit however cut."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.cpu.conftest import INSTRUCTION_SETS, OpenKernels
from worker.cpu.native import Kernels
from worker.cpu.states import CpuStates
from worker.states.interface import Convolution, Recurrence, StateShape, StateStep
from worker.states.ref_states import RefStates
from worker.states.state_layout import StateLayout

pytestmark = pytest.mark.pairs

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LENGTHS = (13, 1, 30)
"""Tokens of three sequences."""
NUM_TOKENS = sum(LENGTHS)
RECURRENCES: dict[str, dict[str, Any]] = {
    "delta rule": {"heads": 4, "groups": 2, "key": 32, "value": 40, "has_unit_keys": True},
    "large heads": {"heads": 2, "groups": 2, "key": 128, "value": 128, "has_unit_keys": True},
    "decays of numbers": {"heads": 3, "groups": 3, "key": 16, "value": 16, "by_number": True},
    "large heads, decays of numbers": {
        "heads": 2,
        "groups": 1,
        "key": 128,
        "value": 72,
        "has_unit_keys": True,
        "by_number": True,
    },
    "without the delta rule": {"heads": 6, "groups": 2, "key": 48, "value": 24, "is_delta": False},
    "heads of one value": {
        "heads": 48,
        "groups": 1,
        "key": 16,
        "value": 1,
        "is_delta": False,
        "by_number": True,
    },
}


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest, open_kernels: OpenKernels) -> Kernels:
    return open_kernels(request.param, 2)


@dataclass
class World:
    """Three sequences' states among blocks, which contain NaN before."""

    shape: StateShape
    kernels: Kernels | None
    pool: Tensor = field(init=False)

    def __post_init__(self) -> None:
        block_bytes = 1024
        self.layout = StateLayout({3: self.shape}, block_bytes)
        num_blocks = len(LENGTHS) * self.layout.num_stripes + 1
        self.pool = torch.full((num_blocks, block_bytes // 4), torch.nan)
        order = np.random.default_rng(5).permutation(np.arange(1, num_blocks))
        self.blocks_RS = order.reshape(len(LENGTHS), -1)
        self.states = (
            RefStates(self.pool, self.layout)
            if self.kernels is None
            else CpuStates(self.pool, self.layout, self.kernels)
        )

    def begin(self, shares: dict[int, tuple[int, int]], *, keeps_states: bool) -> None:
        """Begin a step of some tokens of sequences; those of one token come first."""
        counts = [end - start for start, end in shares.values()]
        rows = list(shares)
        self.states.begin_step(
            StateStep(
                num_decodes=sum(count == 1 for count in counts),
                query_starts=np.cumsum([0, *counts]),
                is_first_R=np.array([start == 0 for start, _ in shares.values()]),
                blocks_RS=self.blocks_RS[rows],
                keeps_states=keeps_states,
            )
        )
        self.states.begin_layer(3)


def tokens_of(seq: int, start: int, end: int) -> slice:
    first = sum(LENGTHS[:seq])
    return slice(first + start, first + end)


ALL_AT_ONCE = ({1: (0, 1), 0: (0, LENGTHS[0]), 2: (0, LENGTHS[2])},)
CUT = (
    {0: (0, 1), 2: (0, 7)},
    {0: (1, 2), 2: (7, 8)},
    {1: (0, 1), 2: (8, 9), 0: (2, 13)},
    *({2: cut} for cut in pairwise((9, 11, 12, 29, 30))),
)


def computed(
    world: World, given: Recurrence | Convolution, steps: tuple[dict[int, tuple[int, int]], ...]
) -> Tensor:
    """Compute all tokens in steps; returns the outputs in the order of sequences.

    Each step is rehearsed before, which must leave no trace.
    """
    found: dict[tuple[int, int], Tensor] = {}
    for shares in steps:
        places = torch.cat([torch.arange(NUM_TOKENS)[tokens_of(seq, *cut)] for seq, cut in shares.items()])
        outs, before = [], world.pool.view(torch.int32).clone()
        for keeps_states in (False, True):
            assert torch.equal(world.pool.view(torch.int32), before)
            world.begin(shares, keeps_states=keeps_states)
            if isinstance(given, Recurrence):
                outs.append(world.states.recur(given.of(places)))
            else:
                outs.append(world.states.convolve(given.of(places)))
        out = outs[-1]
        assert torch.equal(outs[0], out)
        parts = out.split([end - start for start, end in shares.values()])
        found |= {(seq, cut[0]): part for (seq, cut), part in zip(shares.items(), parts, strict=True)}
    return torch.cat([found[key] for key in sorted(found)])


def recurrence(case: str, dtype: torch.dtype) -> Recurrence:
    sizes = {"is_delta": True, "by_number": False, "has_unit_keys": False, **RECURRENCES[case]}
    heads, groups, key, value = (sizes[name] for name in ("heads", "groups", "key", "value"))
    torch.manual_seed(4)
    # Views of wider rows, as a split of one product gives them.
    side_by_side = torch.randn(NUM_TOKENS, 2 * groups * key + heads * value).to(dtype)
    queries, keys, values = side_by_side.split([groups * key, groups * key, heads * value], dim=1)
    return Recurrence(
        query_TGK=queries.view(NUM_TOKENS, groups, key),
        key_TGK=keys.view(NUM_TOKENS, groups, key),
        value_THV=values.view(NUM_TOKENS, heads, value),
        log_decay=-torch.rand((NUM_TOKENS, heads, key) if sizes["by_number"] else (NUM_TOKENS, heads)),
        beta_TH=torch.rand(NUM_TOKENS, heads).to(dtype) / (1 if sizes["has_unit_keys"] else key)
        if sizes["is_delta"]
        else None,
        has_unit_keys=sizes["has_unit_keys"],
        scaling=key**-0.5,
    )


def check(given: Recurrence | Convolution, shape: StateShape, kernels: Kernels, tolerance: float) -> None:
    expected_world, whole, cut = World(shape, None), World(shape, kernels), World(shape, kernels)
    expected = computed(expected_world, given, ALL_AT_ONCE)
    found = computed(whole, given, ALL_AT_ONCE)
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance
    assert torch.equal(computed(cut, given, CUT), found)
    assert torch.equal(cut.pool.view(torch.int32), whole.pool.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", RECURRENCES)
def test_a_recurrence_is_torchs_and_cuts_change_no_bit(
    case: str, dtype: torch.dtype, kernels: Kernels
) -> None:
    given = recurrence(case, dtype)
    _, num_heads, value_dim = given.value_THV.shape
    shape = StateShape(num_heads=num_heads, key_dim=given.key_TGK.shape[-1], value_dim=value_dim)
    check(given, shape, kernels, TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_is_torchs_and_cuts_change_no_bit(
    width: int, activation: str | None, dtype: torch.dtype, kernels: Kernels
) -> None:
    torch.manual_seed(4)
    given = Convolution(
        input_TC=torch.randn(NUM_TOKENS, 100).to(dtype)[:, :80],
        weight_CW=torch.randn(80, width).to(dtype),
        bias_C=torch.randn(80).to(dtype) if activation else None,
        activation=activation,
    )
    shape = StateShape(input_dtype=dtype, num_channels=80, num_columns=width - 1)
    check(given, shape, kernels, TOLERANCE[dtype])


def test_sequences_and_threads_change_no_bit(open_kernels: OpenKernels) -> None:
    given = recurrence("delta rule", torch.bfloat16)
    shape = StateShape(num_heads=4, key_dim=32, value_dim=40)
    found = []
    for num_threads in (1, 3):
        world = World(shape, open_kernels("", num_threads))
        found.append(computed(world, given, ALL_AT_ONCE))
    alone = World(shape, open_kernels("", 1))
    found.append(computed(alone, given, tuple({seq: (0, length)} for seq, length in enumerate(LENGTHS))))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
