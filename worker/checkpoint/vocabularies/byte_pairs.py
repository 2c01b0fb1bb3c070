"""Vocabularies of bytes by rank, tekken.json and tiktoken's, as tokenizer.json.

Never: runs the code that a checkpoint brings for such a file.
Source: the files of Mistral's models, and of Moonshot's; ids are those of the libraries that wrote them.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from worker.checkpoint.vocabularies.splits import BY_THREE_DIGITS, KIMI
from worker.checkpoint.vocabularies.tokenizer_parts import (
    added_token,
    byte_letters,
    byte_level_parts,
    cuts_of,
    ends_around,
    pair_model,
    tokenizer_json,
)

_TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Files of 2024 name none.
_FIRST_TEKKEN_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_MOST_SPECIAL = 8192
"""Limit of special tokens; models have a thousand."""
_PATTERNS: dict[str | None, str] = {
    "TikTokenTokenizer": KIMI,
    None: BY_THREE_DIGITS,
    **dict.fromkeys(("PreTrainedTokenizerFast", "TokenizersBackend"), BY_THREE_DIGITS),
    **dict.fromkeys(("LlamaTokenizer", "LlamaTokenizerFast", "ChatGLM4Tokenizer"), BY_THREE_DIGITS),
}
"""Pattern by the class that tokenizer_config.json names."""

_Files = tuple[dict[str, Any], dict[str, Any]]
"""tokenizer.json, and the names of tokens for tokenizer_config.json."""


def read_tekken(path: Path, settings: Mapping[str, Any]) -> _Files:
    """Raise ValueError, LookupError or TypeError for a file of another form."""
    content = orjson.loads(path.read_bytes())
    config, stored = content["config"], content.get("special_tokens")
    special = list(_FIRST_TEKKEN_TOKENS)
    if stored is not None:
        special = [each["token_str"] for each in sorted(stored, key=lambda each: each["rank"])]
    num_special = config.get("default_num_special_tokens") or len(special)
    num_ids = config.get("default_vocab_size")  # the file has more of them than the model
    most = _MOST_SPECIAL if num_ids is None else min(_MOST_SPECIAL, num_ids)
    if not len(special) <= num_special <= most:
        raise ValueError(f"it has {len(special)} of {num_special} special tokens, where {most} may be")
    special += [f"<SPECIAL_{index}>" for index in range(len(special), num_special)]
    tokens = [base64.b64decode(each["token_bytes"]) for each in content["vocab"]]
    if num_ids is not None:
        tokens = tokens[: num_ids - num_special]
    names = {name: token for name, token in _TEKKEN_NAMES.items() if token in special}
    adds_bos = settings.get("add_bos_token", True) and "bos_token" in names
    ends = {"bos": ("<s>", special.index("<s>"))} if adds_bos else {}
    return _as_json(tokens, dict(enumerate(special)), config["pattern"], ends), names


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> _Files:
    """Raise ValueError or TypeError for a file of another form, and for patterns that are in code alone."""
    named = settings.get("tokenizer_class")
    if named not in _PATTERNS:
        raise ValueError(f"it splits texts by code of its own, {named}, which is not run")
    ranked = [line.split() for line in path.read_bytes().splitlines() if line]
    if [int(rank) for _, rank in ranked] != list(range(len(ranked))):
        raise ValueError("its ranks are not in order")
    tokens = [base64.b64decode(token, validate=True) for token, _ in ranked]
    stored = settings.get("added_tokens_decoder") or {}
    added = {int(index): token["content"] for index, token in stored.items()}
    last = max([len(tokens) - 1, *added])
    if last >= 2 * len(tokens):
        raise ValueError(f"token {last} is far behind the others")
    # Ids without a token have one all the same, so that those behind them keep theirs.
    special = {
        index: added.get(index, f"<|reserved_token_{index}|>") for index in range(len(tokens), last + 1)
    }
    return _as_json(tokens, special, _PATTERNS[named], {}), {}


def _as_json(
    tokens: Sequence[bytes], special: Mapping[int, str], pattern: str, ends: dict[str, tuple[str, int]]
) -> dict[str, Any]:
    """Give ids by rank to `tokens`, before or behind those of special ones."""
    letters = byte_letters()
    first = 0 if min(special, default=1) else len(special)
    spelled = ["".join(letters[byte] for byte in token) for token in tokens]
    ids = {text: index for index, text in enumerate(spelled, first)} | {
        text: index for index, text in special.items()
    }
    if len(ids) != len(tokens) + len(special):
        raise ValueError("it has the same token twice")
    merges = sorted(cuts_of(spelled, ids), key=lambda each: (each[0], ids[each[1]], ids[each[2]]))
    model = pair_model(ids, [(left, right) for _, left, right in merges], ignore_merges=True)
    added = [added_token(index, text, is_special=True) for index, text in special.items()]
    return tokenizer_json(
        **byte_level_parts(model, added, patterns=[pattern]), post_processor=ends_around(ends)
    )
