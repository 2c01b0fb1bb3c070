r"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, parallel lists for completions.

Owns: names for tokens that are not whole characters, the offset of each token in the text, vLLM's shape for
the log-probabilities of a prompt, and the JSON of lists that are too long to be made at once.
Source: OpenAI's reference; `bytes:\xNN` names and the floor of -9999, as its API returns them.
"""

import codecs
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import orjson

from engine.types import ChosenLogprob, LogprobEntry, TokenText

_FLOOR = -9999.0
"""JSON has no minus infinity."""
_REPLACEMENT = "\ufffd"
_ITEMS_AT_ONCE = 64
"""Items of a list that are made JSON in one call, which holds the interpreter: 0.2 ms at 20 alternatives."""
COMPLETION_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class TokenNames(Enum):
    TEXT = "text"
    ID = "id"  # token_id:123, for clients that cannot do with a text that several tokens share


def chat_logprobs(tokens: Sequence[ChosenLogprob], names: TokenNames = TokenNames.TEXT) -> dict[str, Any]:
    content = [
        {**_entry(token.chosen, names), "top_logprobs": [_entry(top, names) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(entry: LogprobEntry, names: TokenNames) -> dict[str, Any]:
    token = entry.token if names is TokenNames.TEXT else _name(entry, names)
    return {"token": token, "logprob": max(entry.logprob, _FLOOR), "bytes": list(entry.token_bytes)}


class GrowingLists:
    """Lists of one object of a whole reply, made JSON as their items come.

    A reply may have half a million alternatives. Made at its end they would hold the event loop for seconds;
    kept as objects until then they would be visited again and again by Python's collector.
    """

    def __init__(self, *names: str) -> None:
        self._pieces: dict[str, list[bytes]] = {name: [] for name in names}

    def add(self, lists: Mapping[str, Sequence[Any]]) -> None:
        """Append items to each list that is named."""
        for name, items in lists.items():
            for start in range(0, len(items), _ITEMS_AT_ONCE):
                self._pieces[name].append(orjson.dumps(items[start : start + _ITEMS_AT_ONCE])[1:-1])

    def follow(self, first: "GrowingLists") -> None:
        """Put another's items before all of these."""
        for name, pieces in first._pieces.items():
            self._pieces[name][:0] = pieces

    def json(self) -> dict[str, orjson.Fragment]:
        """Each list, as orjson takes it."""
        return {name: orjson.Fragment(b"[%b]" % b",".join(pieces)) for name, pieces in self._pieces.items()}


class TokenOffsets:
    """Offset of the next token, in characters of the text so far."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_offset(self, token: ChosenLogprob) -> int:
        # A character split over tokens begins where its first byte stands.
        offset = self._offset
        if not token.is_hidden:
            begun, _ = self._decoder.getstate()
            first = token.chosen.token_bytes[:1]
            if begun and first and not b"\x80" <= first <= b"\xbf":
                offset += 1  # the character that was begun stays broken: one mark stands for it
            self._offset += len(self._decoder.decode(token.chosen.token_bytes))
        return offset


class EchoOffsets:
    """Offset of a prompt's next token in the prompt's text.

    The tokens of a text need not add up to it: special tokens around it are not in it, and a space before
    its first word is.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_offset(self, token_bytes: bytes) -> int:
        offset = self._offset
        added = self._decoder.decode(token_bytes)
        if offset == 0 and added.startswith(" ") and not self._text.startswith(added):
            added = added[1:]
        if not self._text.startswith(added, offset):
            # How many marks stand for a run of broken bytes depends on the tokenizer: go on behind them.
            added = added.strip(_REPLACEMENT)
            while self._text.startswith(_REPLACEMENT, self._offset):
                self._offset += 1
        if self._text.startswith(added, self._offset):
            self._offset += len(added)
        return offset


def completion_logprobs(
    tokens: Sequence[ChosenLogprob], offsets: TokenOffsets, names: TokenNames = TokenNames.TEXT
) -> dict[str, Any]:
    return {
        "tokens": [_name(token.chosen, names) for token in tokens],
        "token_logprobs": [max(token.chosen.logprob, _FLOOR) for token in tokens],
        "top_logprobs": [_top(token, len(token.top), names) for token in tokens],
        "text_offset": [offsets.next_offset(token) for token in tokens],
    }


def echoed_logprobs(
    first: TokenText, rest: Sequence[ChosenLogprob], echo: str, *, num_top: int, names: TokenNames
) -> dict[str, Any]:
    """The `logprobs` of an echoed prompt. Nothing stands before its first token, which therefore has null."""
    offsets = EchoOffsets(echo)
    return {
        "tokens": [_name(first, names), *(_name(token.chosen, names) for token in rest)],
        "token_logprobs": [None, *(max(token.chosen.logprob, _FLOOR) for token in rest)],
        "top_logprobs": [None, *(_top(token, num_top, names) for token in rest)],
        "text_offset": [
            offsets.next_offset(token_bytes)
            for token_bytes in (first.token_bytes, *(token.chosen.token_bytes for token in rest))
        ],
    }


def joined(lists: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Append the lists of a continuation to the lists of its prompt."""
    return {name: lists[name] + more[name] for name in lists}


def prompt_logprobs(tokens: Sequence[ChosenLogprob], *, num_top: int) -> orjson.Fragment:
    """List an object by token id for each token of the prompt, as vLLM has it; null for the first one."""
    lists = GrowingLists("prompt")
    lists.add({"prompt": [None]})
    for start in range(0, len(tokens), _ITEMS_AT_ONCE):
        lists.add({"prompt": [_by_id(token, num_top) for token in tokens[start : start + _ITEMS_AT_ONCE]]})
    return lists.json()["prompt"]


def _by_id(token: ChosenLogprob, num_top: int) -> dict[str, Any]:
    """The chosen token first, and once."""
    ranked = {entry.token_id: (rank, entry) for rank, entry in enumerate(token.top[:num_top], start=1)}
    ranked = {token.chosen.token_id: (token.rank, token.chosen)} | ranked
    return {
        str(token_id): {"logprob": max(entry.logprob, _FLOOR), "rank": rank, "decoded_token": entry.token}
        for token_id, (rank, entry) in ranked.items()
    }


def _top(token: ChosenLogprob, num_top: int, names: TokenNames) -> dict[str, float]:
    # The chosen token is always among them, so that there may be one more than was asked for.
    entries = (*token.top[:num_top], token.chosen)
    return {_name(entry, names): max(entry.logprob, _FLOOR) for entry in entries}


def _name(entry: LogprobEntry | TokenText, names: TokenNames) -> str:
    """Return the token's text, or its bytes: several half characters must not share a key."""
    if names is TokenNames.ID:
        return f"token_id:{entry.token_id}"
    if _REPLACEMENT not in entry.token:
        return entry.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
