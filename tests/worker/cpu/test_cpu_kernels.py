"""The CPU's kernels against torch, with every instruction set that this machine has."""

from itertools import pairwise
from threading import Thread

import numpy as np
import pytest
import torch
from torch.nn import functional

from scheduler.cache_groups import Lifetime, LifetimeKind
from tests.worker.cpu.conftest import INSTRUCTION_SETS, OpenKernels
from worker.attention.interface import AttentionMetadata, AttentionOptions, BlockTables
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.attention.ref_attention import RefAttention
from worker.cpu.attention import CpuAttention
from worker.cpu.kernel_build import build_library, find_library
from worker.cpu.native import Kernels, PackedWeight, pack
from worker.cpu.products import pack_gate_up, pack_linear
from worker.devices.device import open_device
from worker.model.layer_parts import GateActivation, GatedMlp
from worker.model.linear import Linear, PlainWeight, merge
from worker.model.quantization import round_to_int8
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.pairs

# Rounding of a sum of some hundred products, and of the result to its dtype.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest, open_kernels: OpenKernels) -> Kernels:
    return open_kernels(request.param, 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]


def packed_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
    return pack_linear(round_to_int8(Linear.of(PlainWeight(weight), bias)))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 11, 12, 13, 40])
@pytest.mark.parametrize("num_outputs", [32, 96, 77, 5])
def test_a_product_is_torchs(kernels, dtype, num_rows, num_outputs):
    x, weight = numbers(num_rows, 48, dtype=dtype), numbers(num_outputs, 48, dtype=dtype, seed=1)
    bias = numbers(num_outputs, seed=2)
    expected = x.double() @ weight.double().T
    assert_close(kernels.multiply(x, pack(weight)), expected, dtype)
    assert_close(kernels.multiply(x, pack(weight, bias)), expected + bias.double(), dtype)
    assert_close(kernels.multiply_to_float(x, pack(weight)), expected, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 5, 13])
@pytest.mark.parametrize("num_outputs", [64, 77])
def test_a_quantized_product_is_that_of_the_rounded_numbers(kernels, dtype, num_rows, num_outputs):
    x, weight = numbers(num_rows, 96, dtype=dtype), numbers(num_outputs, 96, dtype=dtype, seed=1)
    bias = numbers(num_outputs, seed=2)
    rounded = [
        (each.double() / (scale := each.double().abs().amax(1, keepdim=True) / 127)).round() * scale
        for each in (x, weight)
    ]
    found = kernels.multiply(x, packed_int8(weight, bias))
    # One number in many is rounded to the other side, where it lies in the middle.
    assert_close(found, rounded[0] @ rounded[1].T + bias.double(), torch.bfloat16)


