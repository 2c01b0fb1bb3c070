"""Expressions of a tokenizer that backtrack are found at the start, before a client sends such a text."""

from pathlib import Path

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from engine.errors import RequestRejected
from engine.text.tokenizer import Tokenizer, TokenizerError
from engine.text.tokenizer_trial import Trial, main
from tests.engine import small_tokenizers

IN_USE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Patterns of families that are served often."""


def save(folder: Path, pattern: str) -> Path:
    backend = small_tokenizers.byte_level_backend()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_pattern_that_backtracks_ends_the_start_with_the_text_that_shows_it(tmp_path: Path) -> None:
    file = save(tmp_path, r"(x+x+)+[yz]")
    found = r"takes too long: it fails on 16384 characters .*'xxxxxxxx'"
    with pytest.raises(TokenizerError, match=found):
        Trial(file).judge()


@pytest.mark.parametrize("pattern", [r"x*[yz]", r"\p{Lu}*\p{Ll}+"])
def test_one_whose_time_grows_with_the_square_does_too(
    tmp_path: Path, capfd: pytest.CaptureFixture, pattern: str
) -> None:
    assert main_in_this_process(save(tmp_path, pattern)) == 3
    assert "s of processor time for 16" in capfd.readouterr().out


@pytest.mark.parametrize("pattern", IN_USE)
def test_patterns_in_use_pass(tmp_path: Path, pattern: str) -> None:
    assert main_in_this_process(save(tmp_path, pattern)) == 0


def test_a_normalizer_is_tried_too(tmp_path: Path) -> None:
    backend = small_tokenizers.byte_level_backend()
    backend.normalizer = normalizers.Replace(Regex(r"(q|qq)+[yz]"), "")
    backend.save(str(tmp_path / "tokenizer.json"))
    assert main_in_this_process(tmp_path / "tokenizer.json") == 3


def test_a_text_on_which_the_tokenizer_fails_is_its_senders_fault(tmp_path: Path) -> None:
    save(tmp_path, r"(x+x+)+[yz]")
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(RequestRejected, match=r"tokenizer fails on this text: .*limit"):
        tokenizer.encode_prompt("x" * 200)
    assert tokenizer.encode_prompt("hello")


def main_in_this_process(file: Path) -> int:
    """Run the trial without its limits, which would stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("resource.setrlimit", lambda *_: None)
        return main(file)
