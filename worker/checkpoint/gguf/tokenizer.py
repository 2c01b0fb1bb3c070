"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Owns: byte-level pairs ("gpt2"), pairs of sentencepiece by rank ("llama") or as stored ("gemma4"), and chat
templates.
Source: the metadata that llama.cpp's converter writes; the file format of the `tokenizers` library.
"""

import logging
import re
from typing import Any, NamedTuple

from worker.checkpoint.gguf.config import CONTROL, NORMAL, ends_of, named_ids
from worker.checkpoint.gguf.file import GgufFile, damaged, other_file, other_form
from worker.checkpoint.vocabularies.splits import SPLITS
from worker.checkpoint.vocabularies.tokenizer_parts import (
    added_token,
    byte_letters,
    byte_level_parts,
    cuts_of,
    ends_around,
    pair_model,
    tokenizer_json,
)
from worker.worker_errors import StartupError, refused_as

log = logging.getLogger(__name__)

_SPACE = "▁"
_STORED_PAIRS = "gemma4"
_USER_DEFINED = 4
_PHI3 = re.compile("phi[- ]?3", re.IGNORECASE)
_KEEP_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi 3 that leave spaces behind them; its others take them along."""
_NO_TOKEN = (1 << 32) - 1
"""Writers' -1."""
_TEMPLATE = "tokenizer.chat_template"
_GEMMAS = frozenset({"gemma", "gemma2", "gemma3", "gemma4"})


class _Vocabulary(NamedTuple):
    tokens: list[str]
    """Texts by id, each of them once."""
    kinds: list[int]


def tokenizer_of(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json. Raises StartupError for a tokenizer that is not known."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts, adds_bos = _byte_level(file)
    elif kind in ("llama", _STORED_PAIRS):
        parts, adds_bos = _sentencepiece(file), True
    else:
        raise StartupError(
            f"{file.path.name} has a tokenizer of kind {kind!r}",
            fix="take a GGUF file with gpt2, llama or gemma4",
        )
    ends = {
        # Some files of Gemma 4 deny it, which the model does not bear.
        "bos": kind == _STORED_PAIRS or _flag(file, "add_bos_token", adds_bos),
        "eos": _flag(file, "add_eos_token", default=False),
    }
    special = _special_tokens(file, parts["model"]["vocab"])
    added = {name: special[name] for name, adds in ends.items() if adds and name in special}
    tokenizer = tokenizer_json(**parts, post_processor=ends_around(added))
    config: dict[str, Any] = {f"{name}_token": token for name, (token, _) in special.items()}
    templates = _templates(file)
    return tokenizer, config | ({"chat_template": templates} if templates else {})


def _flag(file: GgufFile, name: str, default: bool) -> bool:  # noqa: FBT001 -- a value of the file, not a switch
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))


