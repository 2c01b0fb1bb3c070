"""Tokens that only the files beside tokenizer.json name: they get the ids that transformers gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.text.tokenizer import Tokenizer
from tests.engine import small_tokenizers
from worker.checkpoint.tokenizer_files import end_token_id
from worker.sampling.grammar_library import open_tokenizer

TEXT = "<s>hello <|a|> there<|b|>\n<|c|>, <tool>hello<|image|></s> é x image_token"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def token(text: str, **flags: bool) -> dict[str, Any]:
    return {"content": text, **PLAIN, "special": True, **flags}


FILES: dict[str, dict[str, dict[str, Any]]] = {
    "numbered": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"422": token("<|a|>"), "423": token("<|b|>", lstrip=True)},
            "eos_token": "<|b|>",
        }
    },
    "numbered in another order than they come, from another number on": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"900": token("<|b|>", special=False), "7000": token("<|a|>")}
        }
    },
    "known, described otherwise": {
        "tokenizer_config.json": {"added_tokens_decoder": {"421": token("<tool>", rstrip=True, lstrip=True)}}
    },
    "listed": {
        "added_tokens.json": {"<|a|>": 423, "<|b|>": 422, "<tool>": 421},
        "tokenizer_config.json": {"additional_special_tokens": ["<|a|>", "<|c|>"]},
    },
    "listed anew": {"tokenizer_config.json": {"extra_special_tokens": ["<|b|>", "<|c|>"]}},
    "named": {
        "tokenizer_config.json": {
            "extra_special_tokens": {"image_token": "<|image|>", "word": "hello"},
            "audio_token": "<|c|>",
            "add_bos_token": True,
        }
    },
    "of the older file": {
        "special_tokens_map.json": {"eos_token": token("<|a|>"), "pad_token": "<|c|>"},
    },
    "of the newer file alone": {
        "special_tokens_map.json": {"pad_token": "<|b|>"},
        "tokenizer_config.json": {"added_tokens_decoder": {"300": token("<|c|>")}},
    },
    "of the older file first": {
        "special_tokens_map.json": {"eos_token": "<|a|>"},
        "tokenizer_config.json": {"eos_token": "</s>"},
    },
}


def write(folder: Path, files: dict[str, dict[str, Any]]) -> Path:
    small_tokenizers.byte_level_backend().save(str(folder / "tokenizer.json"))
    # transformers asks for the family, and a file that is there
    for name, content in (
        {"config.json": {"model_type": "llama"}, "tokenizer_config.json": {}} | files
    ).items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_tokens_have_the_ids_that_transformers_gives_them(tmp_path: Path, files: dict[str, Any]) -> None:
    write(tmp_path, {})
    alone = Tokenizer.load(tmp_path).encode_rendered_chat(TEXT)
    write(tmp_path, files)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    found = ours.encode_rendered_chat(TEXT)
    assert list(found) == theirs.encode(TEXT, add_special_tokens=False)
    assert found != alone
    names = {name: text for name, text in theirs.special_tokens_map.items() if name.endswith("_token")}
    assert {name: ours.special_tokens.get(name) for name in names} == names
    if theirs.eos_token is not None:
        assert theirs.eos_token_id == end_token_id(tmp_path)
    grammars = open_tokenizer(tmp_path, vocab_size=ours.vocab_size, eos_token_ids=(1,))
    assert grammars.tokenize_str("<|a|>hello") == theirs.encode("<|a|>hello", add_special_tokens=False)


def test_a_key_that_is_null_is_one_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, FILES["of the older file"])
    found = Tokenizer.load(tmp_path).encode_rendered_chat(TEXT)
    empty = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "bos_token")
    settings = {**dict.fromkeys(empty), "chat_template": None}
    write(tmp_path, FILES["of the older file"] | {"tokenizer_config.json": settings})
    assert Tokenizer.load(tmp_path).encode_rendered_chat(TEXT) == found


def test_where_no_file_names_more_tokens_the_text_is_the_files_own(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"eos_token": "</s>", "bos_token": token("<s>")}})
    assert end_token_id(tmp_path) == 1
    assert Tokenizer.load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
