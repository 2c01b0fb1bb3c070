"""Tensors of a checkpoint are read as they are meant, or end the start in a line that names one of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.families import MATRIX
from tests.quantized_checkpoints import FORMATS, PLAIN_MODULES, Random, stack_experts, write_quantized
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.family_formats import build
from tests.worker.family_trial import tiny_config
from tests.worker.plan_driver import PlanDriver
from tests.worker.transformers_generate import NUM_TOKENS, expected, greedy
from worker.checkpoint.checkpoint_files import find_weights, loaded_bytes
from worker.load.cache_scales import read_cache_scales
from worker.worker_errors import StartupError

LAYER = "model.layers.0"
PROMPT = tuple(range(20, 34))
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture
def folder(checkpoints: MakeCheckpoint, tmp_path: Path) -> Path:
    return copied(checkpoints("llama"), tmp_path / "changed")


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_quantized("llama", "int4", tmp_path_factory.mktemp("int4"))


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized("llama", "gptq", tmp_path_factory.mktemp("gptq"))[0]


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    save_file(
        {key: each.contiguous().clone() for key, each in tensors.items()}, folder / name, {"format": "pt"}
    )


def store_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    place = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(names)}
    for shard in set(place.values()):
        store(folder, {name: tensors[name] for name in names if place[name] == shard}, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def add(folder: Path, **tensors: Tensor) -> None:
    store(folder, stored(folder) | tensors)


def refusal(folder: Path) -> str:
    with pytest.raises(StartupError) as refused:
        load_worker(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def generated(folder: Path, **options: object) -> list[int]:
    driver = PlanDriver(load_worker(folder, **options)[0], BLOCK_SIZE)
    sequence = driver.add(list(PROMPT))
    driver.generate([sequence], NUM_TOKENS)
    return driver.generated(sequence)


def change_quantization(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def round_to_codes(folder: Path, plain: Path, dtype: torch.dtype) -> None:
    """Put codes with one scale for each layer's weight into a folder, and their numbers into another."""
    codes, numbers = stored(folder), stored(folder)
    for name, tensor in stored(folder).items():
        if name.startswith(LAYER) and name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 127
            codes[name] = (tensor / scale).to(dtype)
            numbers[name] = codes[name].float() * scale
            codes[f"{name}_scale"] = scale
            codes[name.replace("weight", "input_scale")] = torch.tensor(0.01)
    store(folder, codes)
    store(plain, numbers)


def write_sidecar(folder: Path, algorithm: str | None) -> None:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))


def test_float8_of_modelopt_is_read_by_its_own_file(folder: Path, tmp_path: Path) -> None:
    plain = copied(folder, tmp_path / "plain")
    round_to_codes(folder, plain, torch.float8_e4m3fn)
    add(folder, **{f"{LAYER}.self_attn.k_proj.k_scale": torch.tensor(0.5)})
    write_sidecar(folder, "FP8")
    assert generated(folder) == expected(plain, PROMPT)


