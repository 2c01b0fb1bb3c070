"""Each family's metadata and tensors are read whole, or refused by the name of what is not known."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.gguf_checkpoints import FAMILIES, write_gguf
from tests.tiers import by_day
from tests.worker.checkpoint.gguf.test_folder import in_parts
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.gguf.config import config_of
from worker.checkpoint.gguf.file import GgufFile, GgufTensor, GgufType, read_gguf
from worker.checkpoint.gguf.folder import folder_of
from worker.checkpoint.gguf.weights import find_weights_of
from worker.load.build import build_model
from worker.load.model_kind import find_kind
from worker.worker_config import WorkerConfig
from worker.worker_errors import StartupError

DAY = ("qwen3_5_text", "gemma4_text", "gpt_oss")
"""Families with most settings of their own."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    found: dict[str, tuple[Path, Path]] = {}

    def write(family: str) -> tuple[Path, Path]:
        if family not in found:
            folder = tmp_path_factory.mktemp(family)
            found[family] = write_gguf(family, {"": "F32"}, folder, is_tied=False)
        return found[family]

    return write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def with_metadata(file: GgufFile, **changed: Any) -> GgufFile:
    architecture = file.architecture
    return replace(
        file, metadata=file.metadata | {f"{architecture}.{key}": value for key, value in changed.items()}
    )


def refusal(file: GgufFile) -> str:
    """The line of a refusal; empty where there is none."""
    try:
        config_of(file)
    except StartupError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("family", by_day(FAMILIES, DAY))
def test_a_key_that_is_missing_has_a_default_or_is_refused_by_a_name(written, family):
    file = read_gguf(written(family)[0])
    prefix, num_named = f"{file.architecture}.", 0
    for key in [key for key in file.metadata if key.startswith(prefix)]:
        said = refusal(
            replace(file, metadata={name: value for name, value in file.metadata.items() if name != key})
        )
        # Without a key another one may be the first to be wrong, or a tensor.
        assert not said or prefix in said or "is no tensor that is known of the family" in said
        num_named += key in said
    assert num_named >= 5


@pytest.mark.parametrize("family", by_day(FAMILIES, DAY))
def test_a_tensor_that_no_family_has_is_refused_by_its_name(written, family):
    file = read_gguf(written(family)[0])
    one = next(iter(file.tensors.values()))
    for name in ("blk.0.ffn_extra.weight", "blk.99.attn_q.weight", "v.blk.0.attn_q.weight", "blk.0.attn_k"):
        with pytest.raises(StartupError, match=f"^{name} is no tensor that is known of the family"):
            list(find_weights_of(replace(file, tensors={**file.tensors, name: one})))


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_passed_over(written, family):
    file = read_gguf(written(family)[0])
    count = file.num_layers
    one = GgufTensor(GgufType.F32, (256,), file.path, 0, 1024)
    names = [f"blk.{count}.{each}.weight" for each in ("attn_q", "nextn.eh_proj", "nextn.embed_tokens")]
    longer = with_metadata(file, block_count=count + 1, nextn_predict_layers=1)
    longer = replace(longer, tensors={**file.tensors, **dict.fromkeys(names, one)})
    assert {weight.name for weight in find_weights_of(longer)} == {
        weight.name for weight in find_weights_of(file)
    }
    assert config_of(longer) == config_of(file)


@pytest.mark.parametrize(
    ("architecture", "kind", "said"),
    [
        ("clip", "mmproj", r"holds no language model \(mmproj\); name the file of the language model"),
        ("clip", None, r"holds no language model \(clip\)"),
        ("llama", "adapter", r"holds an adapter \(adapter\)"),
    ],
)
def test_files_of_other_things_are_refused_in_true_words(written, architecture, kind, said):
    file = read_gguf(written("llama")[0])
    metadata = file.metadata | {"general.architecture": architecture, "general.type": kind}
    with pytest.raises(StartupError, match=said):
        config_of(replace(file, metadata=metadata))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("glm4_moe", "expert_gating_func", 1),
        ("deepseek_v2", "expert_gating_func", 3),
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0]),
        ("gemma4_text", "rope.dimension_count_swa", 32),
        ("gpt_oss", "rope.scaling.yarn_attn_factor", 1.2),
        ("phi3_longrope", "rope.scaling.attn_factor", 3.0),
        ("qwen3_5_text", "attention.recurrent_layers", [True]),
        ("deepseek_v2", "expert_weights_norm", True),
        ("deepseek_v3", "expert_gating_func", 1),
        ("deepseek_v3", "attention.temperature_scale", 0.1),
        ("llama", "attention.temperature_scale", 0.1),
        ("qwen3", "pooling_type", 3),
        ("llama", "attention.causal", False),
        ("llama", "attention.scale", 0.5),
        ("qwen2", "logit_scale", 0.5),
        ("qwen2", "final_logit_softcapping", 30.0),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("llama", "attention.clamp_kqv", 8.0),
        ("llama", "attention.sliding_window", 16),
        ("ministral3", "rope.scaling.type", "none"),
        ("glm4_moe", "nextn_predict_layers", 64),
    ],
)
def test_a_setting_that_the_family_does_not_have_here_is_refused(written, family, key, value):
    file = read_gguf(written(family)[0])
    with pytest.raises(StartupError, match=f"{FAMILIES[family]}.{key}"):
        config_of(with_metadata(file, **{key: value}))


