"""Token ids to text by increments: whole characters only, and never a part of a stop string.

Owns: the split into text to send now and text to hold back. The pieces, joined, are the text that decoding
all tokens at once gives, however the tokens were divided into pushes.
Never: decodes more than it must; one token costs about a microsecond.

    tokens ──▶ ByteText | WindowText ──▶ AnswerGate ──▶ StopMatcher ──▶ pieces
               holds unfinished          passes thoughts holds what may become
               characters                by             a stop string

Malformed output may differ from decoding at once: a byte-fallback decoder spoils the whole run of <0xNN>
tokens around a wrong byte; here the good characters of that run are sent already.
"""

import codecs
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

from engine.text.tokenizer import DecoderKind, SpecialTokens, Tokenizer
from scheduler.input_messages import AnswerStart

REPLACEMENT = "\ufffd"

# No character has more than 4 bytes, so no more than 4 tokens of the prompt can have begun the first one.
_NUM_CONTEXT_TOKENS = 4
# How a byte within a character begins, in UTF-8.
_CONTINUATION = 0b1000_0000
# A window without a whole character after this many tokens will never have one: the bytes are noise.
_MAX_UNFINISHED_TOKENS = 16


class StopText(StrEnum):
    """Whether the stop string that ended a text is part of it."""

    EXCLUDE = "exclude"
    INCLUDE = "include"


class IncrementalDetokenizer:
    """The text of one choice.

    `prompt_token_ids` is context only: a space that a tokenizer drops at the start of a text is kept after
    a prompt, and a character begun in the prompt is finished. Without it, the text is exactly that of
    decoding the output alone. `shown` are special tokens that are always text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: tuple[int, ...] = (),
        stop: "StopMatcher | None" = None,
        special: SpecialTokens = SpecialTokens.SKIP,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        table = tokenizer.bytes_by_id(special, shown=shown)
        self._text = _text_source(tokenizer, prompt_token_ids, table)
        self._matcher = stop
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched if self._matcher else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens taken in, up to the one that completed a stop string."""
        return self._num_tokens

    def push(self, token_ids: Iterable[int]) -> str:
        """Take in tokens; return the text that may be sent. Empty after a stop string was found."""
        if self._matcher is None:
            ids = tuple(token_ids)
            self._num_tokens += len(ids)
            return self._text.push(ids)
        pieces = []
        for token_id in token_ids:
            if self._matcher.matched is not None:
                break
            self._num_tokens += 1
            pieces.append(self._matcher.push(self._text.push((token_id,))))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the held text. An unfinished character becomes U+FFFD, as in decoding at once."""
        rest = self._text.finish()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest) + self._matcher.finish()


class AnswerGate:
    """Passes thoughts before an answer by, and the white space around them: no stop string counts there."""

    def __init__(self, answer: AnswerStart) -> None:
        self._begin, self._end = answer.begin, answer.text
        self._is_in_thoughts = not answer.begin
        self._is_behind = False
        """The mark that ends the thoughts has come."""
        self._tail = ""
        """The last characters of the thoughts, which may begin the mark."""
        self.held = ""
        """Text that may become the mark that begins them."""
        self.is_open = False
        """The answer has begun."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text before the answer, and that of the answer."""
        if not (self._is_in_thoughts or self._is_behind):
            text, self.held = self.held + text, ""
            visible = text.lstrip()
            if self._begin.startswith(visible) and visible != self._begin:
                self.held = text
                return "", ""
            self._is_in_thoughts = visible.startswith(self._begin)
            self._is_behind = not self._is_in_thoughts
        passed = ""
        if self._is_in_thoughts:
            passed, text = self._pass_thoughts(text)
        answer = text.lstrip() if self._is_behind and not self.is_open else text
        self.is_open = self._is_behind and (self.is_open or bool(answer))
        return passed + text[: len(text) - len(answer)], answer

    def _pass_thoughts(self, text: str) -> tuple[str, str]:
        """Divide a text behind the mark that ends the thoughts."""
        known = self._tail + text
        at = known.find(self._end)
        if at == -1:
            num_kept = len(self._end) - 1
            self._tail = known[len(known) - num_kept :] if num_kept and len(known) > num_kept else known
            return text, ""
        self._is_in_thoughts, self._is_behind = False, True
        begin = at + len(self._end) - len(self._tail)
        return text[:begin], text[begin:]


