"""Values that an operator may set in the place of a checkpoint's own, and those that are refused."""

import json

import pytest

from worker.checkpoint.generation_config import default_sampling
from worker.checkpoint.overrides import config_overrides, generation_overrides, in_known_words, merged
from worker.worker_errors import StartupError


def test_defaults_of_sampling_win_over_the_file_even_where_it_does_not_sample(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "repetition_penalty": 1.1}')
    asked = generation_overrides('{"temperature": 0.3, "top_k": 5}')
    assert default_sampling(tmp_path, asked) == {"temperature": 0.3, "top_k": 5, "repetition_penalty": 1.1}
    assert generation_overrides(None) == {}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"max_new_tokens": 5}', "max_new_tokens"),
        ('{"temperature": 3}', "temperature"),
        ('{"top_k": true}', "top_k"),
    ],
)
def test_other_names_and_values_out_of_bounds_are_refused(text, part) -> None:
    with pytest.raises(StartupError, match=part):
        generation_overrides(text)


def test_values_are_merged_key_by_key_and_null_takes_one_away() -> None:
    content = {"a": 1, "rope": {"x": 1, "y": 2}, "gone": 3}
    overrides = config_overrides('{"rope": {"y": 5}, "gone": null, "new": [1]}')
    assert merged(content, overrides) == {"a": 1, "rope": {"x": 1, "y": 5}, "new": [1]}
    assert content["rope"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_rope_scaling_keeps_the_other_parameters_of_newer_files(kind) -> None:
    content = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    overrides = config_overrides(f'{{"rope_scaling": {{"{kind}": "yarn", "factor": 2.0}}}}')
    found = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}
    assert merged(content, overrides) == {"rope_parameters": found}
    assert merged({"text_config": content}, {"text_config": overrides}) == {
        "text_config": {"rope_parameters": found}
    }
    assert merged({"rope_theta": 1e6}, overrides) == {"rope_theta": 1e6, **overrides}
    for other in (None, 5):  # what replaces the other parameters is taken as it is
        replacing = {**overrides, "rope_parameters": other}
        assert merged(content, replacing).get("rope_parameters") == other
    with pytest.raises(StartupError, match="for each kind of layers"):
        merged({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, overrides)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ({"torch_dtype": "half", "dtype": "torch.bfloat16"}, {"torch_dtype": "float16", "dtype": "bfloat16"}),
        ({"text_config": {"dtype": "bf16"}}, {"text_config": {"dtype": "bfloat16"}}),
        ({"rope_scaling": {"type": "su"}}, {"rope_scaling": {"type": "longrope"}}),
        (
            {"rope_parameters": {"x": {"rope_type": "mrope"}}},
            {"rope_parameters": {"x": {"rope_type": "default"}}},
        ),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {"time_step_limit": [0.0, float("inf")]}),
        ({"dtype": "int8", "type": "half", "hidden_act": "su"}, {}),
        ({"model_type": "mistral", "layer_types": []}, {"model_type": "ministral"}),
        ({"model_type": "mistral"}, {}),
    ],
)
def test_words_of_other_libraries_are_read_as_those_of_transformers(content, found) -> None:
    before = json.dumps(content)
    assert in_known_words(content) == content | found
    assert json.dumps(content) == before


@pytest.mark.parametrize("key", ["auto_map", "model_type", "quantization_config"])
def test_what_the_checkpoint_is_cannot_be_overridden(key) -> None:
    with pytest.raises(StartupError, match=key):
        config_overrides(json.dumps({key: {}}))
