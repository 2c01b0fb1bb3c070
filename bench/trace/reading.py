"""The lines of a step trace, as `tokenyard serve --trace-steps` writes them, read back.

Owns: which fields a line must have, and their types; engine/core/step_trace.py writes them.
Never: judges what it reads.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec


class TraceError(Exception):
    """The file cannot be read, or is no trace; the text says where and why."""


class TracedPreemption(msgspec.Struct, frozen=True, kw_only=True):
    """A preempted sequence: cause, sequence in its favour, and tokens that it had computed."""

    sequence_id: int
    cause: str
    beneficiary: int
    was_swapped: bool = False
    num_computed_tokens: int = 0
    num_freed_blocks: int = 0


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: a line of the file."""

    step: int
    time_s: float
    """Time of planning, by a clock whose zero means nothing."""
    schedule_s: float
    execute_s: float
    update_s: float
    num_tokens: int
    num_decodes: int
    num_context_tokens: int
    """Sum over the shares of the position after their last token: the keys that attention reads."""
    decodes: tuple[tuple[int, int], ...]
    """Sequence and position of its token."""
    chunks: tuple[tuple[int, int, int], ...]
    """Sequence, position of the first token, number of tokens."""
    arrived: tuple[int, ...]
    new: tuple[int, ...]
    """Sequences admitted to the line, for the first time or again."""
    released: tuple[int, ...]
    """Sequences that ended or were preempted since the last step."""
    ended: tuple[int, ...]
    """Sequences aborted since the last step."""
    preemptions: tuple[TracedPreemption, ...]
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_running: int
    num_waiting: int
    num_swapped: int
    num_used_blocks: int
    num_blocks: int
    waiting: dict[str, int]
    """Number of waiting sequences by reason."""

    @property
    def duration_s(self) -> float:
        return self.schedule_s + self.execute_s + self.update_s

    @property
    def num_swapped_blocks(self) -> int:
        return self.num_swapped_out_blocks + self.num_swapped_in_blocks

    def shares(self) -> Iterator[tuple[int, int, int]]:
        """Sequence, position of the first token, number of tokens."""
        for sequence_id, start in self.decodes:
            yield sequence_id, start, 1
        yield from self.chunks


def read_trace(path: Path) -> Iterator[TracedStep]:
    """Read the steps in the order of the file, one at a time: a trace may be larger than memory.

    A last line without its end, as an engine leaves it that was killed, is passed over.
    Raises TraceError with the line number.
    """
    decode = msgspec.json.Decoder(TracedStep).decode
    num_steps = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                num_steps += 1
                try:
                    step = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise TraceError(f"{path}:{number}: not a line of a step trace: {error}") from None
                yield step
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not num_steps:
        raise TraceError(f"{path} holds no steps")
