"""The part `anchors`: our kernels beside those that come with torch, which every such machine has.

Owns: products by cuBLAS, in bf16 and in FP8, and ours of few rows; attention by cuDNN and FlashAttention
beside ours; our decodes as bandwidth.
Never: judges: whether a product of our own is worth it (docs/benchmarks/gpu.md) is for the reader.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from campaigns.gpu.device_facts import gb_per_s
from campaigns.gpu.results import Record, Table
from campaigns.gpu.shapes import SHAPES, Shape
from campaigns.gpu.tune.timing import time_calls
from campaigns.gpu.tune.workloads import AttentionInputs, Load, rows
from worker.devices.device import Device, open_device
from worker.gpu.kernels.attention_decode import attend_decodes
from worker.gpu.kernels.attention_prefill import attend_prefills
from worker.gpu.kernels.skinny_products import MOST_ROWS, Folds, choose_skinny_tiles, multiply_skinny
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_SHAPES = ("llama-3.1-8b", "qwen3-0.6b")
_TOKENS = (1, 2, 4, 8, 16, 64, 256, 2048, 8192)
_PROMPTS = (2048, 8192, 32_768)
_DECODES = tuple(
    Load(count, context, 1) for count in (1, 16, 64, 256) for context in (1024, 8192, 32_768, 131_072)
)
_MOST_KV_BYTES = 64 << 30
_LARGEST_FP8 = 448.0
_BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


def run(record: Record, settings: "Settings") -> None:
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
        _Anchors(record, None).measure(("tiny",), (1, 3), (9,), (Load(2, 9, 1),))
    else:
        device = open_device(WorkerConfig(model_path="", device="cuda"))
        _Anchors(record, device).measure(_SHAPES, _TOKENS, _PROMPTS, _DECODES)


class _Anchors:
    def __init__(self, record: Record, device: Device | None) -> None:
        self._record, self._device = record, device
        self._place = torch.device("cpu" if device is None else "cuda")
        self._dtype = torch.float32 if device is None else torch.bfloat16

    def measure(
        self, shapes: Sequence[str], tokens: Sequence[int], prompts: Sequence[int], decodes: Sequence[Load]
    ) -> None:
        columns = ("Shape", "Tokens", "Outputs x inputs", "Time", "Weights", "TFLOP/s")
        plain = self._record.table("Products by cuBLAS, bf16", *columns)
        scaled = self._record.table("Products by cuBLAS, FP8 with a scale for each row", *columns, "Error")
        few = self._record.table("Products of up to 16 rows by our kernel", *columns)
        ours = self._record.table("Our decodes", "Shape", "Load", "Time", "Keys and values")
        prefill = self._record.table("One prompt, causal", "Shape", "Tokens", "By", "Time", "TFLOP/s")
        for name in shapes:
            for load in decodes:
                self._told(ours, (name, load), partial(self._decode, SHAPES[name], load))
            for length in prompts:
                for by, work in self._prefills(SHAPES[name], length):
                    self._told(prefill, (name, length, by), work)
            for count in tokens:
                for size in products_of(SHAPES[name]):
                    key = (name, count, f"{size[0]} x {size[1]}")
                    self._told(plain, key, partial(self._product, count, size))
                    if count <= MOST_ROWS:
                        self._told(few, key, partial(self._few, count, size))
                    self._told(scaled, key, partial(self._scaled, count, size))

    def _told(self, table: Table, key: tuple[object, ...], work: Callable[[], list[str]]) -> None:
        """Add a row; where this device or this torch refuses, the row says so."""
        try:
            cells = work()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            cells = [(str(error).splitlines() or [type(error).__name__])[0][:60]]
        num_open = len(table.columns) - len(key) - len(cells)
        table.add(*key, *cells, *["-"] * num_open)

    def _product(self, count: int, size: tuple[int, int]) -> list[str]:
        weights = rows(size[0], size[1], self._place, self._dtype)
        x_TK = torch.randn(count, size[1], device=self._place, dtype=self._dtype)
        seconds = time_calls([partial(linear, x_TK, weight) for weight in weights], self._device)
        return _rates(seconds, count, size, num_bytes=weights[0].nbytes)

    def _few(self, count: int, size: tuple[int, int]) -> list[str]:
        """Multiply alone: neither norm nor gates are folded in, nor taken off cuBLAS's time beside it."""
        weights = rows(size[0], size[1], self._place, self._dtype)
        x_TK = torch.randn(count, size[1], device=self._place, dtype=self._dtype)
        num_processors = 1 if self._device is None else self._device.num_processors
        tiles = choose_skinny_tiles(weights[0], Folds(), num_processors)
        arrivals = torch.zeros(size[0], dtype=torch.int32, device=self._place)
        calls = [
            partial(multiply_skinny, x_TK, weight, None, Folds(), tiles, arrivals=arrivals)
            for weight in weights
        ]
        return _rates(time_calls(calls, self._device), count, size, num_bytes=weights[0].nbytes)

    def _scaled(self, count: int, size: tuple[int, int]) -> list[str]:
        """Compare with the product in float32 as well, launched and in a graph: an ignored stream shows."""
        weights = rows(size[0], size[1], self._place, self._dtype)
        x_TK = torch.randn(count, size[1], device=self._place, dtype=self._dtype)
        fp8 = [_round_to_fp8(weight) for weight in weights]
        x, x_scales = _round_to_fp8(x_TK)

        def multiply(weight: Tensor, scales: Tensor) -> Tensor:
            return torch._scaled_mm(
                x, weight.t(), x_scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True
            )

        expected_TN = (x.float() * x_scales) @ (fp8[0][0].float() * fp8[0][1]).t()
        found = [multiply(*fp8[0])]
        if self._device is not None:
            replayed: list[Tensor] = []
            graph = self._device.capture(lambda: replayed.append(multiply(*fp8[0])))
            graph.replay()
            self._device.wait()
            found.append(replayed[-1])
        error = max(float((each.float() - expected_TN).norm() / expected_TN.norm()) for each in found)
        seconds = time_calls([partial(multiply, *each) for each in fp8], self._device)
        return [*_rates(seconds, count, size, num_bytes=fp8[0][0].nbytes), f"{error:.1e}"]

    def _decode(self, shape: Shape, load: Load) -> list[str]:
        kv_bytes = load.num_sequences * load.context * 2 * shape.num_key_value_heads * shape.head_dim * 2
        if kv_bytes > _MOST_KV_BYTES:
            raise ValueError("does not fit")
        inputs = AttentionInputs(shape, load, self._place, self._dtype)
        arguments = (inputs.work, inputs.options, inputs.out_THD)
        calls = [partial(attend_decodes, inputs.queries_THD, layer, *arguments) for layer in inputs.layers]
        seconds = time_calls(calls, self._device)
        return [f"{seconds * 1e6:.1f} us", gb_per_s(kv_bytes / seconds)]

    def _prefills(self, shape: Shape, length: int) -> list[tuple[str, Callable[[], list[str]]]]:
        flops = 2 * shape.num_attention_heads * shape.head_dim * length * length

        def ours() -> list[str]:
            inputs = AttentionInputs(shape, Load(1, length, length), self._place, self._dtype)
            arguments = (inputs.work, inputs.options, inputs.out_THD)
            calls = [
                partial(attend_prefills, inputs.queries_THD, layer, *arguments) for layer in inputs.layers
            ]
            return _rate(time_calls(calls[:1], self._device), flops)

        def theirs(backend: SDPBackend) -> list[str]:
            queries, keys, values = (
                torch.randn(1, heads, length, shape.head_dim, device=self._place, dtype=self._dtype)
                for heads in (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)
            )
            with sdpa_kernel(SDPBackend.MATH if self._device is None else backend):
                call = partial(
                    scaled_dot_product_attention, queries, keys, values, is_causal=True, enable_gqa=True
                )
                return _rate(time_calls([call], self._device), flops)

        return [("ours", ours), *((name, partial(theirs, each)) for name, each in _BACKENDS.items())]


def products_of(shape: Shape) -> list[tuple[int, int]]:
    """List a layer's products and the output layer's, as outputs and inputs."""
    queries, keys = (
        heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    return [
        (queries + 2 * keys, shape.hidden_size),
        (shape.hidden_size, queries),
        (2 * shape.intermediate_size, shape.hidden_size),
        (shape.hidden_size, shape.intermediate_size),
        (shape.vocab_size, shape.hidden_size),
    ]


def _round_to_fp8(x_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and a scale for each row, [R, 1]."""
    scales_R1 = x_RK.abs().amax(dim=1, keepdim=True).float() / _LARGEST_FP8
    return (x_RK.float() / scales_R1).to(torch.float8_e4m3fn), scales_R1


def _rates(seconds: float, count: int, size: tuple[int, int], *, num_bytes: int) -> list[str]:
    return [
        f"{seconds * 1e6:.1f} us",
        gb_per_s(num_bytes / seconds),
        f"{2 * count * size[0] * size[1] / seconds / 1e12:.0f}",
    ]


def _rate(seconds: float, flops: int) -> list[str]:
    return [f"{seconds * 1e6:.1f} us", f"{flops / seconds / 1e12:.0f}"]
