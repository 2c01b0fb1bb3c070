"""--speculative-config: what is understood, and what is refused by name."""

import json
from pathlib import Path

import pytest

from engine.options.declaration import OptionError
from engine.options.engine_config import resolve
from engine.options.found_model import DEMO_MODEL
from engine.options.options import Options
from engine.options.speculation_option import SpeculationOptions, speculation_config
from worker.worker_config import DraftMethod, SpeculationConfig


def config_of(**options: str) -> SpeculationConfig:
    return speculation_config(SpeculationOptions(**options), lambda name: Path("models") / name)


def test_without_it_a_head_of_the_checkpoint_is_taken_and_off_leaves_it_out() -> None:
    assert config_of().method is DraftMethod.AUTO
    off = config_of(speculative_config='{"method": "off"}')
    assert off == SpeculationConfig(method=DraftMethod.PREDICTION)
    resolve(Options(speculative_config='{"method": "off"}', pipeline_parallel_size=2))


@pytest.mark.parametrize("name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp"])
def test_a_head_has_one_name_here_and_those_of_its_families_elsewhere(name: str) -> None:
    text = f'{{"method": "{name}", "num_speculative_tokens": 3}}'
    expected = SpeculationConfig(method=DraftMethod.MTP, num_speculative_tokens=3)
    assert config_of(speculative_config=text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram"}', SpeculationConfig(method=DraftMethod.NGRAM)),
        (
            '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}',
            SpeculationConfig(
                method=DraftMethod.NGRAM, num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4
            ),
        ),
        (
            '{"method": "suffix", "prompt_lookup_min": 7}',
            SpeculationConfig(method=DraftMethod.SUFFIX, prompt_lookup_min=7, prompt_lookup_max=7),
        ),
    ],
)
def test_numbers_and_methods_are_taken_over(text: str, expected: SpeculationConfig) -> None:
    assert config_of(speculative_config=text) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": '{"method": "draft_model", "model": "small", "num_speculative_tokens": 3}'},
        {"speculative_config": '{"model": "small", "num_speculative_tokens": 3}'},
        {"speculative_config": '{"method": "eagle3", "model": "small", "num_speculative_tokens": 3}'},
        {"speculative_model": "small", "speculative_config": '{"num_speculative_tokens": 3}'},
    ],
)
def test_a_draft_model_is_named_in_either_way(options: dict[str, str]) -> None:
    assert config_of(**options) == SpeculationConfig(
        method=DraftMethod.DRAFT_MODEL,
        model_path="models/small",
        num_speculative_tokens=3,
        is_eagle="eagle3" in str(options),
    )


def test_a_head_in_a_folder_of_its_own_needs_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = json.dumps({"method": "eagle3", "model": str(tmp_path)})
    with pytest.raises(OptionError, match=r"no \*.safetensors files.*safetensors.torch.save_file"):
        resolve(Options(speculative_config=asked))
    (tmp_path / "model.safetensors").touch()
    engine, _ = resolve(Options(speculative_config=asked))
    assert engine.worker.speculation.model_path == str(tmp_path)
    with pytest.raises(OptionError, match=r"it has no tokenizer.json"):
        resolve(Options(model=str(tmp_path)))


def test_a_draft_model_is_named_once_and_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="name the draft model once"):
        config_of(speculative_model="small", speculative_config='{"model": "other"}')
    with pytest.raises(OptionError, match=r"model '.*/none'"):
        resolve(Options(speculative_model=str(tmp_path / "none")))
    with pytest.raises(
        OptionError, match="--speculative-model with --pipeline-parallel-size 2: stages verify no drafts"
    ):
        resolve(Options(speculative_model="small", pipeline_parallel_size=2))
    engine, _ = resolve(Options(speculative_model=str(DEMO_MODEL), data_parallel_size=2, device="cpu"))
    assert engine.worker.speculation.model_path == str(DEMO_MODEL)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngram", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", '"method": null'),
        ('{"method": "eagle3"}', "no model is named"),
        ('{"method": ["eagle3"]}', '"method": ["eagle3"]'),
        ('{"method": "medusa"}', '"method": "medusa"'),
        ('{"method": "draft_model"}', "no model is named"),
        ('{"method": "ngram", "model": "small"}', "the method ngram asks no model"),
        ('{"model": 7}', '"model": 7'),
        ('{"method": "mtp", "model": "small"}', "the method mtp asks no model"),
        ('{"method": "mtp", "prompt_lookup_max": 4}', "'prompt_lookup_max' is not known here"),
        ('{"method": "off", "num_speculative_tokens": 4}', "'num_speculative_tokens' is not known here"),
        ('{"method": "gpt_mtp"}', '"method": "gpt_mtp"'),
        ('{"model": "small", "prompt_lookup_max": 4}', "'prompt_lookup_max' is not known here"),
        ('{"method": "ngram", "disable_by_batch_size": 4}', "'disable_by_batch_size'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens must be"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}', "prompt_lookup_min is above"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(OptionError, match="--speculative-config") as refused:
        config_of(speculative_config=text)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pipeline_parallel_size": 2}, "with --pipeline-parallel-size 2: stages verify no drafts"),
        (
            {"device": "cuda:0", "tensor_parallel_size": 2},
            "with --tensor-parallel-size 2: a draft model is not divided over ranks of GPUs",
        ),
    ],
)
def test_steps_that_verify_no_such_drafts_are_refused_before_a_model_is_loaded(
    options: dict, named: str
) -> None:
    resolve(Options(**options))
    text = '{"method": "draft_model", "model": "small"}'
    with pytest.raises(OptionError, match=f"--speculative-config {named}"):
        resolve(Options(speculative_config=text, **options))


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"device": "cuda"}])
def test_drafts_from_texts_are_verified_by_ranks_and_gpus(options: dict) -> None:
    engine, _ = resolve(Options(speculative_config='{"method": "suffix"}', **options))
    assert engine.worker.speculation.method is DraftMethod.SUFFIX


def test_several_engines_get_it_each() -> None:
    engine, _ = resolve(
        Options(speculative_config='{"method": "suffix"}', data_parallel_size=2, device="cpu")
    )
    assert engine.num_engines == 2
    assert engine.worker.speculation.method is DraftMethod.SUFFIX