class StopMatcher:
    """Finds the first of several strings in a text that comes in pieces, from its answer on.

    The first complete stop string ends the text; of several complete at the same character, the longest.
    A stop string that ends within the first `min_tokens` pieces is text like any other.
    Raises ValueError for an empty stop string.
    """

    def __init__(
        self,
        stop: tuple[str, ...],
        stop_text: StopText = StopText.EXCLUDE,
        *,
        answer: AnswerStart | None = None,
        min_tokens: int = 0,
    ) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._stop = stop
        self._stop_text = stop_text
        self._gate = None if answer is None else AnswerGate(answer)
        self._held = ""
        self._num_exempt = min_tokens
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take in the text of a token; return what cannot belong to a stop string any more."""
        self._num_exempt -= 1
        if not text or self.matched is not None:
            return ""
        passed = ""
        if self._gate is not None:
            passed, text = self._gate.push(text)
            if self._gate.is_open:
                self._gate = None
        num_held = len(self._held)
        text = self._held + text
        found = self._first_match(text, num_held) if self._num_exempt < 0 else None
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return passed + text[: end if self._stop_text is StopText.INCLUDE else start]
        held_from = self._held_from(text)
        self._held = text[held_from:]
        return passed + text[:held_from]

    def finish(self) -> str:
        """Return the held text: at the end it is no stop string."""
        rest, self._held = self._held, ""
        return rest if self._gate is None else self._gate.held + rest

    def _first_match(self, text: str, num_old: int) -> tuple[int, int, str] | None:
        """Find the match that ends first behind `num_old` characters, of several the longest.

        Returns (end, start, stop string).
        """
        first = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start != -1:
                match = (start + len(stop), start, stop)
                first = match if first is None else min(first, match)
        return first

    def _held_from(self, text: str) -> int:
        """Find the start of the longest suffix that begins a stop string; len(text) without one."""
        held_from = len(text)
        for stop in self._stop:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), held_from)
            while at != -1 and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1, held_from)
            if at != -1:
                held_from = at
        return held_from


class _TextSource(Protocol):
    def push(self, token_ids: tuple[int, ...]) -> str: ...

    def finish(self) -> str: ...


def _text_source(tokenizer: Tokenizer, prompt: tuple[int, ...], table: Mapping[int, bytes]) -> _TextSource:
    context = _visible_tail(prompt, table)
    if tokenizer.rule.kind is DecoderKind.OPAQUE:
        return WindowText(tokenizer, table, context)
    return ByteText(tokenizer, table, context)


def _visible_tail(prompt: tuple[int, ...], table: Mapping[int, bytes]) -> tuple[int, ...]:
    tail: list[int] = []
    for token_id in reversed(prompt):
        if len(tail) == _NUM_CONTEXT_TOKENS:
            break
        if table[token_id]:
            tail.append(token_id)
    tail.reverse()
    # A tail that begins inside of a character would spoil the run of bytes that follows.
    while tail and table[tail[0]][0] & 0b1100_0000 == _CONTINUATION:
        del tail[0]
    return tuple(tail)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace each byte by U+FFFD, as the byte-fallback decoder does, not each broken sequence."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


_EACH_BYTE = "tokenyard-replace-each-byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)
_UTF8 = codecs.getincrementaldecoder("utf-8")


class ByteText:
    """Text of a tokenizer whose tokens are bytes to concatenate: exact, O(1) a token."""

    def __init__(self, tokenizer: Tokenizer, table: Mapping[int, bytes], context: tuple[int, ...]) -> None:
        is_byte_level = tokenizer.rule.kind is DecoderKind.BYTE_LEVEL
        self._table = table
        self._utf8 = _UTF8("replace" if is_byte_level else _EACH_BYTE)
        # The context's text belongs to the prompt; only the bytes of an unfinished character matter.
        self._utf8.decode(b"".join([table[token_id] for token_id in context]))
        self._begun, _ = self._utf8.getstate()
        self._num_strippable = 0 if context else tokenizer.rule.num_stripped_spaces

    def push(self, token_ids: tuple[int, ...]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._begun and data:
            self._settle_begun(data)
        text = self._utf8.decode(data)
        return self._strip(text) if self._num_strippable else text

    def _settle_begun(self, data: bytes) -> None:
        """Leave to the prompt the character that it began, unless the first byte of `data` goes on with it.

        Its U+FFFD would be the first character of a text that a grammar or a stop string reads without it.
        """
        begun, self._begun = self._begun, b""
        try:
            _UTF8("strict").decode(begun + data[:1])
        except UnicodeDecodeError:
            self._utf8.reset()

    def finish(self) -> str:
        if self._begun:  # nothing went on with it
            return ""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        """Drop the leading spaces that the decoder drops from the whole text."""
        while text and self._num_strippable:
            if text[0] != " ":
                self._num_strippable = 0
                break
            text = text[1:]
            self._num_strippable -= 1
        return text


class WindowText:
    """Text of any other decoder: a token's text is its addition to the decoded tokens just before it.

        ids:   … a b │ c d │ e      a b   context, sent
                     ▲     ▲        c d   already decoded into text that was sent, or context
               window      read     e     new; held while the decode ends in an unfinished character

    Assumes that a token's text depends on near neighbours only, as WordPiece and Metaspace do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: Mapping[int, bytes],
        context: tuple[int, ...],
    ) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._window = list(context)
        self._num_read = len(context)
        self._read_text = self._decode(self._window)

    def push(self, token_ids: tuple[int, ...]) -> str:
        pieces = []
        for token_id in token_ids:
            # A token without text would leave the window without context for the next one.
            if self._table[token_id]:
                self._window.append(token_id)
                pieces.append(self._advance())
        return "".join(pieces)

    def finish(self) -> str:
        return self._release(self._decode(self._window))

    def _advance(self) -> str:
        text = self._decode(self._window)
        num_unfinished = len(self._window) - self._num_read
        if text.endswith(REPLACEMENT) and num_unfinished < _MAX_UNFINISHED_TOKENS:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        """Return what `text`, the decoded window, adds; move the window to its last tokens."""
        unread = self._window[self._num_read :]
        if not unread:
            return ""
        # A malformed run may change text that is already sent: then decode the new tokens alone.
        is_longer = text.startswith(self._read_text)
        added = text[len(self._read_text) :] if is_longer else self._decode(unread)
        self._window = unread
        self._num_read = len(unread)
        self._read_text = self._decode(unread)
        return added

    def _decode(self, token_ids: list[int]) -> str:
        # Tokens that the table hides never come into the window.
        return self._tokenizer.decode(token_ids, special=SpecialTokens.KEEP)
