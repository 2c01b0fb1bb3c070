"""The trial of a tokenizer's expressions, at the start: `python -m engine.text.tokenizer_trial FILE`.

Owns: texts that make backtracking expressions slow, and the limits on time and memory of the trial.
Never: proves that no text is slow. A pattern may have one that the trial does not know.

A checkpoint brings the expressions by which its tokenizer splits texts. One that backtracks may take minutes
for a short text, or fail, and a thread that tokenizes cannot be ended.
"""

import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from engine.processes import child_process
from engine.processes.child_environment import child_environment
from engine.text.tokenizer import TokenizerError

_NUM_CHARS = 16 * 1024
_MAX_TEXT_S = 0.15
"""Processor time for one text: fifty times the usual time. If it grows with the square, it is 0.5 s."""
_MAX_WAIT_S = 30.0
_MAX_MEMORY_BYTES = 2**30
_MAX_PROCESSOR_S = 10
_USUAL_CHARS = "aA1 \n-é中"
_MAX_CHARS_OF_PATTERNS = 24
_CLASS = re.compile(r"\\[pP]\{[^}]*\}|\\.")
_NOT_USUAL = 3
"""Exit code; the reason is on standard output."""


class Trial:
    """Trial of the patterns of a tokenizer.json in another process, until `close`."""

    def __init__(self, file: Path) -> None:
        """Without expressions in the file there is no process."""
        self._file = file
        self._process: subprocess.Popen[bytes] | None = None
        self._is_judged = False
        if b'"Regex"' in _content(file):
            self._process = subprocess.Popen(
                [*child_process.INTERPRETER, "-m", "engine.text.tokenizer_trial", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # the library writes its stack there
                env={**child_environment(), "RAYON_NUM_THREADS": "1"},
            )

    def judge(self) -> None:
        """Wait for its end. Raises TokenizerError."""
        if self._process is None:
            return
        self._is_judged = True
        try:
            reason, _ = self._process.communicate(timeout=_MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            reason = b""  # and no exit code, unlike one that ended
        self.close()
        if self._process.returncode:
            raise TokenizerError(
                f"{self._file} splits texts by a pattern that takes too long:"
                f" {reason.decode(errors='replace').strip() or 'its trial had to be ended'}",
                "serve a checkpoint whose pattern does not backtrack:"
                " with this one a client can stop the server",
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None and not self._is_judged:
                self._process.stdout.close()  # `judge`, in another thread perhaps, reads to its end


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # a tokenizer that cannot be read is reported by its reader


def main(file: Path) -> int:
    """Return the exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_PROCESSOR_S, _MAX_PROCESSOR_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        content = json.loads(file.read_bytes())
        splitter = _without_vocabulary(content)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0  # its reader reports it better
    for text in _texts(content):
        began_s = time.process_time()
        try:
            splitter.encode_batch_fast([text])
        except BaseException as error:  # noqa: BLE001 -- a panic of the library is no Exception
            print(f"it fails on {_described(text)}: {error}"[:240])
            return _NOT_USUAL
        took_s = time.process_time() - began_s
        if took_s > _MAX_TEXT_S:
            print(f"{took_s:.1f} s of processor time for {_described(text)}")
            return _NOT_USUAL
    return 0


def _without_vocabulary(content: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer with a vocabulary of one word: what splits texts stays."""
    plain: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": content.get("normalizer"),
        "pre_tokenizer": content.get("pre_tokenizer"),
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
    }
    return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _texts(content: dict[str, Any]) -> Iterator[str]:
    """Runs of one character, of usual ones and those in the patterns, and of all in a pattern's order.

    A search may look ahead for what must occur, so that all of it follows some of the runs.
    """
    patterns = [*_expressions(content.get("normalizer")), *_expressions(content.get("pre_tokenizer"))]
    words = ["".join(filter(str.isalnum, _CLASS.sub("", pattern))) for pattern in patterns]
    own = dict.fromkeys("".join(words)[:_MAX_CHARS_OF_PATTERNS])
    for piece in dict.fromkeys([*_USUAL_CHARS, *own, *filter(None, words)]):
        run = piece * (_NUM_CHARS // len(piece))
        yield run
        yield f"{run}!{_USUAL_CHARS}{''.join(own)}"


def _expressions(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        pattern = part.get("Regex")
        if isinstance(pattern, str):
            yield pattern
        for each in part.values():
            yield from _expressions(each)
    elif isinstance(part, list):
        for each in part:
            yield from _expressions(each)


def _described(text: str) -> str:
    return f"{len(text)} characters that begin with {text[:8]!r}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
