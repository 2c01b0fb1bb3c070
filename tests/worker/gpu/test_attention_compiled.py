"""The attention kernels as a Hopper GPU gets them: what fits, what is spilled, which instructions they use.

A kernel is compiled for what it is launched with: its arguments are taken from a launch that is not made.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from scheduler.cache_groups import Lifetime, LifetimeKind
from tests.worker.gpu.cross_compile import SHARED_BYTES_LIMIT, Compiled, Kernel, compile_kernels
from worker.attention.interface import AttentionOptions, SeenPictures
from worker.attention.kv_cache import FLOAT8, BlockLayout, KVCache, LayerShape
from worker.devices.device import CpuDevice
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels import (
    attention_decode,
    attention_prefill,
    attention_work,
    kv_write,
)
from worker.gpu.quantized.kernels import numbers as code_numbers
from worker.worker_config import WorkerConfig

pytestmark = pytest.mark.night

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    FLOAT8: "*fp8e4nv",
}
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Triton's words for its types, and their names in its language."""
PLAIN = AttentionOptions(scaling=0.1)
ALL = AttentionOptions(
    0.1, Lifetime(LifetimeKind.WINDOW, 4096), softcap=50.0, sinks=torch.empty(32, dtype=torch.bfloat16)
)


REGISTERS_OF_A_PROCESSOR = 65536


class Layer(NamedTuple):
    num_kv_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    options: AttentionOptions = PLAIN
    dtype: torch.dtype = torch.bfloat16
    is_float8: bool = False
    pictures: SeenPictures | None = None
    """Whether the cache has floats of 8 bits."""


# One for each line of the tables of tiles, heads of odd sizes and numbers, and every option.
LAYERS = {
    "64": Layer(8, 4, 64, 64),
    "128": Layer(4, 7, 128, 128),
    "128 with all options": Layer(8, 4, 128, 128, ALL),
    "80": Layer(8, 1, 80, 80),
    "192 and 128": Layer(16, 1, 192, 128),
    "256": Layer(4, 2, 256, 256),
    "512": Layer(4, 2, 512, 512),
    "576 and 512": Layer(1, 16, 576, 512),
    "128 from 8 bits": Layer(4, 7, 128, 128, is_float8=True),
    "64 from 8 bits": Layer(8, 4, 64, 64, is_float8=True),
    "256 from 8 bits": Layer(4, 2, 256, 256, is_float8=True),
    "576 and 512 from 8 bits": Layer(1, 16, 576, 512, is_float8=True),
    "float32": Layer(8, 4, 64, 64, dtype=torch.float32),
    "128 with pictures": Layer(4, 7, 128, 128, pictures=SeenPictures(np.zeros(4, np.int64), False)),
    "256 with pictures": Layer(4, 2, 256, 256, pictures=SeenPictures(np.zeros(4, np.int64), False)),
}
HALF_WIDTH = [name for name, layer in LAYERS.items() if layer.dtype == torch.bfloat16]


class Recorder:
    """In a kernel's place: makes a description of each launch."""

    def __init__(self, module: Any, name: str, noted: dict[str, Kernel]) -> None:
        self._name = name
        self._function = f"{module.__name__}:{name}"
        self._arguments = list(getattr(module, name).arg_names)
        self._noted = noted

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._note

    def _note(
        self,
        *given: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        launch_pdl: bool = False,
        **constants: Any,
    ) -> None:
        values = dict(zip(self._arguments, given, strict=False))
        constants = {
            name: f"tl.{_NAMES[str(value)]}" if isinstance(value, tl.dtype) else value
            for name, value in constants.items()
        }
        # Triton makes constants of these, too.
        constants |= {name: value for name, value in values.items() if value is None or _is_one(value)}
        self._noted[self._name] = Kernel(
            function=self._function,
            signature={
                name: "constexpr" if name in constants else _type(values[name]) for name in self._arguments
            },
            constants=constants,
            unaligned=tuple(name for name, value in values.items() if isinstance(value, int) and value % 16),
            num_warps=num_warps,
            num_stages=num_stages,
            launch_pdl=launch_pdl,
        )


def _is_one(value: object) -> bool:
    return isinstance(value, int) and value == 1


