"""Adapters that would be computed otherwise than they were trained: each refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters import write_adapter
from tests.worker.adapters.test_adapted_models import LIMITS, load_with
from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.adapters.store import AdapterStore
from worker.worker_config import AdapterLimits
from worker.worker_errors import AdapterRefused, StartupError

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def store(checkpoints: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> AdapterStore:
    adapter = write_adapter(tmp_path_factory.mktemp("good") / "good", checkpoints("llama"))
    found = load_with(checkpoints("llama"), adapter, cpu_kernels="off")[0].adapters
    assert found is not None
    return found


def refusal(store: AdapterStore, folder: Path) -> str:
    with pytest.raises(AdapterRefused) as raised:
        store.load("bad", str(folder))
    assert not [each for each in store.resident if each.startswith("bad@")]
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters is neither a list"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is set"),
        ({"some_new_method": {"x": 1}}, "some_new_method is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
        ({"r": 0}, "no rank"),
        ({"lora_alpha": "16"}, "no number"),
        ({"target_modules": r"(?!x).*q_proj"}, "needs look-around"),
        ({"target_modules": ["a b"]}, "no name of a module"),
        ({"rank_pattern": {"q_proj": 4}}, "has tensors of rank 8 and 8, and adapter_config.json says 4"),
        ({"target_modules": ["q_proj", "k_proj"]}, "model.layers.0.self_attn.k_proj is a target"),
    ],
)
def test_a_setting_that_is_not_computed_is_named(
    config: dict[str, Any], named: str, store: AdapterStore, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    settings = {"target_modules": ["q_proj"]} | config
    write_adapter(tmp_path, base, targets=["q_proj"])
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(written | settings))
    assert named in refusal(store, tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{Q}.lora_B.weight": None}, f"tensor {Q}.lora_B.weight is missing"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(64)}, "DoRA"),
        ({"base_model.model.lm_head.weight": torch.ones(2, 2)}, "lm_head.weight is neither"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(8, 2)},
            "update of an embedding",
        ),
        ({f"{Q}.lora_A.weight": torch.ones(8, 32)}, "are for 32 inputs and 64 outputs"),
        ({f"{Q}.lora_A.weight": torch.full((8, 64), torch.nan)}, "not finite"),
        ({f"{Q}.lora_A.weight": torch.ones(8)}, "no matrix of floats"),
        (
            {
                "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(8, 64),
                "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.ones(64, 8),
            },
            "model.layers.9.self_attn.q_proj find no layer: the model has no linear layer of this name",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(8, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(310, 8),
            },
            "lm_head find no layer: updates of the output layer",
        ),
        (
            {
                "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(8, 64),
            },
            "tensor model.layers.0.self_attn.q_proj.lora_A.weight is neither",
        ),
    ],
)
def test_a_tensor_without_its_module_is_named(
    changes: dict[str, Any], named: str, store: AdapterStore, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    write_adapter(tmp_path, checkpoints("llama"), targets=["q_proj"])
    tensors = load_file(tmp_path / "adapter_model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "adapter_model.safetensors",
    )
    assert named in refusal(store, tmp_path)


def test_a_rank_above_the_limit_names_the_option(
    store: AdapterStore, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    write_adapter(tmp_path, checkpoints("llama"), rank=65, targets=["q_proj"])
    assert "has rank 65, and --max-lora-rank allows 64" in refusal(store, tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_named_and_not_waited_for(
    store: AdapterStore, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    write_adapter(tmp_path, checkpoints("llama"))
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    assert "adapter_config.json is no file" in refusal(store, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("adapter_config.json", b"{", "is no JSON"),
        ("adapter_config.json", b"[1]", "no JSON object"),
        ("adapter_config.json", b" " * (1 << 21), "is larger than"),
        ("adapter_model.safetensors", b"\x00" * 64, "is damaged"),
        ("adapter_model.safetensors", None, "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(
    name: str,
    content: bytes | None,
    named: str,
    store: AdapterStore,
    checkpoints: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, checkpoints("llama"))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert f"{name} " in (found := refusal(store, tmp_path))
    assert named in found


def test_pickled_weights_are_refused_as_such(
    store: AdapterStore, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    write_adapter(tmp_path, checkpoints("llama"))
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "a pickle, which can run code" in refusal(store, tmp_path)


def test_a_start_with_an_adapter_that_does_not_fit_is_refused_with_its_name(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "dora", checkpoints("llama"), use_dora=True)
    with pytest.raises(StartupError, match=r"adapter dora in .*: use_dora is set.*--lora-modules"):
        load_with(checkpoints("llama"), adapter, cpu_kernels="off")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"task": "embed"}, "made to embed"),
    ],
)
def test_where_no_adapters_are_computed_the_start_says_so(
    options: dict[str, object], named: str, checkpoints: MakeCheckpoint
) -> None:
    with pytest.raises(StartupError, match=named):
        load_worker(checkpoints("llama"), adapter_limits=LIMITS, **options)


def test_more_adapters_than_memory_holds_are_refused_at_start(checkpoints: MakeCheckpoint) -> None:
    limits = AdapterLimits(max_in_step=1, max_in_memory=10**9, max_rank=512)
    with pytest.raises(StartupError, match=r"1000000000 adapters of rank 512 take up to .*--max-cpu-loras"):
        load_worker(checkpoints("llama"), adapter_limits=limits, adapters=(), cpu_kernels="off")
