"""Checkpoints of real shapes: what every server must find in them."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from bench.load.workload import words
from campaigns.checkpoints.make_shapes import SHAPES, write_full_tokenizer

NUM_TOKENS = SHAPES["smollm2-135m"].vocab_size


def test_every_row_of_the_vocabulary_has_a_text_and_common_words_are_one_token(tmp_path: Path) -> None:
    eos_token_id = write_full_tokenizer(tmp_path, NUM_TOKENS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    assert sorted(tokenizer.get_vocab().values()) == list(range(NUM_TOKENS))
    assert all(tokenizer.decode([token]) for token in range(NUM_TOKENS - 3))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer.id_to_token(eos_token_id) == settings["eos_token"]
    text = " " + words(200, random.Random(3))
    assert len(tokenizer.encode(text).ids) == 200
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_bytes_come_out_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_full_tokenizer(tmp_path / name, NUM_TOKENS)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()
