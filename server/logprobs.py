r"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, parallel lists for completions.

Owns: names for tokens that are not whole characters, and where each token begins in the text.
Source: OpenAI's reference; `bytes:\xNN` names and the floor of -9999 are what its API returns.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from engine.types import LogprobEntry, TokenLogprob

_FLOOR = -9999.0
"""JSON has no minus infinity."""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    content = [
        {**_entry(token.chosen), "top_logprobs": [_entry(top) for top in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(entry: LogprobEntry) -> dict[str, Any]:
    return {"token": entry.token, "logprob": max(entry.logprob, _FLOOR), "bytes": list(entry.token_bytes)}


class TokenOffsets:
    """Where the next token begins, in characters of the text so far."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_offset(self, token: TokenLogprob) -> int:
        # A character split over tokens begins where its first byte stands.
        offset = self._offset
        if not token.is_hidden:
            self._offset += len(self._decoder.decode(token.chosen.token_bytes))
        return offset


def completion_logprobs(tokens: Sequence[TokenLogprob], offsets: TokenOffsets) -> dict[str, Any]:
    """The `logprobs` of a completion choice."""
    return {
        "tokens": [_name(token.chosen) for token in tokens],
        "token_logprobs": [max(token.chosen.logprob, _FLOOR) for token in tokens],
        # The chosen token is always among them, so that there may be one more than was asked for.
        "top_logprobs": [
            {_name(entry): max(entry.logprob, _FLOOR) for entry in (*token.top, token.chosen)}
            for token in tokens
        ],
        "text_offset": [offsets.next_offset(token) for token in tokens],
    }


def _name(entry: LogprobEntry) -> str:
    """Return the token's text, or its bytes: several half characters must not share a key."""
    if "\ufffd" not in entry.token:
        return entry.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)
