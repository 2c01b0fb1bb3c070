"""Text to token ids and back, by the checkpoint's tokenizer.json.

Source: the file formats of the `tokenizers` library; the byte alphabet is that of GPT-2's byte-level BPE.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import RequestRejected
from engine.types import TextCut, TokenizedText
from worker.checkpoint import checkpoint_files
from worker.checkpoint.tokenizer_files import TOKENIZER, find_vocabulary, named_tokens, read_tokenizer
from worker.worker_errors import StartupError, one_line

_PANIC = "PanicException"
"""Name of the library's own error, which cannot be imported."""
_BYTE_FALLBACK_TOKEN_LENGTH = len("<0x00>")


class TokenizerError(Exception):
    """The checkpoint's text files are unusable; the server cannot start. Fit for the operator's eyes."""

    def __init__(self, what: str, fix: str) -> None:
        what = one_line(what)
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


class SpecialTokens(StrEnum):
    """Whether decoded text shows special tokens such as `<|im_end|>`."""

    KEEP = "keep"
    SKIP = "skip"


class DecoderKind(StrEnum):
    """Kinds of decoders, by how their tokens become text."""

    BYTE_LEVEL = "byte-level"  # tokens are bytes in disguise; the text is their concatenation
    BYTE_FALLBACK = "byte-fallback"  # tokens are text with a mark for the space; <0xNN> is one byte
    OPAQUE = "opaque"  # depends on neighbours: only whole decodes are right


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRule:
    """The decoder of tokenizer.json, as far as it can be understood token by token."""

    kind: DecoderKind
    replaced: tuple[tuple[str, str], ...] = ()
    """(mark, text) pairs applied to each token, such as ("▁", " ")."""
    num_stripped_spaces: int = 0
    """Number of leading spaces of the whole text that are dropped."""


