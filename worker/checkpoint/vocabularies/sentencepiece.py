"""sentencepiece's tokenizer.model as tokenizer.json.

Owns: the form of the file, a message of protocol buffers, and rules that give sentencepiece's own ids.
Never: knows families that number tokens otherwise than their file does; none with such a file name does.
Source: sentencepiece_model.proto, and the file format of the `tokenizers` library.
"""

import base64
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from worker.checkpoint.vocabularies.tokenizer_parts import (
    added_token,
    cuts_of,
    ends_around,
    pair_model,
    tokenizer_json,
)

_SPACE = "▁"
FIRST_BYTE = b"\x0a"
"""First byte of such a file: that of a piece."""
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_UNIGRAM, _PAIRS = 1, 2
_MOST_PIECES = 1 << 22


class _Kind(IntEnum):
    NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


class _Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(slots=True)
class _Model:
    pieces: list[_Piece] = field(default_factory=list)
    trainer: dict[int, Any] = field(default_factory=dict)
    """Fields by number; so is the next."""
    normalizer: dict[int, Any] = field(default_factory=dict)

    def flag(self, number: int) -> bool:
        """Read a flag of the normalizer, all of which are on by default."""
        return bool(self.normalizer.get(number, True))

    @property
    def has_byte_fallback(self) -> bool:
        return bool(self.trainer.get(35))

    @property
    def named(self) -> dict[str, int]:
        """Ids of tokens by their names."""
        defaults = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
        ids = {name: _signed(self.trainer.get(number, usual)) for name, (number, usual) in defaults.items()}
        return {name: index for name, index in ids.items() if 0 <= index < len(self.pieces)}


def read_sentencepiece(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json, and names of tokens for tokenizer_config.json. Raises ValueError."""
    model = _read(path.read_bytes())
    texts = [piece.text for piece in model.pieces]
    named = model.named
    adds = {"bos": settings.get("add_bos_token", True), "eos": settings.get("add_eos_token", False)}
    ends = {
        name: (texts[named[name]], named[name])
        for name, is_added in adds.items()
        if is_added and name in named
    }
    special = (_Kind.CONTROL, _Kind.UNKNOWN)
    tokenizer = tokenizer_json(
        added_tokens=[
            added_token(index, piece.text, is_special=True)
            for index, piece in enumerate(model.pieces)
            if piece.kind in special and piece.text
        ],
        normalizer={"type": "Sequence", "normalizers": list(_normalizers(model, settings))},
        pre_tokenizer=_splits(model, settings),
        decoder={"type": "Sequence", "decoders": list(_decoders(model))},
        model=_model_json(model),
        post_processor=ends_around(ends),
    )
    return tokenizer, {f"{name}_token": texts[index] for name, index in named.items()}


def _model_json(model: _Model) -> dict[str, Any]:
    unknown = model.named.get("unk", 0)
    kind = model.trainer.get(3, _UNIGRAM)
    if kind == _UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[piece.text, piece.score] for piece in model.pieces],
            "byte_fallback": model.has_byte_fallback,
        }
    if kind != _PAIRS:
        raise ValueError("its model is one of words or letters")
    normal = {piece.text: piece.score for piece in model.pieces if piece.kind == _Kind.NORMAL}
    texts, scores = list(normal), list(normal.values())
    merges = sorted(cuts_of(texts, normal), key=lambda each: (-scores[each[0]], -len(each[1]), -len(each[2])))
    return pair_model(
        {piece.text: index for index, piece in enumerate(model.pieces)},
        [(left, right) for _, left, right in merges],
        unk_token=model.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
        # Pieces of the user's are whole words by the splits, and never made of others.
        ignore_merges=any(piece.kind == _Kind.USER_DEFINED for piece in model.pieces),
    )


def _normalizers(model: _Model, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    charsmap = model.normalizer.get(2)
    if charsmap:
        encoded = base64.b64encode(charsmap).decode()
        yield {"type": "Precompiled", "precompiled_charsmap": encoded}
    if model.flag(4):
        yield _replace({"Regex": rf"\A +|[ {_SPACE}]+\z"}, "")
        yield _replace({"Regex": " {2,}"}, " ")
    if model.flag(5):
        yield _replace({"String": " "}, _SPACE)
    if model.flag(3) and _prefixes_each_text(settings):
        yield _replace({"Regex": rf"\A{_SPACE}"}, 2 * _SPACE)  # a prefix is added where there is a space, too


def _splits(model: _Model, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if model.flag(3):
        where = "always" if _prefixes_each_text(settings) else "first"
        steps.append({"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": where, "split": False})
    own = [piece.text for piece in model.pieces if piece.kind == _Kind.USER_DEFINED]
    if own:
        pattern = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        steps.append(
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        )
    return {"type": "Sequence", "pretokenizers": steps} if steps else None


def _decoders(model: _Model) -> Iterator[dict[str, Any]]:
    yield _replace({"String": _SPACE}, " ")
    if model.has_byte_fallback:
        yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    if model.flag(3):
        yield {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _prefixes_each_text(settings: Mapping[str, Any]) -> bool:
    """Tell whether each text between special tokens gets a space before it, or the first alone."""
    return settings.get("legacy", True) is not False


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _read(content: bytes) -> _Model:
    model = _Model()
    texts: set[str] = set()
    for number, value in _fields(content):
        if number == _PIECE:
            parts = dict(_fields(value))
            (score,) = struct.unpack("<f", parts.get(2, b"\0\0\0\0"))
            piece = _Piece(parts.get(1, b"").decode(), score, parts.get(3, _Kind.NORMAL))
            if piece.text in texts:
                raise ValueError(f"it has the same piece twice, {piece.text[:40]!r}")
            if len(texts) == _MOST_PIECES:
                raise ValueError(f"it has more than {_MOST_PIECES} pieces")
            texts.add(piece.text)
            model.pieces.append(piece)
        elif number == _TRAINER:
            model.trainer = dict(_fields(value))
        elif number == _NORMALIZER:
            model.normalizer = dict(_fields(value))
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield numbers and values of a message: integers, or bytes of all other kinds."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        kind, size = key & 7, 0
        if kind == 0:
            value, place = _varint(content, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(content, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"it has a field of kind {kind}")
        if place + size > len(content):
            raise ValueError("it ends too early")
        yield key >> 3, content[place : place + size]
        place += size


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Read an integer; returns it and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            raise ValueError("it ends too early")
        byte = content[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("it has an integer that does not end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