def test_float8_of_modelopt_is_read_by_config_json(folder: Path, tmp_path: Path) -> None:
    plain = copied(folder, tmp_path / "plain")
    round_to_codes(folder, plain, torch.float8_e4m3fn)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert generated(folder) == expected(plain, PROMPT)


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
    ],
)
def test_plain_weights_are_served_whatever_a_config_says(
    folder: Path, checkpoints: MakeCheckpoint, said: dict[str, Any]
) -> None:
    """Merges of adapters into models of 4 bits leave such files, and scales of keys and values alone."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    add(folder, **{f"{LAYER}.self_attn.k_scale": torch.tensor(0.5)})
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)


def test_lists_of_modules_that_are_wrong_or_of_other_names_change_nothing(
    int4: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(int4[0], tmp_path / "lists")
    lists = {"targets": ["re:.*language_model.*", "Embedding"]}
    for ignored in ([], [f"{LAYER}.self_attn.q_proj", "lm_head"], ["model.language_model.lm_head", "re:.*"]):
        change_quantization(
            folder,
            lambda found, ignored=ignored: {
                **found,
                "ignore": ignored,
                "config_groups": {"group_0": found["config_groups"]["group_0"] | lists},
            },
        )
        assert generated(folder) == expected(int4[1], PROMPT)


def test_modelopts_other_ways_are_refused_by_name(folder: Path) -> None:
    write_sidecar(folder, "W4A8_AWQ")
    assert "modelopt W4A8_AWQ" in refusal(folder)


def test_a_file_of_modelopt_about_keys_and_values_alone_leaves_weights_plain(
    folder: Path, checkpoints: MakeCheckpoint
) -> None:
    write_sidecar(folder, None)
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_that_no_config_tells_of_are_never_served_as_weights(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    round_to_codes(folder, copied(folder, tmp_path / "plain"), dtype)
    assert "mlp.down_proj.weight_scale is part of a quantized weight" in refusal(folder)
    store(folder, {name: each for name, each in stored(folder).items() if "scale" not in name})
    assert "mlp.down_proj.weight holds codes" in refusal(folder)


def test_a_quantized_checkpoint_whose_config_is_lost_names_a_tensor_of_it(gptq: Path, tmp_path: Path) -> None:
    folder = copied(gptq, tmp_path / "lost")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "mlp.down_proj.qweight is part of a quantized weight" in refusal(folder)


def test_codes_without_a_scale_in_a_quantized_checkpoint_are_refused(gptq: Path, tmp_path: Path) -> None:
    folder = copied(gptq, tmp_path / "codes")
    name = "model.layers.1.mlp.down_proj.weight"
    add(folder, **{name: stored(folder)[name].to(FLOAT8)})
    assert f"{name} holds codes" in refusal(folder)


def test_plain_tensors_that_are_no_weight_of_a_module_are_passed_over_beside_packed_ones(
    int4: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(int4[0], tmp_path / "beside")
    names = ("vision_tower.encoder.layers.0.fc1", "model.layers.3.eh_proj", "mtp.layers.0.mlp.up_proj")
    add(folder, **{f"{name}.weight": torch.ones(64, 64) for name in names})
    add(folder, **{f"{LAYER}.self_attn.{part}_scale": torch.tensor([0.02]) for part in "kv"})
    add(folder, **{f"mtp.layers.0.mlp.down_proj.{end}": torch.ones(2) for end in ("weight_packed", "bias")})
    assert generated(folder) == expected(int4[1], PROMPT)


def test_a_quantized_weight_that_no_module_has_is_refused(int4: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(int4[0], tmp_path / "extra")
    add(folder, **{f"{LAYER}.mlp.third_proj.weight_packed": torch.ones(2, dtype=torch.int32)})
    assert "mlp.third_proj.weight_packed is part of a quantized weight" in refusal(folder)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_router_in_codes_is_made_numbers(name: str, tmp_path: Path) -> None:
    folder, plain = write_quantized("qwen3_moe", name, tmp_path)
    codes, numbers = stored(folder), stored(plain)
    for layer in range(2):
        gate = f"model.layers.{layer}.mlp.gate"
        written = FORMATS[name].write(Random(), *codes.pop(f"{gate}.weight").shape)
        codes |= {f"{gate}.{end}": each for end, each in written.tensors.items()}
        numbers[f"{gate}.weight"] = written.numbers_NK
    store(folder, codes)
    store(plain, numbers)
    key = "modules_to_not_convert" if name == "fp8" else "ignore"
    change_quantization(folder, lambda found: {**found, key: [*PLAIN_MODULES, "model.layers.2.mlp.gate"]})
    assert generated(folder) == expected(plain, PROMPT)


def test_an_output_layer_in_codes_is_read_where_config_json_ties_it(tmp_path: Path) -> None:
    folder, plain = write_quantized("llama", "int8", tmp_path)
    written = FORMATS["int8"].write(Random(), *stored(plain)["lm_head.weight"].shape)
    codes = {name: each for name, each in stored(folder).items() if not name.startswith("lm_head.")}
    store(folder, codes | {f"lm_head.{end}": each for end, each in written.tensors.items()})
    store(plain, stored(plain) | {"lm_head.weight": written.numbers_NK})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert generated(folder) == expected(plain, PROMPT)


@pytest.mark.parametrize(("whole", "text", "has_tower"), [(None, True, True), (True, None, False)])
def test_either_part_of_a_configuration_may_say_that_weights_are_tied(
    tmp_path: Path, whole: bool | None, text: bool | None, has_tower: bool
) -> None:
    [family] = [each for each in MATRIX if each.name == "qwen3_5"]
    folder = tmp_path / "tied"
    build(tiny_config(family)).save_pretrained(folder)
    tensors = {name: each for name, each in stored(folder).items() if not name.startswith("lm_head.")}
    store(folder, {name: each for name, each in tensors.items() if has_tower or "visual." not in name})
    config = json.loads((folder / "config.json").read_text())
    for part, said in ((config["text_config"], text), (config, whole)):
        del part["tie_word_embeddings"]
        part |= {} if said is None else {"tie_word_embeddings": said}
    (folder / "config.json").write_text(json.dumps(config))
    found = generated(folder)
    store(folder, stored(folder) | {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"]})
    assert generated(folder) == found


@pytest.mark.parametrize("ends", [("scale_inv", "activation_scale"), ("weight_scale", "input_scale")])
def test_experts_of_codes_may_be_in_one_tensor(
    checkpoints: MakeCheckpoint, tmp_path: Path, ends: tuple[str, str]
) -> None:
    folder = copied(checkpoints("qwen3_moe"), tmp_path / "stacks")
    plain = copied(folder, tmp_path / "plain")
    numbers = stored(plain)
    codes = {name: each for name, each in numbers.items() if ".experts." not in name}
    for layer in range(3):
        codes |= stack_experts(numbers, f"model.layers.{layer}.mlp.experts", ends)
    store(folder, codes)
    store(plain, numbers)
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "fp8" if ends[0] == "scale_inv" else "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    assert generated(folder) == expected(plain, PROMPT)
    num_codes = sum(each.numel() for each in codes.values() if each.dtype is FLOAT8)
    num_scales = sum(each.shape[0] * each.shape[1] for each in codes.values() if each.dtype is FLOAT8)
    assert loaded_bytes(find_weights(folder), "float32").codes == num_codes + 4 * num_scales
    store(folder, codes | {"model.layers.1.mlp.experts.gain": torch.full((4,), 2.0)})
    assert "experts.gain has no place" in refusal(folder)
    del codes["model.layers.1.mlp.experts.down_proj_" + ends[0]]
    store(folder, codes)
    assert "model.layers.1.mlp.experts.down_proj[0].weight_scale" in refusal(folder)


def test_a_family_whose_text_has_no_word_on_tied_weights_is_read(
    checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    text = json.loads((checkpoints("qwen3") / "config.json").read_text())
    del text["tie_word_embeddings"]
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = CONFIG_MAPPING["qwen3_vl"](
        text_config={**text, "model_type": "qwen3_vl_text"},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": []},
    )
    assert not hasattr(config.text_config, "tie_word_embeddings")
    folder, random = tmp_path / "whole", Random()
    torch.manual_seed(5)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    codes = stored(folder)
    for name, module in model.model.language_model.named_modules():
        if name.endswith("_proj"):
            written = FORMATS["int8"].write(random, *module.weight.shape)
            module.weight.data = written.numbers_NK
            key = f"model.language_model.{name}"
            del codes[f"{key}.weight"]
            codes |= {f"{key}.{end}": each for end, each in written.tensors.items()}
    store(folder, codes)
    content = json.loads((folder / "config.json").read_text())
    quantization = FORMATS["int8"].config | {"ignore": ["lm_head", "re:visual.*"]}
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": quantization}))
    shutil.copy(checkpoints("qwen3") / "tokenizer.json", folder)
    assert generated(folder) == greedy(model, PROMPT)


def test_a_kv_cache_of_8_bits_takes_the_scales_of_the_checkpoint(folder: Path) -> None:
    def tokens() -> list[int]:
        return generated(folder, kv_cache_dtype="fp8", cpu_kernels="off")

    measured, layers = tokens(), range(3)
    for key, value in (
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ):
        names = {
            f"model.layers.{layer}.{name}": size
            for layer in layers
            for name, size in ((key, 0.25), (value, 0.5))
        }
        add(folder, **{name: torch.tensor([size]) for name, size in names.items()})
        assert read_cache_scales(find_weights(folder)) == dict.fromkeys(layers, (0.25, 0.5))
    assert measured == tokens()
    add(folder, **{f"{LAYER}.self_attn.{end}": torch.tensor(1e-4) for end in ("v_scale", "v_proj.v_scale")})
    with pytest.raises(StartupError, match="--kv-cache-dtype fp8"):  # nearly all values are cut off
        load_worker(folder, kv_cache_dtype="fp8", cpu_kernels="off")
    add(folder, **{f"{LAYER}.self_attn.k_scale": torch.tensor(float("nan"))})
    with pytest.raises(StartupError, match=r"self_attn.k_scale is nan"):
        load_worker(folder, kv_cache_dtype="fp8", cpu_kernels="off")
    assert load_worker(folder)


def test_a_bias_that_the_configuration_denies_must_be_zero(
    folder: Path, gptq: Path, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    name = f"{LAYER}.self_attn.q_proj.bias"
    add(folder, **{name: torch.zeros(64)})
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)
    quantized = copied(gptq, tmp_path / "biases")
    add(quantized, **{name: torch.zeros(64)})
    assert generated(quantized) == generated(gptq)
    for each in (folder, quantized):
        add(each, **{name: torch.full((64,), 0.1)})
        assert f"{name} is a bias that is not 0" in refusal(each)


@pytest.mark.parametrize(
    "name", ["extra.weight", f"{LAYER}.mlp.extra_proj.weight", f"{LAYER}.self_attn.sinks"]
)
def test_a_tensor_without_a_place_is_named(folder: Path, gptq: Path, tmp_path: Path, name: str) -> None:
    quantized = copied(gptq, tmp_path / "more")
    for each in (folder, quantized):
        add(each, **{name: torch.ones(4)})
        assert f"{name} has no place in LlamaForCausalLM" in refusal(each)


def test_a_tensor_of_a_quantized_weight_that_no_reader_takes_is_named(gptq: Path, tmp_path: Path) -> None:
    folder = copied(gptq, tmp_path / "unread")
    name = f"{LAYER}.self_attn.q_proj.pre_quant_scale"
    add(folder, **{name: torch.full((64,), 2.0)})
    assert f"{name} is read by nothing" in refusal(folder)


def test_what_changes_no_text_is_passed_over(
    folder: Path, gptq: Path, checkpoints: MakeCheckpoint, tmp_path: Path
) -> None:
    codes, ones = torch.ones(4, 4).to(FLOAT8), torch.ones(4)
    names = (
        "rotary_emb.inv_freq",
        "self_attn.rotary_emb.cos_cached",
        "self_attn.k_proj.k_scale",
        "attn.bias",
        "self_attn.core_attention._extra_state",
        "mlp.norm.num_batches_tracked",
    )
    more = {f"{LAYER}.{name}": ones for name in names} | {
        "mtp.layers.0.self_attn.q_proj.weight": codes,
        "mtp.layers.0.self_attn.q_proj.weight_scale": ones,
        "model.layers.99.mlp.up_proj.weight": codes,
        "model.layers.99.eh_proj.weight": ones,
        "model.embed_positions.weights": ones,
        "cls.seq_relationship.bias": ones,
        "model.layers.99.self_attn.o_proj.weight": ones,
        "model.visual.blocks.0.attn.qkv.weight": ones,
        "multi_modal_projector.linear_1.weight": ones,
    }
    add(folder, **more)
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)
    quantized = copied(gptq, tmp_path / "more")
    add(quantized, **more)
    assert generated(quantized) == generated(gptq)


def test_a_layer_beyond_the_configuration_that_drafts_nothing_is_named(folder: Path, gptq: Path) -> None:
    with_codes = copied(gptq, folder / "quantized")
    for each in (folder, with_codes):
        config = json.loads((each / "config.json").read_text())
        (each / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
        assert f"{each}: model.layers.2." in refusal(each)


def test_shards_of_an_index_that_are_gone_leave_the_whole_file(
    folder: Path, checkpoints: MakeCheckpoint
) -> None:
    weight_map = dict.fromkeys(stored(folder), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)


def test_an_index_with_a_name_that_no_file_has_is_refused(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "x" * 5000}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "index.json names no files" in refusal(folder)


def test_two_sets_of_the_same_weights_are_one(folder: Path, checkpoints: MakeCheckpoint) -> None:
    store_shards(folder, stored(folder))
    store(folder, {"tok_embeddings.weight": torch.ones(4)}, "consolidated.safetensors")
    assert generated(folder) == expected(checkpoints("llama"), PROMPT)


@pytest.mark.parametrize("named", ["other.safetensors", "/other.safetensors", 5])
def test_weights_that_config_json_names_are_not_taken_unchecked(folder: Path, named: object) -> None:
    store(folder, {name: each + 1 for name, each in stored(folder).items()}, "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": named}))
    assert "names weights of its own, by transformers_weights" in refusal(folder)


def test_two_sets_of_weights_that_differ_are_named(folder: Path, gptq: Path, tmp_path: Path) -> None:
    whole, name = stored(folder), "model.norm.weight"
    others = {
        f"{name} has other numbers": whole | {name: whole[name] + 1},
        f"{name} is F32 [64] and F16 [64] there": whole | {name: whole[name].half()},
        f"{name} is F32 [64] and F32 [32] there": whole | {name: whole[name][:32]},
        f"only one of them has {name}": {key: each for key, each in whole.items() if key != name},
        "only one of them has more.weight": whole | {"more.weight": torch.ones(1)},
    }
    for difference, tensors in others.items():
        store_shards(folder, tensors)
        said = refusal(folder)
        assert "in model.safetensors and model-0000" in said
        assert difference in said
    quantized = copied(gptq, tmp_path / "quantized")
    store_shards(quantized, stored(quantized))
    store(quantized, whole)
    assert "two sets of weights" in refusal(quantized)


def test_a_shard_that_is_left_of_a_set_must_be_part_of_the_whole_file(folder: Path) -> None:
    store_shards(folder, stored(folder))
    (folder / "model-00002-of-00002.safetensors").unlink()
    load_worker(folder)
    store_shards(folder, {name: each + 1 for name, each in stored(folder).items()})
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "has other numbers" in refusal(folder)


def test_shards_that_contradict_each_other_are_named(folder: Path) -> None:
    tensors = stored(folder)
    (folder / "model.safetensors").unlink()
    store_shards(folder, tensors)
    second = load_file(folder / "model-00002-of-00002.safetensors")
    shared = min(tensors.keys() - second.keys())
    store(folder, second | {shared: tensors[shared]}, "model-00002-of-00002.safetensors")
    load_worker(folder)
    store(folder, second | {shared: tensors[shared] + 1}, "model-00002-of-00002.safetensors")
    assert f"{shared} has other numbers" in refusal(folder)