def _vocabulary(file: GgufFile) -> _Vocabulary:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise other_file(f"{file.path.name} has no tokenizer.ggml.tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise damaged(f"tokenizer.ggml.token_type is for {len(kinds)} of {len(tokens)} tokens")
    return _Vocabulary(tokens, kinds)


def _ids(tokens: list[str]) -> dict[str, int]:
    """Ids by text. Of equal texts the first has it; the others keep their place under a name of their own."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token if token not in ids else f"[number {index}]", index)
    return ids


def _added(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[dict[str, Any]]:
    """Tokens that are searched for before a text is split."""
    ends = ends_of(vocabulary.tokens)
    return [
        added_token(index, token, is_special=kind == CONTROL or token in ends)
        for index, (token, kind) in enumerate(zip(*vocabulary, strict=True))
        if (kind in (CONTROL, _USER_DEFINED) or token in ends) and ids.get(token) == index
    ]


def _byte_level(file: GgufFile) -> tuple[dict[str, Any], bool]:
    named = file.metadata.get("tokenizer.ggml.pre")
    split = SPLITS.get(str(named))
    if split is None:
        raise other_form(f"{file.path.name} splits text by rules named {named!r}")
    vocabulary = _vocabulary(file)
    alphabet = byte_letters()
    letters, texts, ends = set(alphabet), set(vocabulary.tokens), ends_of(vocabulary.tokens)
    spelled = []
    for token, kind in zip(*vocabulary, strict=True):
        in_bytes = "".join(alphabet[byte] for byte in token.encode())
        is_spelled = kind in (CONTROL, _USER_DEFINED) or token in ends or letters.issuperset(token)
        spelled.append(token if is_spelled or in_bytes in texts else in_bytes)
    ids = _ids(spelled)
    model = pair_model(ids, _stored_merges(file, ids), ignore_merges=split.ignores_merges)
    added = _added(vocabulary, ids)
    parts = byte_level_parts(model, added, patterns=split.patterns, normalizer=split.normalizer)
    return parts, split.adds_bos


def _stored_merges(file: GgufFile, ids: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in file.metadata.get("tokenizer.ggml.merges") or []:
        left, _, right = merge.partition(" ") if not merge.startswith(" ") else ("", "", "")
        if left + right not in ids or left not in ids or right not in ids:
            raise damaged(f"tokenizer.ggml.merges has {merge[:40]!r}, of which not all are tokens")
        merges.append((left, right))
    if not merges:
        raise other_file(f"{file.path.name} has no tokenizer.ggml.merges")
    return merges


def _sentencepiece(file: GgufFile) -> dict[str, Any]:
    vocabulary = _vocabulary(file)
    is_gemma = file.architecture in _GEMMAS
    has_merges = file.metadata.get("tokenizer.ggml.model") == _STORED_PAIRS
    if is_gemma:  # runs of spaces are stored as such, but text has marks in their place
        respelled = [
            _SPACE * len(each) if each and not each.strip(" ") else each for each in vocabulary.tokens
        ]
        vocabulary = vocabulary._replace(tokens=respelled)
    ids = _ids(vocabulary.tokens)
    has_prefix = _flag(file, "add_space_prefix", default=not is_gemma)
    merges = (
        _stored_merges(file, ids)
        if has_merges
        else _merges_by_rank(vocabulary, ids, _ranks(file, vocabulary, by_place=is_gemma))
    )
    unknown = named_ids(file).get("unknown")
    added = _added(vocabulary, ids)
    if file.architecture == "phi3" and _PHI3.search(str(file.metadata.get("general.name"))):
        added = [{**each, "rstrip": each["content"] not in _KEEP_SPACES} for each in added]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, Any] = replace
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": pair_model(
            ids,
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _ranks(file: GgufFile, vocabulary: _Vocabulary, *, by_place: bool) -> list[float]:
    """Rank of the pair that becomes each token: lower ones are merged first."""
    if by_place:
        return [float(index) for index in range(len(vocabulary.tokens))]
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise other_file(f"{file.path.name} has no score for each token (tokenizer.ggml.scores)")
    return [-score for score in scores]


def _merges_by_rank(
    vocabulary: _Vocabulary, ids: dict[str, int], ranks: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others; for equal ranks, longer parts first, as they come."""
    made = (
        token if kind in (NORMAL, _USER_DEFINED) and ids.get(token) == index else ""
        for index, (token, kind) in enumerate(zip(*vocabulary, strict=True))
    )
    with refused_as(other_file, "tokenizer.ggml.tokens"):
        found = list(cuts_of(made, ids))
    found.sort(key=lambda each: (ranks[each[0]], -len(each[1]), -len(each[2])))
    return [(left, right) for _, left, right in found]


def _special_tokens(file: GgufFile, ids: dict[str, int]) -> dict[str, tuple[str, int]]:
    """Text and id of the tokens that have a name. Raises StartupError for bos or eos that is none."""
    texts = {index: token for token, index in ids.items()}
    named = named_ids(file)
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if key in named:
            found[name] = (texts[named[key]], named[key])
        elif name in ("bos", "eos") and number not in (None, _NO_TOKEN):
            raise other_file(f"tokenizer.ggml.{key}_token_id {number} is no token")
        elif number is not None:
            log.warning("tokenizer.ggml.%s_token_id %.20s is no token and is passed over", key, number)
    return found


def _templates(file: GgufFile) -> str | list[dict[str, str]] | None:
    """One chat template, or several by name."""
    default = file.metadata.get(_TEMPLATE)
    if not isinstance(default, str):
        return None
    named = {
        key.removeprefix(f"{_TEMPLATE}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(value, str)
    }
    if not named:
        return default
    return [{"name": name, "template": text} for name, text in ({"default": default} | named).items()]