def test_a_row_of_zeros_and_one_that_is_not_finite_stay_so_when_quantized(kernels, dtype):
    x, weight = numbers(3, 32, dtype=dtype), numbers(32, 32, dtype=dtype, seed=1)
    x[0], x[1, 5] = 0, torch.nan
    found = kernels.multiply(x, packed_int8(weight))
    assert not found[0].any()
    assert bool(found[1].isnan().all())
    assert bool(found[2].isfinite().all())


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (GateActivation.SILU, functional.silu),
        (GateActivation.GELU_TANH, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_a_merged_product_weighs_its_ups_by_its_gates(kernels, dtype, activation, function):
    x = numbers(5, 64, dtype=dtype) * 3
    gate, up = numbers(48, 64, dtype=dtype, seed=1), numbers(48, 64, dtype=dtype, seed=2)
    expected = function(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    merged = merge([Linear.of(PlainWeight(each)) for each in (gate, up)])
    mlp = GatedMlp(merged, merged, activation)
    assert_close(kernels.multiply(x, pack_gate_up(mlp)), expected, dtype)


FAR_APART = 4096
"""Bytes from row to row: many rows would begin on the same lines of a near cache, and are copied apart."""


@pytest.mark.parametrize("num_inputs", [320, FAR_APART])
@pytest.mark.parametrize("packed", [pack, packed_int8])
def test_a_rows_result_does_not_depend_on_its_neighbours_in_any_bit(kernels, dtype, packed, num_inputs):
    weight = packed(numbers(130, num_inputs, dtype=dtype, seed=1))
    x = numbers(200, num_inputs, dtype=dtype)
    alone = torch.cat([kernels.multiply(x[row : row + 1].contiguous(), weight) for row in range(len(x))])
    for num_rows in (*range(2, 14), 29, len(x)):
        assert torch.equal(kernels.multiply(x[:num_rows], weight), alone[:num_rows])


@pytest.mark.parametrize("num_rows", [7, 8, 40])
def test_rows_that_begin_on_the_same_lines_of_a_cache_give_torchs_product(kernels, dtype, num_rows):
    num_inputs = FAR_APART // dtype.itemsize
    x, weight = numbers(num_rows, num_inputs, dtype=dtype), numbers(77, num_inputs, dtype=dtype, seed=1)
    expected = x.double() @ weight.double().T
    assert_close(kernels.multiply_to_float(x, pack(weight)), expected, torch.float32)


@pytest.mark.night
@pytest.mark.parametrize("packed", [pack, packed_int8])
def test_the_byte_instruction_of_laptops_changes_no_bit(open_kernels, packed):
    x = numbers(40, 320, dtype=torch.bfloat16)
    weight = packed(numbers(130, 320, dtype=torch.bfloat16, seed=1))
    avx_vnni, avx2 = (open_kernels(name, 1) for name in ("avx-vnni", "avx2"))
    for num_rows in (*range(1, 14), len(x)):
        assert torch.equal(avx_vnni.multiply(x[:num_rows], weight), avx2.multiply(x[:num_rows], weight))


def test_what_is_not_a_number_stays_so(kernels, dtype):
    x, weight = numbers(2, 32, dtype=dtype), numbers(32, 32, dtype=dtype, seed=1)
    x[0, 3] = torch.nan
    found = kernels.multiply(x, pack(weight))
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())


@pytest.mark.parametrize("num_outputs", [1, 5, 64, 77])
def test_a_weight_is_packed_wherever_it_lies(dtype, num_outputs):
    flat = numbers(2 * num_outputs * 51 + 1, dtype=dtype)
    lying = [
        flat[: num_outputs * 48].view(num_outputs, 48),
        flat[1 : num_outputs * 48 + 1].view(num_outputs, 48),
        flat[: num_outputs * 51].view(num_outputs, 51)[:, 3:],
        flat[: num_outputs * 48].view(48, num_outputs).T,
    ]
    for weight in lying:
        assert torch.equal(pack(weight).rows(torch.arange(num_outputs)), weight)


def test_packed_rows_are_the_weights_own(dtype):
    weight = numbers(77, 32, dtype=dtype)
    indices = torch.tensor([[0, 31, 32], [76, 64, 1]])
    assert torch.equal(pack(weight).rows(indices), weight[indices])


class Scene:
    """Three decodes and two chunks over one cache, whose pages hold NaN where nothing was written."""

    QUERY_LENS = (1, 1, 1, 7, 100)
    SEQ_LENS = (1, 140, 23, 30, 100)

    def __init__(self, shape: LayerShape, num_query_heads: int, dtype: torch.dtype, block_size: int) -> None:
        layout = BlockLayout(layers={0: shape}, block_size=block_size, dtype=dtype)
        num_blocks = sum(-(-length // block_size) for length in self.SEQ_LENS)
        self.memory = torch.full(((num_blocks + 1) * layout.block_numel,), torch.nan, dtype=dtype)
        self.cache = KVCache(layout, num_blocks, self.memory)
        order = iter(np.random.default_rng(0).permutation(num_blocks) + 1)
        tables = np.zeros((len(self.SEQ_LENS), 140 // block_size + 1), dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(self.QUERY_LENS)])
        num_tokens = int(starts[-1])
        blocks, offsets = [], []
        for seq, (queries, length) in enumerate(zip(self.QUERY_LENS, self.SEQ_LENS, strict=True)):
            for index in range(-(-length // block_size)):
                tables[seq, index] = next(order)
            for position in range(length):
                block = tables[seq, position // block_size]
                if position >= length - queries:
                    blocks.append(block)
                    offsets.append(position % block_size)
                    continue
                layer = self.cache.layers[0]
                seed = 100 * seq + position
                layer.keys.blocks_NHSD[block, :, position % block_size] = numbers(
                    shape.num_heads, shape.key_dim, dtype=dtype, seed=seed
                )
                layer.values.blocks_NHSD[block, :, position % block_size] = numbers(
                    shape.num_heads, shape.value_dim, dtype=dtype, seed=seed + 50
                )
        self.metadata = AttentionMetadata(
            num_decodes=3,
            query_starts=starts,
            seq_lens=np.array(self.SEQ_LENS),
            tables=BlockTables.of(tables),
            token_blocks_ST=np.array([blocks], dtype=np.int64),
            token_offsets=np.array(offsets, dtype=np.int64),
        )
        self.query = numbers(num_query_heads, num_tokens, shape.key_dim, dtype=dtype, seed=7)
        self.key = numbers(shape.num_heads, num_tokens, shape.key_dim, dtype=dtype, seed=8)
        self.value = numbers(shape.num_heads, num_tokens, shape.value_dim, dtype=dtype, seed=9)
        if shape.value_is_key_part:
            self.value = self.key[..., : shape.value_dim]


def window(num_tokens: int) -> Lifetime:
    return Lifetime(LifetimeKind.WINDOW, num_tokens)


OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window": AttentionOptions(0.2, window(9)),
    "long window": AttentionOptions(0.2, window(70)),
    "softcap": AttentionOptions(0.5, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=numbers(6, seed=3)),
    "all": AttentionOptions(0.3, window(13), 5.0, numbers(6, seed=3)),
}
LATENTS = LayerShape(1, 48, 32, value_is_key_part=True)
LAYERS = {
    "heads": (LayerShape(2, 32, 48), 6),
    "latents": (LATENTS, 6),
    "latents of many heads": (LATENTS, 42),
}


@pytest.mark.parametrize("block_size", [8, 16, 32, 5])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layer", LAYERS)
def test_attention_is_the_reference(kernels, dtype, name, block_size, layer):
    shape, num_heads = LAYERS[layer]
    options = OPTIONS[name]
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.repeat(num_heads // 6))
    scene = Scene(shape, num_heads, dtype, block_size)
    device = open_device(WorkerConfig(model_path="", device="cpu"))
    ours = CpuAttention(scene.cache, device, kernels)
    ours.begin_step(scene.metadata)
    found = ours.attend(0, scene.query, scene.key, scene.value, options)
    # The reference gathers whole pages: what was never written must be finite for it.
    scene.memory.nan_to_num_(0.0)
    reference = RefAttention(scene.cache, device)
    reference.begin_step(scene.metadata)
    expected = reference.attend(0, scene.query, scene.key, scene.value, options)
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2
    assert (found.double() - expected.double()).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ["plain", "long window"])
@pytest.mark.parametrize("layer", [(LayerShape(8, 32, 32), 16), (LATENTS, 12), (LATENTS, 40)], ids=str)
def test_a_query_attends_the_same_in_any_cut_of_its_prompt_and_alone(kernels, dtype, name, layer):
    """To the last bit: a prompt in chunks, or beside others, gives what it gives whole. Beside others several
    heads are computed together."""
    scene = Scene(*layer, dtype, 16)
    device = open_device(WorkerConfig(model_path="", device="cpu"))
    backend = CpuAttention(scene.cache, device, kernels)
    backend.begin_step(scene.metadata)
    whole = backend.attend(0, scene.query, scene.key, scene.value, OPTIONS[name])
    starts, lengths = scene.metadata.query_starts, scene.metadata.seq_lens
    for seq, cuts in ((1, (0, 1)), (3, (0, 7)), (4, (0, 5, 6, 78, 100))):
        for start, end in pairwise(cuts):
            chunk = slice(int(starts[seq]) + start, int(starts[seq]) + end)
            backend.begin_step(
                AttentionMetadata(
                    num_decodes=int(end - start == 1),
                    query_starts=np.array([0, end - start]),
                    seq_lens=np.array([int(lengths[seq]) - cuts[-1] + end]),
                    tables=BlockTables.of(scene.metadata.tables.gathered(0)[seq : seq + 1]),
                    token_blocks_ST=scene.metadata.token_blocks_ST[:, chunk],
                    token_offsets=scene.metadata.token_offsets[chunk],
                )
            )
            part = backend.attend(
                0, scene.query[:, chunk], scene.key[:, chunk], scene.value[:, chunk], OPTIONS[name]
            )
            assert torch.equal(part, whole[chunk])


def test_a_product_of_no_rows_ends(kernels):
    """Part of a prompt wants no logits: to round the output layer's inputs, the first phase, is nothing."""
    packed = packed_int8(numbers(640, 64))

    def multiply() -> None:
        for num_rows in (3, 0, 3):  # memory for rounded inputs is there once some were
            kernels.multiply(numbers(num_rows, 64), packed)

    products = Thread(target=multiply, daemon=True)
    products.start()
    products.join(timeout=20)
    assert not products.is_alive()


def test_many_short_steps_on_more_threads_than_cores_all_end(dtype):
    """A helper that is not running when a step begins, or ends, is not waited for."""
    kernels = Kernels(find_library() or build_library(), 7)
    x, weight = numbers(3, 64, dtype=dtype), numbers(640, 64, dtype=dtype, seed=1)
    packed = pack(weight)
    expected = kernels.multiply(x, packed)
    for _ in range(2000):
        assert torch.equal(kernels.multiply(x, packed), expected)
