"""Small vocabularies in other forms than tokenizer.json, and what they make of a text by their definition.

Owns: the writing of tekken.json, tiktoken's lists and sentencepiece's models, and slow encoders for them.
Never: reads such a file (worker/checkpoint/vocabularies does).
"""

import base64
import json
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import tokenizers

WORDS = ("the", " the", " a", "in", "ing", " hello", "wor", "ld", " world", "é", "日本", "!!", "\n\n", "12")
SPACE = "▁"


class Piece(NamedTuple):
    """A piece of sentencepiece, of kind 1 normal, 2 unknown, 3 control, 4 of the user, 6 byte."""

    text: str
    score: float = 0.0
    kind: int = 1


def byte_ranks() -> list[bytes]:
    """All bytes, then pairs of what is there until each word is a token."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        parts = list(_merged([bytes([byte]) for byte in word.encode()], _rank_of(tokens)))
        while len(parts) > 1:
            tokens.append(parts[0] + parts[1])
            parts[:2] = [tokens[-1]]
    return tokens


def tiktoken_lines(tokens: Sequence[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def tekken(tokens: Sequence[bytes], pattern: str, special: Sequence[str], num_special: int) -> dict:
    return {
        "config": {
            "pattern": pattern,
            "default_vocab_size": len(tokens) + num_special,
            "default_num_special_tokens": num_special,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*tokens, b"never used"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)
        ],
    }


def encode_bytes(text: str, tokens: Sequence[bytes], pattern: str) -> list[int]:
    """Merge, in each part that the pattern leaves, the pair of the lowest rank, the first of equal ones."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    parts = [part for part, _ in split.pre_tokenize_str(text)]
    found = []
    for part in parts:
        letters = [bytes([byte]) for byte in part.encode()]
        found += [ranks[token] for token in _merged(letters, _rank_of(tokens))]
    return found


def encode_pieces(text: str, pieces: Sequence[Piece]) -> list[int]:
    """Merge the pair of the best score, as sentencepiece does, and spell what is no piece in bytes."""
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    scores = {piece.text: -piece.score for piece in pieces if piece.kind == 1}
    merged = _merged(list((SPACE + text).replace(" ", SPACE)) if text else [], scores.get)
    found = []
    for part in merged:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def _rank_of(tokens: Sequence[bytes]) -> Callable[[bytes], float | None]:
    return {token: rank for rank, token in enumerate(tokens)}.get


def _merged(parts: list, rank_of: Callable) -> list:
    while True:
        ranked = [(rank_of(left + right), place) for place, (left, right) in enumerate(pairwise(parts))]
        known = [each for each in ranked if each[0] is not None]
        if not known:
            return parts
        _, place = min(known)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def pieces() -> list[Piece]:
    letters = sorted({letter for word in WORDS for letter in word.replace(" ", SPACE) if letter.strip()})
    texts = dict.fromkeys(letters)
    for word in WORDS:
        spelled = word.replace(" ", SPACE).strip("\n")
        texts |= dict.fromkeys(spelled[:end] for end in range(2, len(spelled) + 1))
    special = [Piece("<unk>", kind=2), Piece("<s>", kind=3), Piece("</s>", kind=3)]
    in_bytes = [Piece(f"<0x{byte:02X}>", kind=6) for byte in range(256)]
    return [*special, *in_bytes, *(Piece(text, -float(rank)) for rank, text in enumerate(texts))]


def sentencepiece_model(found: Sequence[Piece], **trainer: int) -> bytes:
    """A model of pairs with bytes for what it lacks, whose texts keep their spaces."""
    numbers = {"model_type": 3, "byte_fallback": 35, "unk_id": 40, "bos_id": 41, "eos_id": 42}
    values = {"model_type": 2, "byte_fallback": 1} | trainer
    said = b"".join(_number(numbers[name], value) for name, value in values.items())
    normalizer = _text(1, b"identity") + _number(3, 1) + _number(4, 0) + _number(5, 1)
    body = b"".join(
        _text(
            1, _text(1, each.text.encode()) + b"\x15" + struct.pack("<f", each.score) + _number(3, each.kind)
        )
        for each in found
    )
    return body + _text(2, said) + _text(3, normalizer)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def write(folder: Path, name: str, content: bytes | dict, settings: dict | None = None) -> Path:
    """Write a vocabulary, and tokenizer_config.json beside it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
