"""Messages about inputs of a request other than tokens, and about the start of its answer.

Never: the bytes of an input, which lie in shared memory.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Payload(NamedTuple):
    """Prepared bytes of an encoder's input, as they lie in shared memory while a request needs them."""

    content: str
    """Name by which encoder inputs refer to it: a digest of the bytes and of how they were prepared."""
    segment: str
    """Name of the shared memory."""
    num_bytes: int
    grid: tuple[int, int, int]
    """Frames, rows and columns of patches."""


class EncoderInput(NamedTuple):
    """An image, say, whose encoder output stands at some positions of a prompt in place of embeddings."""

    offset: int
    """First of these positions."""
    num_tokens: int
    content: str
    """Name of the input, as in its payload. Equal names are equal inputs: prefixes are shared under it."""

    @property
    def end(self) -> int:
        """Position behind the input."""
        return self.offset + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """Mark behind which the answer of a reply begins; all before it are the model's own thoughts."""

    token_ids: tuple[int, ...] = ()
    """Tokens of the mark; empty if it is known as text alone."""
    text: str = ""
    """The same mark as text."""
    begin: str = ""
    """A reply that does not begin with this has no thoughts; empty: they are open from its first token."""
    begin_token_ids: tuple[int, ...] = ()
    """Tokens of `begin`; empty if it is known as text alone."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens of the caller: before the answer they are tokens like others."""
    max_tokens: int | None = None
    """Tokens after which nothing but the mark can follow, if it has not come; None: as many as there are."""

    @property
    def has_known_marks(self) -> bool:
        """Whether tokens alone tell where thoughts are, which a limit on their number needs."""
        return bool(self.token_ids) and bool(self.begin_token_ids or not self.begin)