def test_a_setting_that_changes_no_result_is_no_reason_to_refuse(written):
    file = read_gguf(written("llama")[0])
    neutral = {"pooling_type": 0, "logit_scale": 0.0, "attention.causal": True, "attention.clamp_kqv": 0.0}
    window = file.number("context_length")
    assert config_of(with_metadata(file, **neutral, **{"attention.sliding_window": window})) == config_of(
        file
    )


def test_embeddings_are_sent_to_a_format_that_has_them(written):
    file = read_gguf(written("qwen3")[0])
    assert "serve embeddings from the model's safetensors" in refusal(with_metadata(file, pooling_type=3))


def test_routers_that_correct_their_choice_are_sigmoid_where_a_file_does_not_say(written):
    file = read_gguf(written("deepseek_v3")[0])
    assert config_of(with_metadata(file, expert_gating_func=0)) == config_of(file)
    metadata = {key: value for key, value in file.metadata.items() if "gating_func" not in key}
    assert config_of(replace(file, metadata=metadata)) == config_of(file)


def test_factors_of_long_angles_are_those_of_the_plain_checkpoint(written):
    path, plain = written("phi3_longrope")
    found, expected = config_of(read_gguf(path)), json.loads((plain / "config.json").read_text())
    for key in ("long_factor", "short_factor"):
        assert found["rope_parameters"][key] == pytest.approx(expected["rope_parameters"][key])
    assert found["original_max_position_embeddings"] == expected["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("family", "name"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_the_text_of_a_model_that_sees_is_that_of_its_family_without_eyes(written, family, name):
    file = read_gguf(written(family)[0])
    metadata = {key.replace(f"{FAMILIES[family]}.", f"{name}."): each for key, each in file.metadata.items()}
    metadata |= {"general.architecture": name, f"{name}.rope.dimension_sections": [24, 20, 20, 0]}
    seeing = replace(file, metadata=metadata | {f"{name}.n_deepstack_layers": 3})
    assert config_of(seeing) == config_of(file)
    assert {each.name for each in find_weights_of(seeing)} == {each.name for each in find_weights_of(file)}


def test_yarn_stretches_the_files_own_context_where_it_names_no_other(written):
    file = read_gguf(written("qwen3")[0])
    yarn = with_metadata(file, **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    rope = config_of(yarn)["rope_parameters"]
    assert rope["original_max_position_embeddings"] == file.number("context_length")


def test_a_mistral_3_without_a_scale_of_queries_is_a_llama(written):
    file = read_gguf(written("ministral3")[0])
    metadata = {
        key: value
        for key, value in file.metadata.items()
        if "temperature_scale" not in key and "scaling" not in key
    }
    assert config_of(replace(file, metadata=metadata))["model_type"] == "llama"


@pytest.mark.parametrize("family", by_day(("qwen3_5_text", "qwen3_5_moe_text", "lfm2"), ("qwen3_5_text",)))
def test_transformers_own_reader_finds_the_same_numbers(written, family):
    path, _ = written(family)
    expected = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    folder = folder_of(path)
    kind = find_kind(WorkerConfig(model_path=str(folder), dtype="float32", device="cpu"))
    model, _ = build_model(kind, "float32", find_weights(folder))
    found = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=1e-6), name


def test_parts_of_one_weight_may_lie_in_several_files(written, tmp_path):
    path, _ = written("gpt_oss")
    paths = in_parts(path, tmp_path)
    whole, divided = (find_weights(folder_of(each)) for each in (path, paths[0]))
    expected = {name: tensor.shape for file in whole for name, tensor in file.tensors.items()}
    assert {name: tensor.shape for file in divided for name, tensor in file.tensors.items()} == expected
    gates = next(
        tensor.gguf.tensors
        for file in divided
        for name, tensor in file.tensors.items()
        if name.endswith("0.mlp.experts.gate_up_proj")
    )
    assert len({each.path for each in gates}) == 2
