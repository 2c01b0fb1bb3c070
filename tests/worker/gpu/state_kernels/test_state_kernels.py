"""The kernels of recurrent layers compute what the plain recurrences do, and write to their own blocks."""

from itertools import pairwise
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.gpu.interpreted_gpu import InterpretedGpu
from worker.gpu.state_kernels import convolution as convolution_module
from worker.gpu.state_kernels import executor
from worker.gpu.state_kernels.executor import GpuStates
from worker.gpu.state_kernels.places import StateBatch
from worker.states.interface import Convolution, Recurrence, StateShape, StateStep
from worker.states.ref_states import RefStates
from worker.states.state_layout import StateLayout
from worker.worker_config import WorkerConfig

DEVICE = InterpretedGpu(WorkerConfig(model_path="", device="cpu"))
EVERY = 1 << 30
"""Share of tokens one by one."""


def layout_of(shape: StateShape, block_bytes: int = 1024) -> StateLayout:
    """Layer 1 begins within a block, and is cut between several."""
    other = StateShape(num_channels=20, num_columns=3, num_heads=1, key_dim=4, value_dim=3)
    return StateLayout({0: other, 1: shape}, block_bytes)


class Both:
    """Kernels and the reference, over pools of the same content."""

    def __init__(self, shape: StateShape, num_sequences: int, **sizes: int) -> None:
        self.layout = layout_of(shape, **sizes)
        num_blocks, self.num_sequences = self.layout.num_stripes * num_sequences, num_sequences
        drawn = torch.Generator().manual_seed(5)
        pool_NE = torch.randn(num_blocks + 2, self.layout.block_bytes // 4, generator=drawn)
        self.pools = [pool_NE, pool_NE.clone()]
        order = np.random.default_rng(3).permutation(num_blocks) + 1
        self.blocks_RS = order.reshape(num_sequences, -1)
        self.kernels = GpuStates(self.pools[0], self.layout, DEVICE)
        self.reference = RefStates(self.pools[1], self.layout)
        for each in (self.kernels, self.reference):
            each.begin_layer(1)

    def compute(self, call: str, given: Any, lens: list[int], first: list[bool], **fields: Any) -> Tensor:
        """Compute a step both ways, compare, and return the kernels' outputs."""
        num_decodes = next((place for place, num in enumerate(lens) if num > 1), len(lens))
        step = StateStep(
            num_decodes, np.cumsum([0, *lens]), np.array(first), self.blocks_RS[: len(lens)], **fields
        )
        found = []
        for each in (self.kernels, self.reference):
            each.begin_step(step)
            found.append(getattr(each, call)(given))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*self.pools, rtol=1e-4, atol=1e-4, msg="states")
        return found[0]


def recurrence(
    num_tokens: int, shape: StateShape, num_groups: int, *, has_beta: bool = True, by_channel: bool = False
) -> Recurrence:
    torch.manual_seed(num_tokens)
    num_heads, key_dim = shape.num_heads, shape.key_dim
    mixed_TC = torch.randn(num_tokens, 2 * num_groups * key_dim + num_heads * shape.value_dim)
    query, key, value = mixed_TC.split([num_groups * key_dim] * 2 + [num_heads * shape.value_dim], dim=1)
    decays = (num_tokens, num_heads, key_dim) if by_channel else (num_tokens, num_heads)
    return Recurrence(
        query_TGK=query.view(num_tokens, num_groups, key_dim),
        key_TGK=key.view(num_tokens, num_groups, key_dim),
        value_THV=value.view(num_tokens, num_heads, -1),
        log_decay=-torch.rand(decays),
        beta_TH=torch.rand(num_tokens, num_heads) if has_beta else None,
        has_unit_keys=has_beta,
        scaling=key_dim**-0.5 if has_beta else 1.0,
    )


