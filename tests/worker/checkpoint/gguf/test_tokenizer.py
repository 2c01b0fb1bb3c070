"""Tokenizers of GGUF files give the ids of the tokenizer that the file was written from."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.checkpoints import write_tokenizer
from worker.checkpoint.gguf.config import _tokens, ends_of
from worker.checkpoint.gguf.file import GgufFile
from worker.checkpoint.gguf.tokenizer import tokenizer_of
from worker.checkpoint.vocabularies.splits import SPLITS
from worker.worker_errors import StartupError

TEXTS = (
    "Once upon a time, the trains ran.",
    "  two spaces, a\ttab\n\n\nand 12345 ü é 漢字 🚂",
    "I'm sure they'll DON'T x=3.14;\r\n\treturn",
    "<|im_start|>user\nhello world<|im_end|>\n",
    " ",
    "",
)


def file_of(architecture: str = "llama", **metadata: Any) -> GgufFile:
    named = {"general.architecture": architecture} | {
        key if "chat_template" in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()
    }
    return GgufFile(Path("model.gguf"), 0, named, {})


def opened(file: GgufFile) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(file)[0]))


def byte_level(folder: Path, **metadata: Any) -> tuple[tokenizers.Tokenizer, GgufFile]:
    """A tokenizer of tests/checkpoints.py, and the same as metadata."""
    write_tokenizer(folder)
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    special = [each["content"] for each in content["added_tokens"]]
    tokens = [*content["model"]["vocab"], *special]
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    return original, file_of(**{**settings, **metadata})


@pytest.mark.parametrize("text", TEXTS)
def test_a_byte_level_tokenizer_encodes_and_decodes_as_the_original(tmp_path, text):
    original, file = byte_level(tmp_path)
    found = opened(file)
    assert found.encode(text).ids == original.encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text


TRICKY = "I'LL a1234 éÉTÉ漢字か!x= 9/\n\n  y"
PIECES = {
    "gpt-2": "I|'|LL| a|1234| éÉTÉ漢字か|!|x|=| 9|/|\n\n | y",
    "smollm": "I|'|LL| a|1|2|3|4| éÉTÉ漢字か|!|x|=| |9|/|\n\n | y",
    "llama-bpe": "I|'LL| a|123|4| éÉTÉ漢字か|!x|=| |9|/\n\n| | y",
    "qwen2": "I|'LL| a|1|2|3|4| éÉTÉ漢字か|!x|=| |9|/\n\n| | y",
    "deepseek-v3": "I|'LL| a|123|4| éÉTÉ|漢字か|!x|=| |9|/\n\n| | y",
    "gpt-4o": "I'LL| a|123|4| é|ÉTÉ漢字か|!x|=| |9|/\n\n| | y",
    "tekken": "I|'LL| a|1|2|3|4| é|ÉTÉ漢字か|!x|=| |9|/\n\n| | y",
    "deepseek-llm": "I|'|LL| a|1234| éÉ|T|É|漢字か|!|x|=| |9|/|\n|\n| | y",
    "deepseek-coder": "I|'|LL| a|1|2|3|4| éÉTÉ|漢字か|!|x|= |9|/|\n|\n| | y",
    "falcon": "I|'|LL| a|123|4| éÉTÉ漢字か|!|x|=| 9|/|\n\n | y",
    "default": "I|'|LL| a|123|4| éÉTÉ漢字か|!|x|=| |9|/|\n\n | y",
    "kimi-k2": "I'LL| a|123|4| é|ÉTÉ|漢字|か|!x|=| |9|/\n\n| | y",
    "glm4": "I|'LL| a|123|4| éÉTÉ漢字か|!x|=| |9|/\n\n| | y",
}
"""llama.cpp's own vocabularies, each with some fifty texts, give their ids by these rules."""


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_as_the_named_rules_say(tmp_path, pre):
    found = opened(byte_level(tmp_path, pre=pre)[1])
    places = [place for _, place in found.pre_tokenizer.pre_tokenize_str(TRICKY)]
    assert "|".join(TRICKY[start:end] for start, end in places) == PIECES[pre]


