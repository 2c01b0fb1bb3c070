"""Refusals at load and their reasons; values read from a checkpoint's JSON files."""

import codecs
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

import worker.load.build
from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.checkpoint.checkpoint_files import find_weights
from worker.load.model_kind import dtype_name, find_kind, model_config_of
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError


@pytest.fixture
def folder(checkpoints: MakeCheckpoint, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be broken."""
    return Path(shutil.copytree(checkpoints("llama"), tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def refusal(folder: Path | str, **options: object) -> str:
    with pytest.raises(StartupError) as caught:
        load_worker(folder, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value), "one line, for the log and the terminal"
    assert caught.value.fix
    return str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    assert "is a file" in refusal(folder / "model.safetensors")


def test_a_hub_name_that_was_never_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "local hub cache" in refusal("nobody/no-such-model")


def test_a_hub_name_in_the_local_cache_is_loaded_from_there(
    checkpoints: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--tiny"
    shutil.copytree(checkpoints("llama"), repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert load_worker(Path("owner/tiny"))[1].model_type == "llama"


def test_a_folder_without_config_json(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_a_broken_config_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    assert "cannot be read" in refusal(folder)


@pytest.mark.parametrize(("key", "value"), [("eos_token_id", "</s>"), ("hidden_size", "64")])
def test_a_config_json_with_a_value_of_the_wrong_type(folder: Path, key: str, value: str) -> None:
    edit_json(folder / "config.json", **{key: value})
    message = refusal(folder)
    assert "config.json is refused" in message
    assert key in message


def test_an_unknown_model_type_is_refused_even_with_code_of_its_own(folder: Path) -> None:
    code = folder / "modeling_mine.py"
    code.write_text(f"open({str(folder / 'was_run')!r}, 'w')\n")
    edit_json(
        folder / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}
    )
    assert "never run" in refusal(folder)
    assert not (folder / "was_run").exists()


def test_a_known_model_type_is_loaded_without_the_code_beside_it(folder: Path) -> None:
    (folder / "modeling_mine.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')\n")
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert load_worker(folder)[1].model_type == "llama"
    assert not (folder / "was_run").exists()


def test_a_model_that_generates_no_text(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="vit")
    assert "do not generate text" in refusal(folder)


@pytest.mark.parametrize("name", ["auto", "int8"])
def test_a_dtype_that_is_none(folder: Path, name: str) -> None:
    edit_json(folder / "config.json", dtype=None, torch_dtype=name)
    assert f"config.json has dtype {name}; set another" in refusal(folder, dtype="auto")


def test_words_that_transformers_has_no_longer_are_read(folder: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 8.0}
    scaling = {**factors, "original_max_position_embeddings": 64}
    for said, dtype in (("longrope", "float16"), ("su", "half"), ("su", "torch.float16")):
        rope = {"rope_parameters": None, "rope_scaling": {"type": said, **scaling}}
        edit_json(folder / "config.json", dtype=None, torch_dtype=dtype, **rope)
        kind = find_kind(WorkerConfig(model_path=str(folder)))
        assert dtype_name("auto", kind.checkpoint_config) == "float16"
        config = model_config_of(kind, find_weights(folder))
        assert (config.dtype, config.rope_parameters["rope_type"]) == (torch.float16, "longrope")
    assert load_worker(folder, dtype="auto")[1].dtype == "float16"


@pytest.mark.parametrize("kind", ["ntk", "xdrope", None])
def test_rotary_embeddings_that_transformers_does_not_know(folder: Path, kind: str | None) -> None:
    edit_json(folder / "config.json", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})
    said = f"config.json has rotary embeddings of type {kind}; take a checkpoint with default, axial, linear"
    assert said in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_begins_with_a_mark_of_its_order_of_bytes(folder: Path, name: str) -> None:
    """Some editors put one in."""
    (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    load_worker(folder)


def test_pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "can run code" in refusal(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "lacks model.safetensors" in refusal(folder)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:size])
    assert "model.safetensors" in refusal(folder)


def test_a_header_that_is_no_json(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"x" * 12
    path.write_bytes(content)
    assert "cannot be read" in refusal(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_that_leads_out_of_its_folder(folder: Path, name: str) -> None:
    edit_json(folder / "model.safetensors.index.json", weight_map={"a": name})
    assert "outside of its folder" in refusal(folder)


def test_a_missing_shard(folder: Path) -> None:
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "lacks model-00002-of-00002.safetensors" in refusal(folder)


def test_weights_that_lack_a_parameter(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=80)
    said = refusal(folder)
    assert "model.layers.0.mlp.down_proj.weight is [64, 96] in the files, and [64, 80] by config.json" in said
    assert "(9 such tensors)" in said


def test_experts_of_another_shape(checkpoints: MakeCheckpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints("qwen3_moe"), tmp_path / "experts"))
    edit_json(folder / "config.json", moe_intermediate_size=32)
    assert "model.layers.0.mlp.experts.down_proj is [4, 64, 48] in the files" in refusal(folder)


def test_an_output_layer_that_is_neither_stored_nor_tied(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", tie_word_embeddings=False)
    said = refusal(folder)
    assert "has no weights of the output layer (lm_head.weight)" in said
    assert "tie_word_embeddings" in said
    assert load_worker(folder, config_overrides={"tie_word_embeddings": True})


def test_a_shard_that_a_stale_index_does_not_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    for shard, some in (("first", names[::2]), ("second", names[1::2])):
        save_file({name: weights[name] for name in some}, folder / f"{shard}.safetensors", {"format": "pt"})
    weight_map = dict.fromkeys(names[::2], "first.safetensors")
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    assert "has no metadata" in refusal(folder)
    edit_json(folder / "model.safetensors.index.json", metadata={})
    assert "correct model.safetensors.index.json, which does not name second.safetensors" in refusal(folder)


def test_an_adapter_beside_a_model(folder: Path) -> None:
    edit_json(folder / "adapter_config.json", peft_type="LORA", base_model_name_or_path="elsewhere/base")
    assert "adapter_config.json next to a model's files" in refusal(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_state_besides_keys_and_values_shows_in_the_logits(
    checkpoints: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
) -> None:
    monkeypatch.setattr(worker.load.recurrent_functions, "states_of_step", lambda: None)
    _, facts = load_worker(checkpoints("lfm2"), dtype=dtype)
    assert "keeps state besides keys and values" in caplog.text
    assert not facts.is_paged


@pytest.mark.parametrize(("family", "expected"), [("llama", 256), ("mixtral", 0)])
def test_a_cpu_tells_how_many_tokens_saturate_it_unless_experts_share_them(
    checkpoints: MakeCheckpoint, family: str, expected: int
) -> None:
    assert load_worker(checkpoints(family))[1].saturating_tokens == expected


def test_an_unknown_dtype_and_an_unknown_device(folder: Path) -> None:
    assert "unknown dtype" in refusal(folder, dtype="int3")
    assert "unknown device" in refusal(folder, device="abacus")
    assert "not there" in refusal(folder, device="cuda:63")


def test_a_window_longer_than_the_models_own(folder: Path) -> None:
    assert "--max-model-len 512" in refusal(folder, max_model_len=513)


def test_yarn_stretches_the_window(folder: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    edit_json(folder / "config.json", rope_parameters=rope)
    assert load_worker(folder)[1].max_model_len == 2048
    edit_json(folder / "config.json", rope_parameters={**rope, "factor": None})
    assert load_worker(folder)[1].max_model_len == 512


def test_a_cache_too_small_for_one_sequence_says_what_would_fit(folder: Path) -> None:
    message = refusal(folder, max_model_len=256, num_blocks=10)
    assert "--max-model-len 40 or less" in message


def test_auto_takes_the_dtype_of_the_checkpoint(folder: Path) -> None:
    assert load_worker(folder, dtype="auto")[1].dtype == "float32"
    edit_json(folder / "config.json", dtype="bfloat16")
    assert load_worker(folder, dtype="auto")[1].dtype == "bfloat16"
    assert dtype_name("auto", {"text_config": {"dtype": "bfloat16"}}) == "bfloat16"
    assert dtype_name("auto", {"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}) == "float16"
