"""Changes of a weight's numbers on the way from a GGUF file to a model, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """Rows that lie run by run in the file, each with rows of all heads, but head by head in the model."""

    num_heads: int
    sizes: tuple[int, ...] = (1,)
    """Rows of a head in each run; runs of these sizes follow each other up to the end."""
    num_blocks: int = 1
    """Equal blocks of rows, each of which is ordered by itself."""
    start: int = 0
    """Rows before it are in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change of a weight's numbers, in this order."""

    transposed: tuple[int, ...] = ()
    """Numbers of its tensors whose last two axes are exchanged."""
    axis: int = 0
    """Axis along which its tensors are joined, and rows ordered."""
    rows: RowOrder | None = None
    inputs: RowOrder | None = None
    """The same of the columns of a matrix."""
    added: float = 0.0
    """Number that is to be subtracted from all numbers."""
    is_decay: bool = False
    """The file has -exp of it."""
    shape: tuple[int, ...] = ()
    """Shape in the model where it is another one; -1 for one of the sizes."""
    is_read_as_numbers: bool = False
    """The family's code reads the weight itself."""

    @property
    def needs_numbers(self) -> bool:
        """Whether codes cannot follow it."""
        return bool(self.transposed or self.added or self.is_decay or self.shape or self.is_read_as_numbers)


UNCHANGED = Change()


def rotary_pairs(num_heads: int) -> Change:
    """Put the rows of each head in halves: both numbers of a rotary pair are neighbours in the file."""
    return Change(rows=RowOrder(num_blocks=num_heads, num_heads=2))