def test_every_set_of_rules_loses_no_letter(tmp_path):
    for number, pre in enumerate(SPLITS):
        (tmp_path / str(number)).mkdir()
        found = opened(byte_level(tmp_path / str(number), pre=pre)[1])
        for text in TEXTS[:3]:
            ids = found.encode(text, add_special_tokens=False).ids
            assert found.decode(ids, skip_special_tokens=False) == text, pre


def test_marks_stay_with_their_letters_for_qwen_3_5_which_composes_none(tmp_path):
    for pre, pieces in (("qwen35", ["u\u0308ber"]), ("stablelm2", ["u", "\u0308ber"])):
        (tmp_path / pre).mkdir()
        found = opened(byte_level(tmp_path / pre, pre=pre)[1])
        places = [place for _, place in found.pre_tokenizer.pre_tokenize_str("u\u0308ber")]
        assert ["u\u0308ber"[start:end] for start, end in places] == pieces
        assert found.normalizer is None


def test_gemma_4_merges_its_stored_pairs_over_the_whole_text_and_begins_with_its_bos():
    pairs = ["h e", "l l", "he ll", "hell o", "▁ hello", "▁ ▁"]
    words = [pair.replace(" ", "") for pair in pairs]
    pieces = ["<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helo", *words]
    settings = {"model": "gemma4", "tokens": pieces, "merges": pairs, "bos_token_id": 0, "eos_token_id": 1}
    kinds = [3, 3, *[6] * 256, *[1] * (len(pieces) - 258)]
    found = opened(file_of("gemma4", **settings, token_type=kinds, add_bos_token=False))
    assert found.encode("hello  hello\n").tokens == ["<bos>", "hello", "▁", "▁hello", "<0x0A>"]
    assert found.decode(found.encode(" hello é").ids) == " hello é"


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_an_end_of_a_turn_is_one_token_and_special_whatever_its_type(tmp_path, kind):
    _, file = byte_level(tmp_path)
    place = file.metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    file.metadata["tokenizer.ggml.token_type"][place] = kind
    del file.metadata["tokenizer.ggml.eos_token_id"]
    found = opened(file)
    assert found.encode("a<|im_end|>").ids[-1] == place
    assert found.get_added_tokens_decoder()[place].special


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["a", "<|end|>", "<|endoftext|>"], {"<|end|>", "<|endoftext|>"}),
        (["<|end|>", "<|return|>", "<|call|>"], {"<|return|>", "<|call|>"}),
        (["</s>", "[EOT]", "<｜end▁of▁sentence｜>"], {"[EOT]", "<｜end▁of▁sentence｜>"}),
    ],
)
def test_ends_of_replies_are_known_by_their_names(tokens, ends):
    assert ends_of(tokens) == ends


def ends_in_config(architecture: str, kinds: list[int] | None) -> list[int]:
    tokens = ["a", "<|endoftext|>", "<|user|>", "<|observation|>"]
    return _tokens(file_of(architecture, tokens=tokens, token_type=kinds)).get("eos_token_id", [])


def test_turns_of_others_end_replies_of_glm_where_they_are_control_tokens():
    for architecture in ("glm4", "glm4moe", "deepseek2"):
        assert ends_in_config(architecture, [1, 3, 3, 3]) == [1, 2, 3]
        assert ends_in_config(architecture, [1, 3, 1, 4]) == [1]
    assert ends_in_config("phi3", [1, 3, 3, 3]) == [1]


def test_ends_by_name_are_found_without_types_of_tokens():
    assert ends_in_config("llama", None) == [1]


def test_named_tokens_beyond_the_vocabulary_are_passed_over_with_a_line(caplog):
    beyond = dict.fromkeys(("padding_token_id", "unknown_token_id", "eot_token_id"), 4294967295)
    file = sentencepiece(**beyond)
    assert opened(file).encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer_of(file)[1] == {"bos_token": "<s>", "eos_token": "</s>"}
    assert "padding_token_id 4294967295 is no token" in caplog.text
    assert _tokens(file) == {"bos_token_id": 1, "eos_token_id": [2]}
    assert "bos_token" not in tokenizer_of(sentencepiece(bos_token_id=4294967295))[1]


