"""Place of the weights once loaded, and the outcome where there is not enough memory for them."""

import gc
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import worker.devices.device
import worker.load.build
import worker.load.weight_files
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.checkpoint.checkpoint_files import (
    StoredTensor,
    WeightFile,
    bytes_not_taken,
    find_weights,
    loaded_bytes,
)
from worker.cpu import kernel_choice as cpu_kernel_choice
from worker.cpu.kernel_build import CannotBuild
from worker.cpu.packing import large_pages
from worker.devices import weight_life
from worker.devices.device import CpuDevice
from worker.load.loader import load_model
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.machine import free_behind
from worker.memory_sizes import CPU_SHARE_OF_AVAILABLE, WeightBytes
from worker.progress import LoadStage
from worker.startup.ready_model import start_generator
from worker.worker_config import LoadProgress, WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night


@pytest.fixture
def folder(checkpoints: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of a good checkpoint in float32, to be changed."""
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "model"))


def load(folder: Path, dtype: str = "auto") -> torch.nn.Module:
    """Load a model that torch computes: kernels would take its weights over."""
    config = WorkerConfig(model_path=str(folder), device="cpu", dtype=dtype, num_threads=1, cpu_kernels="off")
    return load_model(config, find_kind(config), CpuDevice(config), LoadStage()).model


def pretend_available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(worker.devices.device, "available_memory_bytes", lambda: num_bytes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_is_left_in_the_mapped_file(folder: Path, dtype: str) -> None:
    model = load(folder, dtype)
    assert sum(1 for _ in model.parameters()) > 10
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("options", [{}, {"quantization": "int8", "quantize_head": "int8"}], ids=str)
def test_after_a_start_with_kernels_no_weight_is_left_in_the_mapped_file(
    folder: Path, options: dict[str, str]
) -> None:
    worker, _ = load_worker(folder, **options)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    worker.close()


def test_codes_are_read_again_for_each_layer_and_freed_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded, _ = write_quantized("llama", "int4", tmp_path)
    between_layers: list[int] = []

    def noting(files: list[Path]) -> None:
        gc.collect()
        between_layers.append(sum(each.nbytes for each in gc.get_objects() if is_codes(each)))
        free_behind(files)

    monkeypatch.setattr(weight_life, "free_behind", noting)
    monkeypatch.setattr(weight_life, "once_grown", lambda free: free)  # too small to be worth it
    loaded, facts = load_worker(coded)
    assert len(between_layers) > 1
    assert len(set(between_layers)) == 1  # those of models that other tests have loaded
    assert facts.weight_bytes > 0
    loaded.close()


def is_codes(thing: object) -> bool:
    return type(thing) is torch.Tensor and thing.dtype is torch.uint8 and thing.dim() == 2


def test_weights_that_are_still_in_their_files_take_of_the_caches_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    pretend_available(monkeypatch, 3 * num_bytes)
    loaded, facts = load_worker(folder)
    assert 0 < facts.kv_cache_bytes <= 2 * num_bytes * CPU_SHARE_OF_AVAILABLE
    loaded.close()


def test_a_checkpoint_rewritten_in_place_changes_nothing(folder: Path) -> None:
    model = load(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as stream:
        stream.write(bytes(path.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_weights_stay_one(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model: Any = load(folder)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_weights_are_sized_in_the_dtype_they_will_have(folder: Path) -> None:
    files = find_weights(folder)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert loaded_bytes(files, None) == WeightBytes(total=stored, converted=0)
    assert loaded_bytes(files, "float32") == WeightBytes(total=stored, converted=0)
    assert loaded_bytes(files, "bfloat16") == WeightBytes(total=stored // 2, converted=stored // 2)


def test_codes_are_whole_on_each_device_and_each_rank_converts_all() -> None:
    weights = WeightBytes(total=1000, converted=100, codes=600)
    assert weights.on_one_of(1, 1) == weights
    assert weights.on_one_of(4, 1) == WeightBytes(total=700, converted=400, codes=600)
    assert weights.on_one_of(4, 2) == WeightBytes(total=700, converted=200, codes=600), "on each machine"


def test_weights_larger_than_memory_are_refused_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = loaded_bytes(find_weights(folder), None).total
    pretend_available(monkeypatch, needed - 1)
    monkeypatch.setattr(worker.load.weight_files, "warm_page_cache", None)
    with pytest.raises(StartupError, match=r"the weights take .* this machine has .*available; free some"):
        load(folder)


def test_weights_that_fit_once_converted_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_available(monkeypatch, loaded_bytes(find_weights(folder), "bfloat16").total)
    with pytest.raises(StartupError):
        load(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    assert load(folder).dtype == torch.bfloat16


def headers_of(num_layers: int, *, dtype: str = "BF16", also: tuple[str, ...] = ()) -> list[WeightFile]:
    """Files of a model of the shape of Qwen3-0.6B, as their headers describe them."""
    shapes = {
        **{f"self_attn.{name}_proj.weight": (1024, 1024) for name in ("k", "v")},
        "self_attn.q_proj.weight": (2048, 1024),
        "self_attn.o_proj.weight": (1024, 2048),
        **{f"mlp.{name}_proj.weight": (3072, 1024) for name in ("gate", "up")},
        **{"mlp.down_proj.weight": (1024, 3072), "input_layernorm.weight": (1024,)},
        **{name: (1024, 1024) for name in also},
    }
    whole = {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in shapes.items()}
    whole["model.embed_tokens.weight"] = (151936, 1024)
    tensors = {name: StoredTensor(dtype, shape, 2 * math.prod(shape)) for name, shape in whole.items()}
    return [WeightFile(Path("model.safetensors"), sum(each.num_bytes for each in tensors.values()), tensors)]


def not_taken(files: list[WeightFile], num_bits: float = 4.5, *, rounds_head: bool = False) -> float:
    """Bytes for each number of a layer of `headers_of`, of which there are so many."""
    return bytes_not_taken(files, "bfloat16", num_bits=num_bits, rounds_head=rounds_head) / (15 << 20)


def test_layers_that_are_rounded_one_after_the_other_are_never_all_held_as_they_were() -> None:
    layer = 2 - 4.5 / 8
    assert not_taken(headers_of(101)) - not_taken(headers_of(100)) == pytest.approx(layer, rel=0.01)
    assert not_taken(headers_of(101), 8) - not_taken(headers_of(100), 8) == pytest.approx(1, rel=0.01)
    beside = 100 * layer - not_taken(headers_of(100))
    assert beside > 8, "two layers in float32 at least"
    head_bytes = (not_taken(headers_of(100)) - not_taken(headers_of(100), rounds_head=True)) * (15 << 20)
    assert head_bytes == pytest.approx(2 * 151936 * 1024), "its codes, as they are rounded and packed"


@pytest.mark.parametrize(
    "files",
    [
        headers_of(2),
        headers_of(100, dtype="F16"),
        headers_of(100, also=("self_attn.kv_a_proj_with_mqa.weight",)),
        headers_of(100, also=("mlp.experts.0.up_proj.weight",)),
    ],
    ids=["small", "converted", "other attention", "experts"],
)
def test_layers_that_may_stay_as_they_were_are_counted_whole(files: list[WeightFile]) -> None:
    assert not_taken(files) == 0


@pytest.fixture
def half_is_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Half of the weights' bytes, which fits; these layers are too small to be counted otherwise."""
    total = loaded_bytes(find_weights(folder), None).total
    monkeypatch.setattr(worker.load.weight_files, "bytes_not_taken", lambda *_, **__: total - total // 2)
    return total // 2


def test_a_model_that_fits_once_rounded_is_loaded_and_foreseen(
    folder: Path, half_is_rounded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_available(monkeypatch, half_is_rounded)
    config = WorkerConfig(model_path=str(folder), device="cpu", quantization="int8")
    kind, device = find_kind(config), CpuDevice(config)
    assert weight_bytes(config, kind, device) == half_is_rounded
    load_model(config, kind, device, LoadStage())
    for plain in (replace(config, quantization="none"), replace(config, num_ranks=2)):
        with pytest.raises(StartupError, match="the weights take"):
            weight_bytes(plain, kind, device)


def test_layers_that_stayed_as_they_were_are_refused_if_they_do_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = loaded_bytes(find_weights(folder), None).total
    monkeypatch.setattr(worker.load.weight_files, "bytes_not_taken", lambda *_, **__: total - 1000)
    pretend_available(monkeypatch, 1000)
    with pytest.raises(StartupError, match=r"the weights take .* available; free some"):
        load_worker(folder, quantization="int8", num_blocks=20)


def test_files_that_do_not_fit_beside_the_weights_are_not_read_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[Any]] = []
    monkeypatch.setattr(
        worker.load.weight_files, "warm_page_cache", lambda files, on_read: read.append(files)
    )
    (file,) = find_weights(folder)
    needed = loaded_bytes([file], None).total
    pretend_available(monkeypatch, needed + file.num_bytes - 1)
    load(folder)
    assert read == []
    pretend_available(monkeypatch, needed + file.num_bytes)
    load(folder)
    assert read == [[file]]


class TooLarge:
    """In place of the model class: building it asks for more memory than any machine has."""

    def __init__(self, error: type[Exception] | None) -> None:
        self.error = error

    def from_pretrained(self, *args: object, **options: object) -> None:
        if self.error:
            raise self.error("out of memory")
        torch.empty(1 << 55)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, None])
