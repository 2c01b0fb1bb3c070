"""Defaults of a checkpoint's files for generating, and what of them is refused at load."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoints import SPECIAL_TOKENS, write_tokenizer
from worker.checkpoint.generation_config import default_sampling, eos_token_ids
from worker.worker_errors import StartupError


def write(folder: Path, name: str = "generation_config.json", **content: object) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_default_sampling_is_what_the_file_really_sets(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert default_sampling(write(tmp_path, do_sample=True, **said)) == said
    assert default_sampling(write(tmp_path, do_sample=False, **said)) == {"repetition_penalty": 1.05}
    assert default_sampling(write(tmp_path, **said)) == {"repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").unlink()
    assert default_sampling(tmp_path) == {}


def test_a_request_that_asks_for_the_ends_of_the_ranges_may_have_them_as_defaults(tmp_path: Path) -> None:
    for said in (
        {"temperature": 0, "top_p": 0.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 0.01},
        {"temperature": 2.0, "top_p": 1, "top_k": 2**31 - 1, "min_p": 1, "repetition_penalty": 10},
    ):
        assert default_sampling(write(tmp_path, do_sample=True, **said)) == said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", -0.01),
        ("top_p", 1.01),
        ("top_p", [0.9]),
        ("top_k", -2),
        ("top_k", 40.5),
        ("top_k", 2**31),
        ("min_p", -0.01),
        ("min_p", float("inf")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", {"a": "b" * 1000}),
        ("do_sample", "yes"),
    ],
)
def test_a_default_that_no_request_may_ask_for_is_refused_by_file_and_key(
    tmp_path: Path, key: str, value: object
) -> None:
    write(tmp_path, **{"do_sample": True, key: value})
    with pytest.raises(StartupError, match=rf"generation_config\.json has {key} .*; correct {key}") as caught:
        default_sampling(tmp_path)
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_a_value_that_is_not_used_is_not_judged(tmp_path: Path) -> None:
    assert default_sampling(write(tmp_path, do_sample=False, temperature="0.7", top_p=0)) == {}


def test_end_of_sequence_tokens_are_merged_from_all_places(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[333, 334])
    write(tmp_path, "config.json", eos_token_id=334)
    nested = SimpleNamespace(eos_token_id=7)
    assert eos_token_ids(tmp_path, [nested, SimpleNamespace()], vocab_size=335) == (333, 334, 7)


def test_the_tokenizers_end_token_ends_a_text_too(tmp_path: Path) -> None:
    num_tokens = write_tokenizer(tmp_path)
    write(tmp_path, "tokenizer_config.json", eos_token=SPECIAL_TOKENS[-1])
    write(tmp_path, eos_token_id=[3])
    assert eos_token_ids(tmp_path, [], vocab_size=num_tokens) == (3, num_tokens - 1)
    assert eos_token_ids(tmp_path, [], vocab_size=num_tokens - 1) == (3,)


def test_a_familys_default_that_this_vocabulary_lacks_is_left_out(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, [SimpleNamespace(eos_token_id=50256)], vocab_size=335) == ()


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", [335, -1, "</s>", True, 2.0, [334, None], [[334]]])
def test_an_end_token_that_the_model_cannot_draw_is_refused_by_file(
    tmp_path: Path, name: str, value: object
) -> None:
    write(tmp_path, name, eos_token_id=value)
    with pytest.raises(StartupError, match=rf"{name} has eos_token_id .* below 335"):
        eos_token_ids(tmp_path, [], vocab_size=335)
