"""Adapters in memory: who goes, what a reload is, and that rows keep what they began with."""

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.adapters import write_adapter
from tests.worker.adapters.test_adapted_models import PROMPT, load_with, scores
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import PlanDriver
from worker.adapters.store import AdapterStore
from worker.worker_config import AdapterLimits
from worker.worker_errors import AdapterRefused

TWO = AdapterLimits(max_in_step=2, max_in_memory=2, max_rank=16)


@pytest.fixture
def folders(checkpoints: MakeCheckpoint, tmp_path: Path) -> list[Path]:
    base = checkpoints("llama")
    return [write_adapter(tmp_path / f"f{seed}", base, rank=4, seed=seed) for seed in range(3)]


@pytest.fixture
def driver(checkpoints: MakeCheckpoint) -> PlanDriver:
    return PlanDriver(load_worker(checkpoints("llama"), adapter_limits=TWO)[0], BLOCK_SIZE)


def store_of(driver: PlanDriver) -> AdapterStore:
    found = driver._worker.adapters
    assert found is not None
    return found


def resident_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def test_the_least_recently_used_goes_and_comes_back_from_its_folder(
    driver: PlanDriver, folders: list[Path]
) -> None:
    store = store_of(driver)
    first, second, third = (store.load(each.name, str(each)).identity for each in folders)
    assert store.resident == (second, third), "the third took the place of the first"
    alone = scores(driver, second)
    driver.release_all()
    scores(driver, first)
    driver.release_all()
    assert store.resident == (second, first), "the second was used after the third"
    scores(driver, third)
    driver.release_all()
    assert store.resident == (first, third)
    assert scores(driver, second) == alone


def renamed(adapter: Path, folder: Path, there: str, here: str, **settings: object) -> Path:
    """Copy an adapter with other beginnings of names, and updates of a tower that has layers of its own."""
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {
        name.replace(f"model.{there}layers.", f"model.{here}layers."): each for name, each in tensors.items()
    }
    tower = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj"
    tensors |= {f"{tower}.lora_A.weight": torch.ones(4, 32), f"{tower}.lora_B.weight": torch.ones(32, 4)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def test_an_adapter_of_the_whole_class_with_updates_of_towers_goes_with_the_text_class(
    driver: PlanDriver, folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, store = folders[0], store_of(driver)
    targets = r".*language_model\.layers\..*_proj"
    other = renamed(plain, tmp_path / "other", "model.", "model.language_model.", target_modules=targets)
    with caplog.at_level(logging.INFO):
        identities = [store.load(each.name, str(each)).identity for each in (plain, other)]
    assert "updates of 1 modules change no text and are left out, model.vision_tower" in caplog.text
    found = []
    for identity in identities:
        found.append(scores(driver, identity))
        driver.release_all()
    assert found[0] == found[1]
    scaled = renamed(
        *(plain, tmp_path / "scaled", "model.", "model.language_model."),
        alpha_pattern={r"model\.language_model\..*": 400},
    )
    assert scores(driver, store.load("scaled", str(scaled)).identity) != found[0]


def test_updates_of_towers_alone_update_nothing(
    driver: PlanDriver, folders: list[Path], tmp_path: Path
) -> None:
    tower = renamed(folders[0], tmp_path / "tower", "model.", "model.")
    tensors = load_file(tower / "adapter_model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if "vision" in name},
        tower / "adapter_model.safetensors",
    )
    config = json.loads((tower / "adapter_config.json").read_text())
    (tower / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["fc9"]}))
    with pytest.raises(AdapterRefused, match="it updates no layer"):
        store_of(driver).load("tower", str(tower))