def convolution(num_tokens: int, num_channels: int, width: int = 4, **changes: Any) -> Convolution:
    torch.manual_seed(num_tokens)
    given = Convolution(
        torch.randn(num_channels, num_tokens).t(),
        torch.randn(num_channels, width),
        torch.randn(num_channels),
        "silu",
    )
    return given._replace(**changes)


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted products round nothing, so that chunks can be compared in float32."""
    monkeypatch.setattr(executor, "_DTYPES", {torch.float32})


ODD = StateShape(num_heads=3, key_dim=20, value_dim=9)
SQUARE = StateShape(num_heads=2, key_dim=16, value_dim=16)
SCAN = StateShape(num_heads=37, key_dim=16, value_dim=1)
CHANNELS = StateShape(num_channels=52, num_columns=3)
LENS, FIRST = [1, 1, 2, 37, 5], [True, False, False, True, False]


@pytest.mark.parametrize(
    ("shape", "num_groups", "options"),
    [
        (ODD, 3, {}),
        (ODD, 1, {"has_beta": False}),
        (SQUARE, 1, {"by_channel": True}),
        (SCAN, 1, {"has_beta": False, "by_channel": True}),
    ],
    ids=["delta rule", "Mamba 2", "decays of channels", "Mamba 1"],
)
def test_tokens_one_by_one(shape: StateShape, num_groups: int, options: dict[str, bool], monkeypatch) -> None:
    monkeypatch.setattr(executor, "_MOST_BY_TOKENS", EVERY)
    monkeypatch.setattr(GpuStates, "_try_chunks", lambda *_: False)
    both = Both(shape, len(LENS))
    both.compute("recur", recurrence(sum(LENS), shape, num_groups, **options), LENS, FIRST)
    both.compute("recur", recurrence(3, shape, num_groups, **options), [1, 1, 1], [False, True, False])
    both.compute("recur", recurrence(4, shape, num_groups, **options), [4], [False], keeps_states=False)


def test_convolutions() -> None:
    both = Both(CHANNELS, len(LENS))
    both.compute("convolve", convolution(sum(LENS), 52), LENS, FIRST)
    both.compute("convolve", convolution(3, 52, bias_C=None), [1, 1, 1], [False, True, False])
    both.compute("convolve", convolution(4, 52, activation=None), [2, 2], [False, True], keeps_states=False)
    both.compute("convolve", convolution(3, 52, activation="gelu"), [1, 2], [False, False])


def test_convolutions_of_tokens_that_are_farther_apart_than_int32_counts(monkeypatch) -> None:
    """The third, counted in int32, would lie before the first; nothing between them is ever touched."""
    stride, no_reserve, kernel = 2**31 - 1, 0x4000, convolution_module.convolve_kernel
    mapped = mmap(-1, 17 << 30, MAP_PRIVATE | MAP_ANONYMOUS | no_reserve)
    memory = np.frombuffer(mapped, np.float32)[64:]
    given = convolution(3, 52)
    given = given._replace(input_TC=given.input_TC.contiguous())
    for token, row_C in enumerate(given.input_TC):
        memory[token * stride : token * stride + 52] = row_C

    class Apart:
        def __getitem__(self, grid: Any) -> Any:
            def launch(_: Tensor, *others: Any, **constants: Any) -> None:
                first_C = torch.from_numpy(memory[:52])
                kernel[grid](first_C, *others[:8], stride, *others[9:], **constants)

            return launch

    monkeypatch.setattr(convolution_module, "convolve_kernel", Apart())
    Both(CHANNELS, 1).compute("convolve", given, [3], [True])


@pytest.mark.parametrize(
    ("shape", "num_groups", "has_beta"), [(ODD, 3, True), (SQUARE, 1, True), (ODD, 1, False)]
)
def test_chunks(shape: StateShape, num_groups: int, has_beta: bool, monkeypatch) -> None:
    """Shares end within a chunk, at its end, and behind it; short ones are left to the other kernel."""
    monkeypatch.setattr(GpuStates, "_try_chunks", lambda *_: True)
    monkeypatch.setattr(executor, "recur_by_tokens", counted := Counted(executor.recur_by_tokens))
    lens = [1, 64, 17, 130]
    both = Both(shape, len(lens), block_bytes=2048)
    given = recurrence(sum(lens), shape, num_groups, has_beta=has_beta)
    both.compute("recur", given, lens, [False, True, False, False])
    assert counted.most == [16]
    both.compute("recur", given.of(slice(0, 66)), [66], [False], keeps_states=False)


class Counted:
    """Launch of the kernel that goes token by token, with the longest shares that it was given."""

    def __init__(self, launch: Any) -> None:
        self._launch, self.most = launch, list[float]()

    def __call__(self, *given: Any) -> None:
        self.most.append(given[-1])
        self._launch(*given)


def test_chunks_of_one_key_that_nothing_fades(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of the matrix that is inverted would have numbers of eighteen digits."""
    monkeypatch.setattr(GpuStates, "_try_chunks", lambda *_: True)
    given = recurrence(64, SQUARE, 1)
    given = given._replace(
        key_TGK=given.key_TGK[:1].expand(64, -1, -1).contiguous(),
        log_decay=torch.zeros(64, 2),
        beta_TH=torch.full((64, 2), 0.99),
    )
    Both(SQUARE, 1, block_bytes=2048).compute("recur", given, [64], [False])


