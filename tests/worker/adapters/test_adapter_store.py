"""Adapters in memory: who goes, what a reload is, and that rows keep what they began with."""

import os
import shutil
from pathlib import Path

import pytest

from tests.adapters import write_adapter
from tests.worker.adapters.test_adapted_models import PROMPT, load_with, scores
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.plan_driver import PlanDriver
from worker.adapters.store import AdapterStore
from worker.worker_config import AdapterLimits

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