def _type(value: object) -> str:
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def launches_of(layer: Layer) -> dict[str, Kernel]:
    """Kernels, by name, that a step launches for this layer."""
    shape = LayerShape(layer.num_kv_heads, layer.key_dim, layer.value_dim)
    layout = BlockLayout(layers={0: shape}, block_size=16, dtype=FLOAT8 if layer.is_float8 else layer.dtype)
    cache = KVCache(layout, 1, torch.empty(2 * layout.block_numel, dtype=layout.storage)).layers[0]
    num_sequences, num_heads = 4, layer.num_kv_heads * layer.num_groups
    integers = torch.empty(num_sequences + 1, dtype=torch.int32)
    slots_T = torch.empty(num_sequences, dtype=torch.int64)
    tables = torch.empty((num_sequences, 3), dtype=torch.int32)
    batch = AttentionBatch(num_sequences, 1, 1000, integers, integers[1:], tables[None], slots_T[None])
    batch = batch.with_pictures(layer.pictures, CpuDevice(WorkerConfig(model_path="", num_threads=1)))

    def new(heads: int, dim: int) -> Tensor:
        return torch.empty((num_sequences, heads, dim), dtype=layer.dtype)

    noted: dict[str, Kernel] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (attention_decode, "decode_kernel"),
            (attention_work, "list_decodes_kernel"),
            (attention_work, "list_prefills_kernel"),
            (attention_prefill, "prefill_kernel"),
            (kv_write, "write_kernel"),
        ):
            patch.setattr(module, name, Recorder(module, name, noted))
        patch.setattr(code_numbers, "_IS_INTERPRETED", False)  # the compiler gets the machine's instructions
        queries, out = new(num_heads, layer.key_dim), new(num_heads, layer.value_dim)
        work = attention_work.AttentionWork(batch, torch.empty(500, dtype=torch.int32), num_processors=132)
        attention_decode.attend_decodes(queries, cache, work, layer.options, out)
        attention_prefill.attend_prefills(queries, cache, work, layer.options, out)
        key, value = (new(layer.num_kv_heads, dim) for dim in (layer.key_dim, layer.value_dim))
        kv_write.write_kv(key.transpose(0, 1), value.transpose(0, 1), cache, slots_T)
    return noted


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], Compiled]:
    """Machine code by a layer's name and a kernel's. Small kernels are compiled once."""
    kernels = {
        (layer_name, name): kernel
        for layer_name, layer in LAYERS.items()
        for name, kernel in launches_of(layer).items()
        if name in ("decode_kernel", "prefill_kernel") or layer_name in ("128", "128 from 8 bits")
    }
    return dict(zip(kernels, compile_kernels(list(kernels.values())), strict=True))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", ["decode_kernel", "prefill_kernel"])
def test_every_line_of_the_tables_fits_into_shared_memory(compiled, layer, kernel) -> None:
    assert compiled[layer, kernel].shared_bytes <= SHARED_BYTES_LIMIT


@pytest.mark.parametrize("layer", HALF_WIDTH)
@pytest.mark.parametrize("kernel", ["decode_kernel", "prefill_kernel"])
def test_products_are_the_tensor_cores_and_nothing_is_spilled(compiled, layer, kernel) -> None:
    found = compiled[layer, kernel]
    assert found.uses_tensor_cores
    # Heads of 256 from 8 bits do not find room in a prefill, and did not byte by byte either.
    assert found.local_bytes <= (192 if (layer, kernel) == ("256 from 8 bits", "prefill_kernel") else 0)
    assert found.widest_load_bytes == 16


@pytest.mark.parametrize("layer", [name for name in HALF_WIDTH if LAYERS[name].key_dim <= 256])
def test_prompts_are_multiplied_by_whole_warp_groups(compiled, layer) -> None:
    assert compiled[layer, "prefill_kernel"].uses_warp_group_products


def test_keys_of_later_tiles_are_on_their_way_while_a_tile_is_computed(compiled) -> None:
    for kernel in ("decode_kernel", "prefill_kernel"):
        assert "cp.async.wait_group" in compiled["128", kernel].ptx


def test_keys_and_values_are_written_sixteen_bytes_at_a_time(compiled) -> None:
    found = compiled["128", "write_kernel"]
    assert found.widest_load_bytes == 16
    assert "st.global.v4.b32" in found.ptx
    assert found.local_bytes == 0


def test_all_programs_of_a_decode_run_side_by_side(compiled) -> None:
    """They begin at once: else the shares of some would wait for those of others."""
    for layer in HALF_WIDTH:
        found, kernel = compiled[layer, "decode_kernel"], launches_of(LAYERS[layer])["decode_kernel"]
        beside = attention_decode.most_programs(num_processors=1)
        assert beside * found.shared_bytes <= SHARED_BYTES_LIMIT
        assert beside * kernel.num_warps * 32 * found.num_registers <= REGISTERS_OF_A_PROCESSOR


def test_work_is_listed_without_spilling(compiled) -> None:
    for kernel in ("list_decodes_kernel", "list_prefills_kernel"):
        assert compiled["128", kernel].local_bytes == 0
