"""The options of adapters: what is resolved, and what is refused by name."""

from pathlib import Path

import pytest

from engine.options.adapter_options import AdapterOptions, adapter_config
from engine.options.declaration import OptionError
from worker.worker_config import AdapterFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text("{}")
    return tmp_path / "sql"


def test_both_spellings_of_a_module_and_the_defaults(folder: Path) -> None:
    words = (f"a={folder}", f'{{"name": "b", "path": "{folder}", "base_model_name": "x"}}')
    config = adapter_config(AdapterOptions(lora_modules=words), ("base",))
    assert config.at_start == (AdapterFolder("a", str(folder)), AdapterFolder("b", str(folder)))
    assert (config.limits.max_in_step, config.limits.max_in_memory, config.limits.max_rank) == (4, 8, 64)
    assert adapter_config(AdapterOptions(), ("base",)).limits.max_in_step == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_modules": ("sql",)}, "it is no NAME=FOLDER"),
        ({"lora_modules": ("{}",)}, "it is no NAME=FOLDER"),
        ({"lora_modules": ("a,b={folder}",)}, "it is no NAME=FOLDER"),
        ({"lora_modules": ('{"name": "a", "path": "{folder}", "rank": 3}',)}, "the key 'rank' is not known"),
        ({"lora_modules": ("a=/nowhere",)}, "has no adapter_config.json"),
        ({"lora_modules": ("base={folder}",)}, "the name is taken"),
        ({"lora_modules": ("a={folder}", "a={folder}")}, "the name is taken"),
        ({"lora_modules": ("a={folder}",), "max_loras": 4, "max_cpu_loras": 3}, "all that run are in memory"),
        ({"lora_directory": "/nowhere"}, "there is no such folder"),
        ({"max_loras": 2}, "there are no adapters"),
        ({"max_lora_rank": 2}, "there are no adapters"),
        ({"max_cpu_loras": 2}, "there are no adapters"),
    ],
)
def test_a_mistake_is_named(options: dict, named: str, folder: Path) -> None:
    words = tuple(word.replace("{folder}", str(folder)) for word in options.get("lora_modules", ()))
    with pytest.raises(OptionError, match=named):
        adapter_config(AdapterOptions(**{**options, "lora_modules": words}), ("base",))
