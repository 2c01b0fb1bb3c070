"""Values with unquoted keys, and strings between marks of their own, as JSON.

    functiongemma   call:f{a:<escape>x<escape>,n:1}
    gemma4          call:f{a:<|"|>x<|"|>,n:1}

Owns: the signs that JSON writes in another way; json_text.py reads the rest.
Never: marks around calls, or pieces: a call is read when it is complete.
Source: the chat templates of FunctionGemma and Gemma 4. Models also write JSON's and Python's quotes there,
round brackets, and no `call`.
"""

import json
import re
from functools import cache

from server.reply.reading.json_text import JsonText, json_word
from server.reply.reading.row import ENDED, NO_MARKS, ToolSchemas

_HEAD = re.compile(r"\s*+(?:call)?:?\s*+([^\s{}()\"'<>:,]+)\s*+([{(])")  # no backing up: a text may be long
_BRACKETS = {"(": "{", ")": "}"}


def read_brace_call(quote: str, text: str, _: ToolSchemas) -> list[tuple[str, str]]:
    """Return the name of a call and the JSON text of its arguments; none if the text is anything else.

    `quote`: mark at both ends of a string, besides the quotes of JSON and Python.
    """
    found = _HEAD.match(text)
    if found is None:
        return []
    written = _signs(quote).sub(_as_in_json, text[found.end() - 1 :])
    out: list[str] = []
    value = JsonText(NO_MARKS, out)
    at = value.feed(written, 0)
    is_whole = value.progress is ENDED and not written[at:].strip()
    return [(found[1], "".join(out))] if is_whole else []


@cache
def _signs(quote: str) -> re.Pattern[str]:
    """Strings, and signs with the words behind them: a value behind a colon, else a key or an item."""
    mark = re.escape(quote)
    return re.compile(
        rf"""{mark}(?P<raw>.*?){mark}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?P<end>\))"""
        rf"""|(?P<colon>[:=])\s*(?P<word>(?!{mark})[^\s"'{{(\[,}}\])][^,}}\])]*)?"""
        rf"""|(?P<sign>[{{(\[,])\s*(?P<run>(?!{mark})[^\s"'{{(\[,}}\]):=][^,}}\]):=]*)?""",
        re.DOTALL,
    )


def _as_in_json(found: re.Match[str]) -> str:
    raw, end, colon, word, sign, run = found.groups()
    if raw is not None:
        return json.dumps(raw, ensure_ascii=False)
    text = (word or run or "").strip()
    is_key = run is not None and found.string.startswith((":", "="), found.end())
    written = json.dumps(text, ensure_ascii=False) if is_key else json_word(text) if text else ""
    if colon or sign:
        return (": " if colon else ", " if sign == "," else _BRACKETS.get(sign, sign)) + written
    return _BRACKETS.get(end, found.group())