def test_memory_that_runs_out_while_building_is_a_refusal_with_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    monkeypatch.setattr(worker.load.build, "generating_class", lambda _: TooLarge(error))
    with pytest.raises(StartupError, match=r"memory of cpu .* ran out while \d+\.\d\d GiB .*; free some"):
        load(folder)


def test_memory_that_runs_out_on_the_way_to_the_device_is_a_refusal_with_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(weight_life.WeightLife, "move", run_out)
    with pytest.raises(StartupError, match=r"ran out while \d+\.\d\d GiB of weights"):
        load(folder)


def test_memory_that_runs_out_while_weights_are_packed_is_a_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_REGION_BYTES", 1 << 50)
    monkeypatch.setattr(large_pages.WEIGHTS, "_open", None)
    with pytest.raises(StartupError, match="ran out while kernels took over the weights"):
        load_worker(folder)


def test_an_error_that_is_not_about_memory_keeps_its_own_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.load.build, "generating_class", lambda _: TooLarge(RuntimeError))
    with pytest.raises(StartupError, match="transformers cannot load"):
        load(folder)


def test_the_kv_cache_is_sized_after_the_weights_took_their_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory is asked for twice: before the weights, and when none of them is a mapped page any more."""
    mapped: list[bool] = []

    def available() -> int:
        mapped.append(str(folder) in Path("/proc/self/maps").read_text())
        return 1 << 30

    monkeypatch.setattr(worker.devices.device, "available_memory_bytes", available)
    load_worker(folder, cpu_kernels="off")
    assert len(mapped) == 2
    assert not any(mapped)


def test_weights_that_were_copied_for_want_of_kernels_are_not_taken_from_the_kv_cache_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise CannotBuild("there is no C++ compiler")

    monkeypatch.setattr(cpu_kernel_choice, "find_library", lambda **_: None)
    monkeypatch.setattr(cpu_kernel_choice, "build_library", refuse)
    pretend_available(monkeypatch, 8 << 20)
    found, asked_for = (load_worker(folder, cpu_kernels=each)[1] for each in ("auto", "off"))
    assert found.num_blocks == asked_for.num_blocks


def test_caches_of_engines_that_start_at_once_leave_room_for_the_weights_of_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, alone = load_worker(folder)
    pretend_available(monkeypatch, 3 * alone.weight_bytes)
    _, first = load_worker(folder, num_engines=2)
    most_bytes = CPU_SHARE_OF_AVAILABLE * alone.weight_bytes / 2
    assert 0.8 * most_bytes < first.kv_cache_bytes <= most_bytes
    pretend_available(monkeypatch, 2 * alone.weight_bytes)
    with pytest.raises(StartupError, match=r"memory left for the KV cache \(0\.00 MiB\)"):
        load_worker(folder, num_engines=2)
    _, replacement = load_worker(folder, num_engines=2, is_replacement=True)
    assert replacement.num_blocks == first.num_blocks


def test_what_no_kernel_takes_is_counted_while_it_is_copied(folder: Path) -> None:
    config = WorkerConfig(model_path=str(folder), device="cpu", num_threads=1)
    seen: list[LoadProgress] = []

    class Watched(LoadStage):
        def count(self, num_bytes: int) -> None:
            super().count(num_bytes)
            seen.append(self.progress(0.0))

    stage = Watched()
    device = CpuDevice(config)
    start_generator(config, load_model(config, find_kind(config), device, stage), device, stage)
    copied = [each for each in seen if each.stage == "copying weights"]
    assert 0 < copied[-1].done_bytes == copied[-1].total_bytes
    assert stage.progress(0.0).stage == "warming up"


def test_a_wrong_generation_config_is_refused_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.load.weight_files, "warm_page_cache", None)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": "0.7"}')
    with pytest.raises(StartupError, match=r"generation_config\.json has temperature '0\.7'"):
        load(folder)


def test_an_end_token_beyond_the_vocabulary_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [334, 99999]}')
    with pytest.raises(StartupError, match=r"generation_config\.json has eos_token_id 99999"):
        load(folder)


def test_what_the_files_say_reaches_the_facts(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "eos_token_id": [333, 334]}'
    )
    facts = load_worker(folder)[1]
    assert facts.default_sampling == {"temperature": 0.6}
    assert facts.eos_token_ids == (333, 334)


def test_bytes_are_counted_while_the_weights_are_read_and_copied(folder: Path) -> None:
    config = WorkerConfig(model_path=str(folder), device="cpu", num_threads=1, cpu_kernels="off")
    seen: list[LoadProgress] = []

    class Watched(LoadStage):
        def count(self, num_bytes: int) -> None:
            super().count(num_bytes)
            seen.append(self.progress(0.0))

    loaded = load_model(config, find_kind(config), CpuDevice(config), Watched())
    read = [each for each in seen if each.stage == "reading weights"]
    copied = [each for each in seen if each.stage == "copying weights"]
    assert read[-1].done_bytes == read[-1].total_bytes == (folder / "model.safetensors").stat().st_size
    assert copied[-1].done_bytes == copied[-1].total_bytes >= loaded.weight_bytes
    assert seen == [*read, *copied]
