"""Readers of the tokens: a process that turns them to text and notes when it came.

    the part's process                       this one
    scheduler and worker  -- tokens -->  text of each sequence, and the time
                          <-- times ---  when the pipe ends

Owns: both ends of the pipe between them. In a server this is the API process: the step loop does not share an
interpreter with the text there either.
Never: HTTP, the JSON of events, or our own detokenizer, which needs more packages: campaigns/gpu/serving.py
has those.
"""

import json
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_ROOT = Path(__file__).resolve().parents[3]
_LENGTH = struct.Struct("<q")
_IS_READY = b"ready\n"


class Arrivals(NamedTuple):
    """Tokens of one sequence as one reader saw them."""

    times_s: list[float]
    """Time of each piece, by time.perf_counter: all processes of a machine have the same."""
    counts: list[int]
    """Tokens of each piece."""
    num_characters: int


class ReadersFailed(Exception):
    """The process that reads has died."""


class Readers:
    """The process, as seen from the part's own. A context."""

    def __init__(self, tokenizer_folder: Path) -> None:
        """Raises ReadersFailed."""
        command = [sys.executable, "-m", "campaigns.gpu.served.readers", str(tokenizer_folder)]
        self._process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tokens: IO[bytes] = self._process.stdin
        self._answers: IO[bytes] = self._process.stdout
        if self._answers.readline() != _IS_READY:
            self._close()
            raise ReadersFailed("it did not begin; the log says why")

    def __enter__(self) -> "Readers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def send(self, news: Sequence[tuple[int, Sequence[int]]]) -> None:
        """New tokens of each sequence, by its number."""
        numbers = array("q")
        for sequence, token_ids in news:
            numbers.extend((sequence, len(token_ids), *token_ids))
        self._write(numbers)

    def collect(self) -> dict[int, Arrivals]:
        """Return what came since the last call, by sequence. Raises ReadersFailed."""
        self._write(array("q"))
        line = self._answers.readline()
        if not line:
            raise ReadersFailed("it has died; the log says why")
        return {int(sequence): Arrivals(*each) for sequence, each in json.loads(line).items()}

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):
            self._tokens.close()

    def _write(self, numbers: "array[int]") -> None:
        self._tokens.write(_LENGTH.pack(len(numbers)) + numbers.tobytes())
        self._tokens.flush()


class _Reader:
    """Summary of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=True)
        self.arrivals = Arrivals([], [], 0)

    def take(self, token_ids: Sequence[int]) -> None:
        pieces = [self._stream.step(self._tokenizer, token_id) or "" for token_id in token_ids]
        times_s, counts, num_characters = self.arrivals
        times_s.append(time.perf_counter())
        counts.append(len(token_ids))
        self.arrivals = Arrivals(times_s, counts, num_characters + sum(map(len, pieces)))


def read(tokens: IO[bytes], answers: IO[bytes], tokenizer: Tokenizer) -> None:
    """Until the pipe ends."""
    answers.write(_IS_READY)
    answers.flush()
    readers: dict[int, _Reader] = {}
    while header := tokens.read(_LENGTH.size):
        numbers = array("q")
        numbers.frombytes(tokens.read(numbers.itemsize * _LENGTH.unpack(header)[0]))
        if not numbers:
            told: dict[int, Any] = {sequence: reader.arrivals for sequence, reader in readers.items()}
            answers.write(json.dumps(told).encode() + b"\n")
            answers.flush()
            readers = {}
        place = 0
        while place < len(numbers):
            sequence, count = numbers[place : place + 2]
            if sequence not in readers:
                readers[sequence] = _Reader(tokenizer)
            readers[sequence].take(numbers[place + 2 : place + 2 + count])
            place += 2 + count


if __name__ == "__main__":
    read(sys.stdin.buffer, sys.stdout.buffer, Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json")))