def whole_gemma3(folder: Path, text: Path) -> Path:
    """Write the class with a vision tower, whose text part is a checkpoint of the text class."""
    content = json.loads((text / "config.json").read_text())
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CONFIG_MAPPING["gemma3"](
        text_config=content,
        vision_config={**sizes, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    shutil.copy(text / "tokenizer.json", folder)
    weights = load_file(folder / "model.safetensors")
    for name, each in load_file(text / "model.safetensors").items():
        here = f"language_model.{name}"
        assert here in weights
        weights[here] = each
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_an_adapter_of_the_text_class_goes_with_the_whole_one(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    text = checkpoints("gemma3_text")
    adapter = write_adapter(tmp_path / "adapter", text, rank=4, targets=["q_proj", "v_proj"])
    found = []
    for model in (text, whole_gemma3(tmp_path / "whole", text)):
        worker, (identity,) = load_with(model, adapter)
        found.append(scores(PlanDriver(worker, BLOCK_SIZE), identity))
    assert [set(each) for each in found[0]] == [set(each) for each in found[1]]
    for one, other in zip(*found, strict=True):
        assert all(abs(one[token] - other[token]) < 1e-4 for token in one)


def test_an_adapter_in_use_does_not_go(driver: PlanDriver, folders: list[Path]) -> None:
    store = store_of(driver)
    first, second, third = (store.load(each.name, str(each)).identity for each in folders)
    rows = [driver.add(PROMPT, adapter=each) for each in (first, second)]
    assert not driver.step(dict.fromkeys(rows)).failures
    late = driver.add(PROMPT, adapter=third)
    assert "no place in memory for adapter f2" in str(driver.step({late: None}).failures)
    assert store.resident == (first, second)


def test_a_folder_that_changed_is_never_computed_under_the_old_identity(
    driver: PlanDriver, folders: list[Path], checkpoints: MakeCheckpoint
) -> None:
    store = store_of(driver)
    first, _, _ = (store.load(each.name, str(each)).identity for each in folders)
    write_adapter(folders[0], checkpoints("llama"), rank=4, seed=77)
    late = driver.add(PROMPT, adapter=first)
    assert "the files of adapter f0 changed after it was loaded" in str(driver.step({late: None}).failures)
    shutil.rmtree(folders[0])
    late = driver.add(PROMPT, adapter=first)
    assert "adapter f0 cannot be read again" in str(driver.step({late: None}).failures)


def test_a_reload_is_another_adapter_and_running_rows_keep_the_old_one(
    driver: PlanDriver, folders: list[Path], checkpoints: MakeCheckpoint
) -> None:
    store = store_of(driver)
    old = store.load("tuned", str(folders[0])).identity
    before = scores(driver, old)
    row = driver.add(PROMPT, adapter=old)
    driver.step({row: None})
    write_adapter(folders[0], checkpoints("llama"), rank=4, seed=77)
    new = store.load("tuned", str(folders[0])).identity
    assert new != old
    store.forget(old)
    driver.generate([row], 4)
    assert driver.generated(row) == [max(each, key=each.__getitem__) for each in before]
    driver.release_all()
    assert store.resident == (new,)
    assert scores(driver, new) != before
    late = driver.add(PROMPT, adapter=old)
    assert "not loaded in this form any more" in str(driver.step({late: None}).failures)


def test_the_same_content_under_two_names_is_two_adapters(driver: PlanDriver, folders: list[Path]) -> None:
    store = store_of(driver)
    assert store.load("a", str(folders[0])).identity != store.load("b", str(folders[0])).identity
    assert store.load("a", str(folders[0])).identity == store.load("a", str(folders[0])).identity


@pytest.mark.night
def test_a_thousand_loads_leave_memory_as_it_was(
    driver: PlanDriver, folders: list[Path], checkpoints: MakeCheckpoint
) -> None:
    store = store_of(driver)
    for folder in folders:
        write_adapter(folder, checkpoints("llama"), rank=16, targets=["q_proj", "down_proj"])

    def reload(times: int) -> None:
        for number in range(times):
            folder = folders[number % 3]
            store.forget(store.load(f"name-{number % 7}", str(folder)).identity)

    reload(30)
    before = resident_bytes()
    reload(1000)
    # What one load takes is some 50 KiB.
    assert resident_bytes() - before < 16 << 20
    assert store.resident == ()


def test_without_adapters_a_sequence_that_names_one_is_refused(llama: PlanDriver) -> None:
    row = llama.add(PROMPT, adapter="x@y")
    assert "computed without adapters" in str(llama.step({row: None}).failures)


def test_a_worker_of_many_names_reads_them_at_start(checkpoints: MakeCheckpoint, folders: list[Path]) -> None:
    worker, identities = load_with(checkpoints("llama"), *folders)
    assert worker.adapters is not None
    assert list(worker.adapters.resident) == identities
