"""The part `libraries`: FlashAttention 3 called as it would serve, and whether vLLM can be imported.

Owns: one call of the library with a paged cache, its error against our prefill, and the times of both.
"""

import importlib
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from campaigns.gpu.device_facts import seconds_of_call
from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES
from worker.attention.interface import AttentionOptions
from worker.attention.kv_cache import BlockLayout, KVCache, LayerShape
from worker.devices.device import Device, open_device
from worker.devices.trial import first_line, relative_error
from worker.gpu.device_batch import AttentionBatch
from worker.gpu.kernels.attention_decode import most_programs
from worker.gpu.kernels.attention_prefill import attend_prefills
from worker.gpu.kernels.attention_work import AttentionWork
from worker.gpu.trials import flash_attention
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

_BLOCK_SIZE = 16
_IMPORT_WITHIN_S = 45.0
_IMPORTS = (
    "import vllm, torch; print(vllm.__version__, torch.__version__)",
    "import vllm.entrypoints.openai.api_server; print('its server')",
)


def run(record: Record, settings: "Settings") -> None:
    """Look for vLLM in the folder KIT of the environment, and where packages are."""
    kit = os.environ.get("KIT")
    if kit:
        sys.path.append(kit)
    obstacle = flash_attention.find_obstacle()
    record.note(f"FlashAttention 3: {obstacle or 'can be called'}.")
    if settings.is_smoke:
        importlib.import_module("tests.worker.gpu.interpreter").mend_interpreter()
    table = record.table("One prompt, causal, from a paged cache", "Shape", "Tokens", "By", "Time", "Error")
    device = None if settings.is_smoke else open_device(WorkerConfig(model_path="", device="cuda"))
    for name in ("tiny",) if settings.is_smoke else ("llama-3.1-8b", "qwen3-0.6b"):
        for length in (9,) if settings.is_smoke else (2048, 8192):
            prompt = _Prompt(name, length, device)
            table.add(name, length, "ours", prompt.time_ours(), "-")
            if not obstacle:
                table.add(name, length, "FlashAttention 3", *prompt.time_library())
    imports = record.table("Imports", "What", "Found")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (kit, os.environ.get("PYTHONPATH"))))
    }
    for code in _IMPORTS:
        imports.add(code.split(";")[0], _imported(code, environment))


class _Prompt:
    """One prompt of one layer, over a pool of blocks of which it has all, in disorder."""

    def __init__(self, name: str, length: int, device: Device | None) -> None:
        shape, place = SHAPES[name], torch.device("cpu" if device is None else "cuda")
        dtype = torch.float32 if device is None else torch.bfloat16
        head_dim, num_blocks = shape.head_dim, -(-length // _BLOCK_SIZE)
        layer = LayerShape(shape.num_key_value_heads, head_dim, head_dim)
        layout = BlockLayout(layers={0: layer}, block_size=_BLOCK_SIZE, dtype=dtype)
        memory = torch.empty((num_blocks + 1) * layout.block_numel, dtype=dtype, device=place).normal_()
        self._layer, self._device = KVCache(layout, num_blocks, memory).layers[0], device
        self._queries_THD = torch.randn(
            length, shape.num_attention_heads, head_dim, dtype=dtype, device=place
        )
        self._out_THD = torch.empty_like(self._queries_THD)
        self._options = AttentionOptions(scaling=head_dim**-0.5)
        integers: dict[str, Any] = {"dtype": torch.int32, "device": place}
        batch = AttentionBatch(
            num_decodes=0,
            max_query_len=length,
            max_seq_len=length,
            query_starts_R=torch.tensor([0, length], **integers),
            seq_lens_R=torch.tensor([length], **integers),
            block_tables_SCB=(torch.randperm(num_blocks, device=place) + 1).int().view(1, 1, -1),
            slots_ST=torch.full((1, length), -1, dtype=torch.int64, device=place),
        )
        num_processors = 1 if device is None else device.num_processors
        counters = torch.zeros(AttentionWork.num_counters(most_programs(num_processors)), **integers)
        self._work = AttentionWork(batch, counters, num_processors)

    def time_ours(self) -> str:
        arguments = (self._queries_THD, self._layer, self._work, self._options, self._out_THD)
        return f"{seconds_of_call(partial(attend_prefills, *arguments), self._device) * 1e6:.1f} us"

    def time_library(self) -> list[str]:
        """Return the time and the error, after `time_ours`."""
        batch = self._work.batch
        call = partial(
            flash_attention.load(),
            self._queries_THD,
            *flash_attention.as_pages(self._layer),
            cache_seqlens=batch.seq_lens_R,
            page_table=batch.block_tables_SCB[0],
            cu_seqlens_q=batch.query_starts_R,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=self._options.scaling,
            causal=True,
            softcap=0.0,
        )
        try:
            error = relative_error(call().float(), self._out_THD.float())
            return [f"{seconds_of_call(call, self._device) * 1e6:.1f} us", f"{error:.1e}"]
        except Exception as error:  # noqa: BLE001 - a library raises any error
            return [first_line(error)[:120], "-"]


def _imported(code: str, environment: dict[str, str]) -> str:
    """Import in a process of its own; what it says last is the result."""
    try:
        done = subprocess.run(
            (sys.executable, "-c", code),
            capture_output=True,
            text=True,
            timeout=_IMPORT_WITHIN_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {_IMPORT_WITHIN_S:.0f} s"
    return ((done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["nothing"])[-1][
        :200
    ]
