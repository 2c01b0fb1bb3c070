"""The JSON schema of the configuration file, against what the server itself accepts."""

from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from engine.options.options import BY_KEY, DECLARATIONS, OptionError
from engine.options.schema import file_schema
from engine.options.sources import read_options
from engine.options.values import Choice
from tests.engine.options.test_options import _SAMPLES
from tests.for_each import for_each

SCHEMA = file_schema()
VALIDATOR = Draft202012Validator(SCHEMA)

VALID = """\
model: /models/qwen3-0.6b
served-model-name: [qwen3, default]
max-num-seqs: 64
max-num-batched-tokens: 8K
kv-cache-memory: 8GiB
watermark: 2%
shutdown-timeout: 2m
enable-prefix-caching: false
scheduling-policy: priority
max-model-len: null
override-generation-config: {temperature: 0.5}
limit-mm-per-prompt: '{"image": 8}'
"""
INVALID = [
    "max-num-sqs: 1",
    "max-num-seqs: 0",
    "max-num-seqs: [1]",
    "max-num-seqs: many",
    "max-num-batched-tokens: 8KB",
    "watermark: 0.7",
    "watermark: most",
    "shutdown-timeout: -1",
    "shutdown-timeout: 2 days",
    "scheduling-policy: random",
    "enable-prefix-caching: maybe",
    "device: tpu",
    "model: ''",
    "model: {a: b}",
    "override-generation-config: [1]",
    "kv-cache-memory: 1.5.5GiB",
    "- port",
]


def accepts(content: object) -> bool:
    return VALIDATOR.is_valid(content)


def server_accepts(path: Path) -> bool:
    try:
        read_options({"config": str(path)}, {})
    except OptionError:
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)


def test_a_valid_file_is_valid_to_both(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(VALID)
    assert accepts(yaml.safe_load(VALID))
    assert server_accepts(path)


@pytest.mark.parametrize("content", INVALID)
def test_an_invalid_file_is_invalid_to_both(content: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    assert not accepts(yaml.safe_load(content))
    assert not server_accepts(path)


@for_each(DECLARATIONS)
def test_every_option_may_be_written_as_text_and_as_what_it_means(name: str) -> None:
    text, value = _SAMPLES[name]
    key = name.replace("_", "-")
    if isinstance(DECLARATIONS[name].kind, Choice):
        text = text.lower()  # the schema has one spelling
    assert accepts({key: text})
    assert accepts({key: list(value) if isinstance(value, tuple) else value})
    assert accepts({key: None})
    assert SCHEMA["properties"][key]["description"] == DECLARATIONS[name].help


def test_it_has_every_option_and_no_other() -> None:
    assert SCHEMA["properties"].keys() == BY_KEY.keys()
