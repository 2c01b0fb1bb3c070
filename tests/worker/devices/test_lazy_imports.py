"""Imports that are put off: absent at first, and whole as soon as something of them is used."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.night

HEAVY = (
    *("torch._dynamo.utils", "torch.distributed.tensor", "torch._refs", "torch._prims", "sympy"),
    "accelerate",  # tests have it, for the sake of others
)
SHAPED_IN_PYTHON = "cdist(torch.ones(2, 3, device='meta'), torch.ones(4, 3, device='meta'))"
"""An operator whose result has no shape by torch's rules in C++."""


def in_a_process(code: str) -> Any:
    """The JSON on the last line of what a fresh interpreter prints."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tiny_model: Path) -> dict[str, Any]:
    return in_a_process(f"""
        import json, sys
        from worker.devices.lazy_imports import import_torch

        import_torch("cpu")
        import torch
        from worker.worker import Worker
        from worker.worker_config import WorkerConfig

        folder = {str(tiny_model)!r}
        config = WorkerConfig(model_path=folder, device="cpu", kv_cache_bytes=1 << 20, num_threads=1)
        facts = Worker(config).load(lambda progress: None)
        after_load = [name for name in {HEAVY} if name in sys.modules]
        import transformers
        from transformers import conversion_mapping
        renaming, *_ = conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
        pattern = renaming.compiled_sources
        renamed = [type(pattern).__name__, pattern.search("a.block_sparse_moe.b")[0]]
        drawn = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
        gathered = type(transformers).__name__
        whole = issubclass(transformers.BertModel, transformers.PreTrainedModel)
        from worker.load.build import from_pretrained
        class Model:
            def from_pretrained(folder, **options):
                return list(torch.{SHAPED_IN_PYTHON}.shape)
        shape = from_pretrained(Model, None)
        drawn_then = torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
        is_marked = torch._dynamo.assume_constant_result(len) is len
        before = "torch._dynamo.utils" in sys.modules
        compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist()
        program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        print(json.dumps({{"facts": facts.model_type, "after_load": after_load, "is_marked": is_marked,
                           "gathered": gathered, "whole": whole, "shape": shape,
                           "renamed": renamed, "drawn": [drawn, drawn_then],
                           "before": before, "compiled": compiled, "program": type(program).__name__}}))
    """)


@pytest.mark.night
def test_a_model_is_loaded_without_them(seen: dict[str, Any]) -> None:
    assert seen["facts"] == "llama"
    assert seen["after_load"] == []


def test_each_is_the_real_one_once_something_of_it_is_used(seen: dict[str, Any]) -> None:
    assert seen["is_marked"]
    assert not seen["before"], "a mark for the compiler is no use of it"
    assert seen["compiled"] == [2.0, 2.0]
    assert seen["program"] == "ExportedProgram"


def test_the_package_is_whole_once_a_name_of_it_is_used(seen: dict[str, Any]) -> None:
    assert seen["gathered"] == "_LazyModule", "it was not put off while a model was loaded"
    assert seen["whole"]


def test_a_model_that_needs_the_shapes_in_python_is_built_with_them(seen: dict[str, Any]) -> None:
    assert seen["shape"] == [2, 4]


def test_the_names_of_a_family_that_was_not_loaded_are_found(seen: dict[str, Any]) -> None:
    """Its patterns are compiled only then."""
    assert seen["renamed"] == ["_Pattern", ".block_sparse_moe."]


def test_random_numbers_are_the_same_before_and_after_torchs_rules_are_loaded(seen: dict[str, Any]) -> None:
    drawn, drawn_then = seen["drawn"]
    assert len(set(drawn)) == 2
    assert drawn == drawn_then


def test_nothing_is_put_off_where_there_may_be_a_gpu() -> None:
    assert in_a_process("""
        import json, sys
        from worker.devices.lazy_imports import import_torch

        import_torch("cuda")
        print(json.dumps("torch" not in sys.modules and "torch.export" not in sys.modules))
    """)


@pytest.mark.night
def test_a_release_that_wants_the_shapes_in_python_at_once_is_imported_with_them() -> None:
    assert in_a_process("""
        import json
        from worker.devices import lazy_imports

        lazy_imports._SHAPES_ARE_LAZY_IN = frozenset()
        lazy_imports.import_torch("cpu")
        import torch
        print(json.dumps(torch.zeros(2, device="meta").sum().device.type == "meta"))
    """)