@pytest.mark.parametrize("failure", [RuntimeError("out of resource: shared memory"), None])
def test_chunks_that_fail_or_compute_otherwise_are_not_taken(
    failure: Exception | None, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    def launch(given: Recurrence, places: Any, batch: Any, out_THV: Tensor, *_: Any) -> None:
        if failure is not None:
            raise failure
        out_THV.fill_(1.0)

    monkeypatch.setattr(executor, "recur_by_chunks", launch)
    Both(SQUARE, 1).compute("recur", recurrence(20, SQUARE, 1), [20], [True])
    assert ("out of resource" if failure else "have an error of") in caplog.text


def test_padding_writes_nothing_and_gets_zeros() -> None:
    """Sequences without tokens, whose blocks are others'."""
    shape = StateShape(num_channels=52, num_columns=3, num_heads=3, key_dim=20, value_dim=9)
    both = Both(shape, 1)
    before = both.pools[0].clone()
    for lens, num_tokens, are_decodes in (([1, 0, 0], 3, True), ([2, 0], 9, False)):
        both.pools[0].copy_(before)
        starts_R = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32)
        blocks_RS = torch.from_numpy(np.tile(both.blocks_RS, (len(lens), 1)).astype(np.int32))
        seq_lens_R = torch.tensor([9, *lens[1:]], dtype=torch.int32)
        both.kernels.begin_batch(StateBatch(are_decodes, starts_R, seq_lens_R, blocks_RS))
        given = recurrence(num_tokens, shape, 1), convolution(num_tokens, 52)
        padded = both.kernels.recur(given[0]), both.kernels.convolve(given[1])
        pool_NE = both.pools[0].clone()
        both.pools[0].copy_(before)
        both.pools[1].copy_(before)
        real = slice(0, lens[0])
        alone = (
            both.compute("recur", given[0].of(real), lens[:1], [False]),
            both.compute("convolve", given[1].of(real), lens[:1], [False]),
        )
        assert torch.equal(pool_NE, both.pools[0])
        for ours, expected in zip(padded, alone, strict=True):
            assert torch.equal(ours[real], expected)
            assert not ours[lens[0] :].any()


def test_cuts_change_no_bit_of_tokens_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(GpuStates, "_try_chunks", lambda *_: False)
    given, outputs = recurrence(20, ODD, 1), []
    for cuts in ((0, 20), (0, 1, 2, 15, 20)):
        both = Both(ODD, 1)
        parts = [
            both.compute("recur", given.of(slice(start, end)), [end - start], [not start])
            for start, end in pairwise(cuts)
        ]
        outputs.append(torch.cat(parts))
    assert torch.equal(*outputs)
