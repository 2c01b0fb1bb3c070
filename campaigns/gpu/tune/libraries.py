"""The part `libraries`: FlashAttention 3 called as it would serve, and whether vLLM can be imported.

Owns: one call of the library with a paged cache, its error against our prefill, and the times of both.
"""

import importlib
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

from campaigns.gpu.results import Record
from campaigns.gpu.shapes import SHAPES
from campaigns.gpu.tune.timing import time_calls
from campaigns.gpu.tune.workloads import AttentionInputs, Load
from worker.devices.device import Device, open_device
from worker.devices.trial import first_line, relative_error
from worker.gpu.kernels.attention_prefill import attend_prefills
from worker.gpu.trials import flash_attention
from worker.worker_config import WorkerConfig

if TYPE_CHECKING:
    from campaigns.gpu.cli import Settings

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
            inputs = _Prompt(name, length, device)
            table.add(name, length, "ours", inputs.time_ours(), "-")
            if not obstacle:
                table.add(name, length, "FlashAttention 3", *inputs.time_library())
    imports = record.table("Imports", "What", "Found")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (kit, os.environ.get("PYTHONPATH"))))
    }
    for code in _IMPORTS:
        imports.add(code.split(";")[0], _imported(code, environment))


class _Prompt:
    """One prompt of one layer."""

    def __init__(self, name: str, length: int, device: Device | None) -> None:
        place = torch.device("cpu" if device is None else "cuda")
        dtype = torch.float32 if device is None else torch.bfloat16
        self._inputs, self._device = (
            AttentionInputs(SHAPES[name], Load(1, length, length), place, dtype),
            device,
        )

    def time_ours(self) -> str:
        inputs = self._inputs
        arguments = (inputs.work, inputs.options, inputs.out_THD)
        calls = [
            partial(attend_prefills, inputs.queries_THD, layer, *arguments) for layer in inputs.layers[:1]
        ]
        return f"{time_calls(calls, self._device) * 1e6:.1f} us"

    def time_library(self) -> list[str]:
        """Return the time and the error, after `time_ours`."""
        inputs, batch = self._inputs, self._inputs.work.batch
        layer = inputs.layers[0]
        call = partial(
            flash_attention.load(),
            inputs.queries_THD,
            *flash_attention.as_pages(layer),
            cache_seqlens=batch.seq_lens_R,
            page_table=batch.block_tables_SCB[0],
            cu_seqlens_q=batch.query_starts_R,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=inputs.options.scaling,
            causal=True,
            softcap=0.0,
        )
        try:
            error = relative_error(call().float(), inputs.out_THD.float())
            return [f"{time_calls([call], self._device) * 1e6:.1f} us", f"{error:.1e}"]
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
