"""Texts of a checkpoint that lie: whatever they make their readers raise is one refusal of one line."""

import json
import time
from pathlib import Path

import pytest

from engine.options.media_options import MediaConfig
from engine.text.checkpoint_texts import load_texts
from engine.text.tokenizer import TokenizerError
from tests.checkpoints import write_tokenizer
from tests.hostile_values import HOSTILE, assert_one_line, hostile_texts
from worker.worker_config import WorkerConfig

_MAX_S = 2.0
"""Processor time for one file; it takes some milliseconds."""


def read(folder: Path) -> str:
    """Load all texts; return the refusal."""
    began_s = time.process_time()
    try:
        texts = load_texts(WorkerConfig(model_path=str(folder)), MediaConfig())
    except TokenizerError as error:
        assert_one_line(error)
        return str(error)
    finally:
        assert time.process_time() - began_s < _MAX_S
    texts.trial.close()
    texts.template.close()
    return ""


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_any_value_of_a_tokenizers_files_is_read_or_refused(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / name
    tokens = {"added_tokens_decoder": {"7": {"content": "x", "special": True}}, "extra_special_tokens": ["x"]}
    added = tokens | {"image_token": "x"} if name == "tokenizer_config.json" else {}
    for what, text in hostile_texts(json.loads(path.read_text()) | added):
        path.write_text(text)
        try:
            read(tmp_path)
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__} {str(error)[:200]}") from error


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": [{"name": [], "template": "x"}]},
        {"chat_template": [{"name": "default", "template": 5}]},
        {"chat_template": 5},
        {"bos_token": {"content": {}}},
    ],
)
def test_templates_of_another_kind_are_read_or_refused(tmp_path: Path, config: dict[str, object]) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ("bos_token" in config) == (read(tmp_path) == "")


def test_a_response_template_that_is_read_but_not_written_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    deep = "[" * 1020 + "]" * 1020
    (tmp_path / "tokenizer_config.json").write_text(f'{{"response_template": {deep}}}')
    assert "cannot be read" in read(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(HOSTILE["deep"])
    assert "cannot be read" in read(tmp_path)


def test_a_normalizer_that_panics_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA////"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert str(tmp_path) in read(tmp_path)