@pytest.mark.parametrize(
    ("architecture", "name", "spaces"),
    [
        ("phi3", "Phi-3.5-mini-instruct", False),
        ("phi3", "Phi3 Medium", False),
        ("phi3", "Phi 3 Mini 4k Instruct", False),
        ("phi3", "Another", True),
        ("llama", "phi-3", True),
    ],
)
def test_special_tokens_of_phi_3_take_spaces_behind_them_along(architecture, name, spaces):
    file = sentencepiece(architecture)
    file.metadata["general.name"] = name
    found = opened(file)
    ids = found.encode("h</s> \nhello<s> h", add_special_tokens=False).ids
    behind = ["▁▁", "<0x0A>", "h", "ello"] if spaces else ["▁hello"]
    assert [found.id_to_token(each) for each in ids] == ["▁h", "</s>", *behind, "<s>", "▁", "▁h"]


def test_two_spellings_of_one_token_leave_it_to_the_one_in_bytes(tmp_path):
    _, file = byte_level(tmp_path)
    tokens, kinds = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    in_bytes = next(each for each in tokens if each == "Ġ")
    tokens.insert(0, " ")
    kinds.insert(0, 1)
    file.metadata["tokenizer.ggml.eos_token_id"] += 1
    assert opened(file).encode(" ").ids == [tokens.index(in_bytes)]


def test_composed_letters_are_one_for_qwen(tmp_path):
    found = opened(byte_level(tmp_path, pre="qwen2")[1])
    assert found.encode("u\u0308").ids == found.encode("ü").ids


def sentencepiece(architecture: str = "llama", **metadata: Any) -> GgufFile:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "hel", "lo", "ello", "▁hello", "▁▁"]
    scores = [0.0] * len(pieces) + [-10.0, -11, -12, -13, -14, -5, -3, -9, -2, -1, -0.5, -7]
    settings = {
        "model": "llama",
        "tokens": [*pieces, *words],
        "token_type": [*kinds, *[1] * len(words)],
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return file_of(architecture, **{**settings, **metadata})


@pytest.mark.parametrize(
    ("metadata", "text", "pieces"),
    [
        ({}, "hello", ["<s>", "▁hello"]),
        ({"add_space_prefix": False}, "hello", ["<s>", "h", "ello"]),
        ({"add_bos_token": False}, "hello hello", ["▁hello", "▁hello"]),
        ({"add_eos_token": True}, "hé", ["<s>", "▁h", "<0xC3>", "<0xA9>", "</s>"]),
        ({}, "a</s>h", ["<s>", "▁", "<0x61>", "</s>", "▁h"]),
    ],
)
def test_sentencepiece_pairs_are_merged_by_their_scores(metadata, text, pieces):
    found = opened(sentencepiece(**metadata))
    assert found.encode(text).tokens == pieces


@pytest.mark.parametrize("text", ["hello", " hello", "  é hello "])
def test_sentencepiece_text_comes_back_with_its_spaces(text):
    found = opened(sentencepiece())
    assert found.decode(found.encode(text).ids) == text


def test_gemma_puts_no_space_before_a_text_and_merges_in_the_order_of_its_tokens():
    found = opened(sentencepiece("gemma2"))
    assert found.encode("hello").tokens == ["<s>", "hel", "lo"]
    assert found.decode(found.encode("  hello").ids) == "  hello"


def test_templates_and_named_tokens_come_along(tmp_path):
    _, file = byte_level(tmp_path, **{"tokenizer.chat_template": "{{ 1 }}", "bos_token_id": 0})
    settings = tokenizer_of(file)[1]
    assert settings["chat_template"] == "{{ 1 }}"
    assert settings["eos_token"] == "<|im_end|>"
    file.metadata["tokenizer.chat_template.tool_use"] = "{{ 2 }}"
    assert tokenizer_of(file)[1]["chat_template"] == [
        {"name": "default", "template": "{{ 1 }}"},
        {"name": "tool_use", "template": "{{ 2 }}"},
    ]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"model": "rwkv"}, "'rwkv'"),
        ({"pre": "unheard"}, "'unheard'; take the model's safetensors"),
        ({"pre": None}, "rules named None"),
        ({"merges": ["zz qq"]}, "'zz qq'"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type is for 1"),
        ({"eos_token_id": 1 << 20}, "eos_token_id 1048576 is no token"),
        ({"model": "llama", "scores": None}, "tokenizer.ggml.scores"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, metadata, named):
    with pytest.raises(StartupError, match=named.replace("(", "\\(")):
        tokenizer_of(byte_level(tmp_path, **metadata)[1])
