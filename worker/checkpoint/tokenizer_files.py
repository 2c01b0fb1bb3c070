"""A checkpoint's tokenizer.json, or one made of its vocabulary, with the tokens that files next to it name.

Owns: which tokens those are, the names by which templates know them, and the token that ends a text.
Source: transformers' AutoTokenizer, whose ids these tokens get.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from worker.checkpoint.checkpoint_files import read_json, read_json_if_there
from worker.checkpoint.vocabularies import byte_pairs, sentencepiece
from worker.checkpoint.vocabularies.cache_folder import VOCABULARIES, made_once
from worker.worker_errors import StartupError, refused_as

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TEKKEN = "tekken.json"
_MODELS = ("tokenizer.model", "tiktoken.model")
_MAX_VOCABULARY_BYTES = 1 << 28
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_END_OF_NAME, _NUMBERED = "_token", "added_tokens_decoder"
_AGAIN = "download it again"

_Token = dict[str, Any]
"""Text of a token, as `content`, with what tokenizer.json says of an added one."""


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The text of a tokenizer.json that has all tokens, and its parts."""

    text: bytes
    content: dict[str, Any]


def find_vocabulary(folder: Path) -> Path | None:
    """Find the file with a checkpoint's tokens; None if there is none that is read."""
    found = (folder / name for name in (TOKENIZER, _TEKKEN, *_MODELS))
    return next((path for path in (*found, *sorted(folder.glob("*.tiktoken"))) if path.is_file()), None)


def tokenizer_path(folder: Path) -> Path:
    """The folder's tokenizer.json, or one that is made of its vocabulary, in the user's cache.

    Raises StartupError for a vocabulary that cannot be made one. Without any, the file is not there.
    """
    vocabulary = find_vocabulary(folder)
    if vocabulary is None or vocabulary.name == TOKENIZER:
        return folder / TOKENIZER
    settings = _read_own_settings(folder)

    def write(written: Path) -> None:
        with refused_as(partial(StartupError, fix="take a copy with a tokenizer.json"), vocabulary):
            made = _made_of(vocabulary, settings)
            import tokenizers  # not at the top: `--help` needs none of it

            tokenizers.Tokenizer.from_buffer(orjson.dumps(made[0]))
        for name, content in zip((TOKENIZER, SETTINGS), made, strict=True):
            (written / name).write_bytes(orjson.dumps(content))

    said = orjson.dumps(settings)
    return made_once("tokenizers", [vocabulary], VOCABULARIES, write, settings=said) / TOKENIZER


def _made_of(vocabulary: Path, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make tokenizer.json and names of tokens. Raises ValueError and others for a file of another form."""
    if vocabulary.stat().st_size > _MAX_VOCABULARY_BYTES:
        raise ValueError("it is larger than any vocabulary")
    if vocabulary.name == _TEKKEN:
        return byte_pairs.read_tekken(vocabulary, settings)
    with vocabulary.open("rb") as file:
        is_sentencepiece = file.read(1) == sentencepiece.FIRST_BYTE
    if is_sentencepiece:
        return sentencepiece.read_sentencepiece(vocabulary, settings)
    return byte_pairs.read_tiktoken(vocabulary, settings)


def read_tokenizer(folder: Path) -> TokenizerFile:
    """Read tokenizer.json with all tokens. Raises StartupError, and OSError where there is none."""
    path = tokenizer_path(folder)
    text = path.read_bytes()
    settings = _read_settings(folder)
    with refused_as(partial(StartupError, fix=_AGAIN), path):
        content = orjson.loads(text)
        known = {token["content"]: token for token in content.get("added_tokens") or ()}
        lacking = list(_lacking(folder, settings, known))
        if lacking:
            import tokenizers  # not at the top: `--help` needs none of it

            backend = tokenizers.Tokenizer.from_buffer(text)
            backend.add_tokens([tokenizers.AddedToken(**token) for token in lacking])
            text = str(backend.to_str()).encode()
            content = orjson.loads(text)
        return TokenizerFile(text, content)


def named_tokens(folder: Path) -> dict[str, str]:
    """Texts of tokens by name: the usual ones, and those of the family, such as `image_token`."""
    return {name: token["content"] for name, token in _named(_read_settings(folder)).items()}


def end_token_id(folder: Path) -> int | None:
    """Look up the token that ends a text by the tokenizer's settings; None if they name none."""
    end = named_tokens(folder).get("eos_token")
    if end is None or find_vocabulary(folder) is None:
        return None
    added = read_tokenizer(folder).content.get("added_tokens") or ()
    return next((int(token["id"]) for token in added if token["content"] == end), None)


def _read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings, and names of tokens that a vocabulary in another form has by itself."""
    path = tokenizer_path(folder)
    made = {} if path.parent == folder else read_json(path.parent / SETTINGS)
    return made | _read_own_settings(folder)


def _read_own_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json and its older form, special_tokens_map.json, whose names come first.

    As in transformers, settings that describe their added tokens are newer: the older form is not read.
    """
    own, older = read_json_if_there(folder / SETTINGS), read_json_if_there(folder / "special_tokens_map.json")
    return own if own.get(_NUMBERED) is not None else {**own, **older}


def _named(settings: dict[str, Any]) -> dict[str, _Token]:
    found = {name: value for name, value in settings.items() if name.endswith(_END_OF_NAME)}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= extra
    return {name: token for name, value in found.items() if (token := _special(value)) is not None}


def _special(value: Any) -> _Token | None:
    """Read a text, or an object with a text; None for other values, such as that of `add_bos_token`."""
    token = {"content": value} if isinstance(value, str) else value
    if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
        return None
    return {**_described(token), "special": True}


def _described(token: _Token) -> _Token:
    return {"content": token["content"], **{name: token[name] for name in _FLAGS if name in token}}


def _lacking(folder: Path, settings: dict[str, Any], known: dict[str, _Token]) -> Iterator[_Token]:
    """Tokens that tokenizer.json lacks, or describes otherwise, in the order in which they get their ids."""
    named = _named(settings).values()
    extra = settings.get("extra_special_tokens")
    if not extra or isinstance(extra, dict):  # whose values have names, see _named
        extra = settings.get("additional_special_tokens") or ()
    special = {token["content"]: token for value in extra if (token := _special(value)) is not None}
    special = {token["content"]: token for token in named} | special
    if settings.get(_NUMBERED) is not None:
        numbered = [(int(number), _described(token)) for number, token in settings[_NUMBERED].items()]
    else:
        stored = read_json_if_there(folder / "added_tokens.json")
        numbered = [
            (int(number), {"content": text, "normalized": text not in special, "special": text in special})
            for text, number in stored.items()
            if text not in known
        ]
    described = {token["content"]: token for _, token in sorted(numbered, key=lambda each: each[0])}
    for text, token in described.items():
        if any(text == each["content"] for each in named):
            token["special"] = True
        if text not in known or any(known[text].get(name, False) != token[name] for name in token):
            yield token
    for text, token in special.items():
        if text not in known and text not in described:
            yield token