class Tokenizer:
    """One checkpoint's tokenizer. All methods may be called from several threads at once."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, rule: DecoderRule, special_tokens: Mapping[str, str]
    ) -> None:
        # A tokenizer.json saved in training may cut or pad every prompt silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.rule = rule
        self.special_tokens = dict(special_tokens)
        """Tokens by name, such as `bos_token`; only names that the checkpoint sets."""
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._all_bytes = _TokenBytes(backend, rule, hidden=frozenset())
        self._bytes: dict[frozenset[int], _TokenBytes] = {frozenset(): self._all_bytes}
        """One table for each set of hidden tokens."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json with the tokens of the files next to it. Raises TokenizerError."""
        path = find_vocabulary(folder) or folder / TOKENIZER
        try:
            with _without_stacks():
                file = read_tokenizer(folder)
                backend = tokenizers.Tokenizer.from_buffer(file.text)
            named = named_tokens(folder)
        except OSError as error:
            raise TokenizerError(
                f"no readable tokenizer.json in {folder} ({error.strerror})",
                "serve a checkpoint that brings one, or tekken.json, tokenizer.model or tiktoken.model",
            ) from error
        except StartupError as error:
            raise TokenizerError(error.what, error.fix) from error
        except ValueError as error:
            raise TokenizerError(
                f"{path} is not a valid tokenizer: {error}",
                "download it again, or upgrade the tokenizers library",
            ) from error
        return cls(backend, rule=decoder_rule(file.content.get("decoder")), special_tokens=named)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are searched for before a text is split, with their ids."""
        found = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in found.items()}

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Encode plain text, with the special tokens that the checkpoint puts around it (a leading BOS, say).

        Raises RequestRejected if the text holds half of a surrogate pair, which no UTF-8 can express.
        """
        _check_encodable(text, param="prompt")
        return self._ids(text, SpecialTokens.KEEP)

    def encode_rendered_chat(self, text: str) -> tuple[int, ...]:
        """Encode a rendered chat, which brings its own special tokens. Raises as encode_prompt does."""
        return self.encode_plain(text, param="messages")

    def encode_text(self, text: str, cut: TextCut, *, second: str | None = None) -> TokenizedText:
        """Encode a text, or a pair, with the special tokens around it, for a pooling model.

        Of a pair that is too long, the longer text is cut first. Raises as encode_prompt does, and for a
        cut that leaves nothing but special tokens.
        """
        for each in (text, second or ""):
            _check_encodable(each, param=cut.param)
        if cut.max_tokens is None:
            encoding = self._encode(text if second is None else (text, second), SpecialTokens.KEEP)
        else:
            encoding = self._encode_cut(text, second, cut.max_tokens)
        types = encoding.type_ids
        return TokenizedText(tuple(encoding.ids), types.index(1) if 1 in types else None)

    def _encode_cut(self, text: str, second: str | None, max_tokens: int) -> tokenizers.Encoding:
        room = max_tokens - self._backend.num_special_tokens_to_add(second is not None)
        num_texts = 1 if second is None else 2
        if room < num_texts:
            raise RequestRejected(
                f"must leave room for {num_texts} tokens besides {max_tokens - room} special ones",
                param="truncate_prompt_tokens",
            )
        first_encoding = self._encode(text, SpecialTokens.SKIP)
        if second is None:
            first_encoding.truncate(room)
            return self._backend.post_process(first_encoding, None, add_special_tokens=True)
        second_encoding = self._encode(second, SpecialTokens.SKIP)
        num_first, num_second = len(first_encoding.ids), len(second_encoding.ids)
        if num_first + num_second > room:
            half = room // 2
            num_first = max(min(num_first, room - half), room - num_second)
            num_second = room - num_first
        first_encoding.truncate(num_first)
        second_encoding.truncate(num_second)
        return self._backend.post_process(first_encoding, second_encoding, add_special_tokens=True)

    def encode_plain(self, text: str, *, param: str) -> tuple[int, ...]:
        """Encode without special tokens around the text. Raises as encode_prompt does, naming `param`."""
        _check_encodable(text, param=param)
        return self._ids(text, SpecialTokens.SKIP)

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encode each word with and without a space before it, as the sequences that would generate it.

        Raises RequestRejected for a word that has no tokens.
        """
        found: dict[tuple[int, ...], None] = {}
        for index, word in enumerate(words):
            param = f"bad_words[{index}]"
            bare = word.lstrip()
            # Many tokenizers have other tokens for a word after a space, where most words stand.
            spellings = [self.encode_plain(text, param=param) for text in (bare, f" {bare}")]
            if not bare or not all(spellings):
                raise RequestRejected(f"{param} must hold more than blanks", param=param)
            found.update(dict.fromkeys(spellings))
        return tuple(found)

    def _ids(self, text: str, special: SpecialTokens) -> tuple[int, ...]:
        return tuple(self._encode(text, special).ids)

    def _encode(self, text: str | tuple[str, str], special: SpecialTokens) -> tokenizers.Encoding:
        """Encode a text or a pair as a batch of one: only batches release the interpreter lock."""
        keep = special is SpecialTokens.KEEP
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=keep)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            # An expression that backtracks too often, say. It is no Exception, and would end a thread.
            raise RequestRejected(f"the model's tokenizer fails on this text: {error}"[:240]) from None
        return encoding

    def id_of(self, token: str) -> int | None:
        """Look up a token; None if the vocabulary does not have it."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def vocabulary_string(self, token_id: int) -> str:
        """Spell a token as tokenizer.json does, marks for spaces included; "" for ids without a token."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: Iterable[int], *, special: SpecialTokens) -> str:
        """Decode whole sequences. Ids without a token are left out, broken bytes become U+FFFD."""
        skip = special is SpecialTokens.SKIP
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds in the middle of a text; b"" for ids without a token."""
        return self._all_bytes[token_id]

    def token_string(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def bytes_by_id(
        self, special: SpecialTokens, *, shown: frozenset[int] = frozenset()
    ) -> Mapping[int, bytes]:
        """Return `token_bytes` as a total mapping for hot loops, b"" for tokens that `special` hides.

        Tokens in `shown` are never hidden. A table is kept for each set, so callers should use few sets.
        The concatenated bytes are the text, less `rule.num_stripped_spaces`, unless the rule is OPAQUE.
        """
        hidden = self._special_ids if special is SpecialTokens.SKIP else frozenset()
        if shown:  # else the same set each time, which is hashed once: a tokenizer may have a thousand
            hidden -= shown
        table = self._bytes.get(hidden)
        if table is None:
            table = self._bytes.setdefault(hidden, _TokenBytes(self._backend, self.rule, hidden=hidden))
        return table

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


class _TokenBytes(dict[int, bytes]):
    """Token id to bytes, filled on demand: a full table of 150,000 tokens would delay every start."""

    def __init__(self, backend: tokenizers.Tokenizer, rule: DecoderRule, *, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._rule = rule
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        # Two threads may compute the same entry; both write the same value.
        self[token_id] = found = b"" if token_id in self._hidden else self._compute(token_id)
        return found

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._rule.kind is DecoderKind.BYTE_LEVEL:
            return _byte_level_bytes(token)
        for mark, text in self._rule.replaced:
            token = token.replace(mark, text)
        byte = _fallback_byte(token)
        if byte is not None:
            return byte
        if self._rule.kind is DecoderKind.OPAQUE:
            token = self._text_in_the_middle(token_id)
        return str(token).encode()

    def _text_in_the_middle(self, token_id: int) -> str:
        """Decode a token after another one: many decoders treat the first token differently."""
        alone = str(self._backend.decode([token_id], skip_special_tokens=False))
        twice = str(self._backend.decode([token_id, token_id], skip_special_tokens=False))
        return twice[len(alone) :] if twice.startswith(alone) else alone


@contextmanager
def _without_stacks() -> Iterator[None]:
    """Keep the library's panics from writing their stacks to stderr; they are raised all the same."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def decoder_rule(decoder: Any) -> DecoderRule:
    """Read the `decoder` entry of tokenizer.json; OPAQUE if it is not understood for certain."""
    steps = _flatten(decoder)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return DecoderRule(kind=DecoderKind.BYTE_LEVEL)
    replaced = tuple(_as_replacement(step) for step in steps if step.get("type") == "Replace")
    rest = [name for name in names if name != "Replace"]
    in_order = names == ["Replace"] * len(replaced) + rest
    if (
        not in_order
        or None in replaced
        or rest not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])
    ):
        return DecoderRule(kind=DecoderKind.OPAQUE)
    num_stripped_spaces = 0
    if rest[-1] == "Strip":
        strip = steps[-1]
        if strip.get("content") != " " or strip.get("stop") != 0:
            return DecoderRule(kind=DecoderKind.OPAQUE)
        num_stripped_spaces = int(strip["start"])
    return DecoderRule(
        kind=DecoderKind.BYTE_FALLBACK,
        replaced=tuple(pair for pair in replaced if pair is not None),
        num_stripped_spaces=num_stripped_spaces,
    )


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _as_replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    mark = step.get("pattern", {}).get("String")
    return (mark, step["content"]) if isinstance(mark, str) and mark else None


def _byte_alphabet() -> dict[str, int]:
    """Map the character that stands for a byte to the byte: itself if printable, otherwise from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + place), byte) for place, byte in enumerate(others))
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        # An added token written in plain text; the library takes the whole of it literally too.
        return token.encode()


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != _BYTE_FALLBACK_TOKEN_LENGTH or not (token.startswith("<0x") and token.endswith(">")):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _check_encodable(text: str, *, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise RequestRejected(
            f"{param} holds half of a surrogate pair ({found}), which is not text; send whole characters",
            param=param,
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of the checkpoint; empty without the file. Raises TokenizerError if it is broken."""
    try:
        return checkpoint_files.read_json(path) if path.is_file() else {}
    except StartupError as error:
        raise TokenizerError(error.what, error.fix) from error
