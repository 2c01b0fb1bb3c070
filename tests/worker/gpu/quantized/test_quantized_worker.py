"""Quantized checkpoints and caches on an interpreted GPU, in steps from graphs and beside the host."""

import logging
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoints import make_checkpoint
from tests.gguf_checkpoints import write_gguf
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.interpreted_gpu import InterpretedGpu, open_gpu
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import expected
from worker.checkpoint.gguf.folder import folder_of
from worker.devices.device import open_device
from worker.gpu import graphs, unfused
from worker.gpu import kernel_choice as gpu_kernel_choice
from worker.gpu import runner as gpu_runner
from worker.gpu.quantized import products as code_products
from worker.gpu.trials import many_rows
from worker.worker import Worker
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night

PROMPT = [40, 41, 42, 43, 44, 9, 3]
OTHER = [7, 19, 5]
NUM_DRAWN = 4  # the interpreter is slow
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 2,
    "num_blocks": 36,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
}


def load(folder: Path, opened=open_gpu, **options: object) -> Worker:
    worker = Worker(WorkerConfig(model_path=str(folder), **{**SETTINGS, **options}), opened)
    worker.load(lambda progress: None)
    return worker


SMALL: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gpt_oss": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize(("family", "name"), [("llama", "int4 with zeros"), ("gpt_oss", "mxfp4")])
def test_a_quantized_checkpoint_on_a_gpu_gives_the_tokens_of_the_plain_one(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Captured in a graph too, so that nothing waits for the device: not even the experts."""
    folder, plain = write_quantized(family, name, tmp_path, **SMALL[family])
    monkeypatch.setattr(graphs, "_MIXED", ())
    with caplog.at_level(logging.INFO):
        driver = AheadDriver(load(folder), BLOCK_SIZE, depth=2)
    (line,) = [line for line in caplog.messages if " weights of " in line]
    assert "by kernels" in line
    assert "slowly" not in line
    prompt = driver.add(PROMPT)
    driver.generate([prompt], NUM_DRAWN)
    driver.collect_all()
    assert driver.generated(prompt)[:NUM_DRAWN] == expected(plain, tuple(PROMPT))[:NUM_DRAWN]


def test_a_model_of_nothing_but_codes_starts_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, _ = write_gguf("llama", {"": "Q4_0", "lm_head": "Q6_K"}, tmp_path, is_tied=False)
    with caplog.at_level(logging.INFO):
        assert len(generated(load(folder_of(file), dtype="float16", enforce_eager=True))) == 2 * NUM_DRAWN
    assert "slowly" not in caplog.text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("plain") / "llama", num_hidden_layers=1)


def generated(worker: Worker) -> list[int]:
    driver = PlanDriver(worker, BLOCK_SIZE)
    first, second = driver.add(PROMPT), driver.add([*OTHER, *PROMPT])
    driver.step({first: None})
    driver.step({first: None, second: 4})
    driver.generate([first, second], NUM_DRAWN)
    found = driver.generated(first)[:NUM_DRAWN] + driver.generated(second)[:NUM_DRAWN]
    driver.release_all()
    return found


def test_a_cache_of_floats_of_8_bits_gives_the_same_tokens_by_torch_and_by_triton(plain: Path) -> None:
    by_torch = load(plain, open_device, kv_cache_dtype="fp8", cpu_kernels="off")
    by_triton = load(plain, kv_cache_dtype="fp8", enforce_eager=True)
    assert generated(by_torch) == generated(by_triton)


def test_options_that_round_serve_on_a_gpu(plain: Path) -> None:
    for options in (
        {"quantization": "int8", "quantize_head": "int8"},
        {"quantization": "fp8", "activations": "fp8"},
    ):
        assert len(generated(load(plain, enforce_eager=True, **options))) == 2 * NUM_DRAWN


def test_steps_that_write_numbers_draw_the_tokens_of_steps_that_do_not(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured too; the clock of an interpreted GPU tells nothing by itself."""
    options = {"quantization": "int8", "quantize_head": "int8", "dtype": "float16"}
    by_codes = generated(load(plain, **options))
    monkeypatch.setattr(many_rows, "SIZES", (1,))
    seconds = cycle((2.0, 1.0))
    monkeypatch.setattr(InterpretedGpu, "seconds_of", lambda _, work: work() or next(seconds))
    monkeypatch.setattr(unfused, "choose_products", lambda *_: None)
    monkeypatch.setattr(gpu_runner, "count_gains", lambda *_: 0)
    by_numbers = load(plain, **options)
    monkeypatch.setattr(code_products, "launch", None)
    assert generated(by_numbers) == by_codes


@pytest.mark.parametrize(
    ("options", "num_written"),
    [
        ({}, 0),
        ({"quantization": "int4"}, 2 * 2 * 96 * 64),
        ({"quantization": "int4", "enforce_eager": True}, 2 * 96 * 64),
        ({"quantization": "int4", "num_ranks": 2}, 2 * 96 * 64),
        ({"quantize_head": "int8"}, 2 * 500 * 64),
    ],
)
def test_memory_is_kept_for_the_numbers_of_the_largest_product_of_codes(
    options: dict, num_written: int
) -> None:
    model = nn.ModuleDict(
        {"up_proj": nn.Linear(64, 96), "down_proj": nn.Linear(96, 64), "lm_head": nn.Linear(64, 500)}
    )
    config = WorkerConfig(model_path="", **options)
    assert gpu_kernel_choice._numbers_bytes(config, model, torch.bfloat16) == 2 * num_written
    assert gpu_kernel_choice._numbers_bytes(config, model, torch.float32) == 0


def test_a_gpu_without_products_of_float8_is_named_as_such(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("only supported on newer devices")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(StartupError, match="--activations fp8: this GPU has no such product: only supported"):
        load(plain, quantization="fp8", activations="fp8")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activations": "int8"}, "--activations int8 has no kernel for GPUs"),
        ({"activations": "fp8"}, "--activations fp8 has no effect"),
        ({"quantization": "int4", "gpu_kernels": "off"}, "--quantization int4 needs the GPU kernels"),
    ],
)
def test_what_a_gpu_does_not_round_is_refused_by_name(plain: Path, options: dict, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        load(plain, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activations": "fp8"}, "--activations fp8 has no kernel for CPUs"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 has no CPU kernel"),
    ],
)
def test_what_a_cpu_does_not_round_is_refused_by_name(plain: Path, options: dict, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        load(plain, open_device, **options)
