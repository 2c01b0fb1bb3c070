"""Entries of tokenizer.json that several kinds of vocabularies have in common.

Source: the file format of the `tokenizers` library.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

_MAX_LETTERS = 1024
"""Limit of a token that is made of others: all its cuts are tried."""
_MAX_LETTERS_OF_CUTS = 1 << 27
"""Limit of all that is cut, in letters; vocabularies have a tenth of it."""


def tokenizer_json(**parts: Any) -> dict[str, Any]:
    """The whole of it."""
    return {"version": "1.0", "truncation": None, "padding": None, **parts}


def added_token(index: int, content: str, *, is_special: bool) -> dict[str, Any]:
    """A token that is searched for before a text is split."""
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def pair_model(ids: dict[str, int], merges: list[tuple[str, str]], **others: Any) -> dict[str, Any]:
    """The model of pairs that are merged in their order; `others` are entries that differ from the usual."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **others,
        "vocab": ids,
        "merges": merges,
    }


def byte_level_parts(
    model: dict[str, Any],
    added: list[dict[str, Any]],
    *,
    patterns: Sequence[str],
    normalizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The entries of a tokenizer whose tokens are bytes, each of them a letter, of texts cut by patterns."""
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in patterns
    ]
    return {
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, {**bytes_of, "use_regex": False}]},
        "decoder": {**bytes_of, "use_regex": True},
        "model": model,
    }


def byte_letters() -> list[str]:
    """The letter that stands for each byte: its own where that can be seen, otherwise one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte if byte in seen else 256 + unseen.index(byte)) for byte in range(256)]


def ends_around(added: dict[str, tuple[str, int]]) -> dict[str, Any] | None:
    """Put tokens before and behind each text."""
    if not added:
        return None

    def template(*sequences: str) -> list[dict[str, Any]]:
        pieces = [{"Sequence": {"id": each, "type_id": 0}} for each in sequences]
        around = {name: [{"SpecialToken": {"id": token, "type_id": 0}}] for name, (token, _) in added.items()}
        return [*around.get("bos", []), *pieces, *around.get("eos", [])]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]} for token, number in added.values()
        },
    }


def cuts_of(tokens: Iterable[str], known: Container[str]) -> Iterator[tuple[int, str, str]]:
    """Yield every way to make a token of two others that are known, with the token's place.

    Raises ValueError for tokens so long that their cuts would take minutes.
    """
    num_letters = 0
    for place, token in enumerate(tokens):
        num_letters += len(token) ** 2
        if len(token) > _MAX_LETTERS or num_letters > _MAX_LETTERS_OF_CUTS:
            raise ValueError(f"token {place} has {len(token)} letters, which are too many to be cut")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                yield place, left, right
