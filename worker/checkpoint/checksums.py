"""Comparison of a checkpoint's files with a list of their SHA-256, as `sha256sum` writes it."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Lock

from worker.checkpoint.tokenizer_files import find_vocabulary
from worker.worker_errors import StartupError

_TEXT_SUFFIXES = frozenset({".json", ".jinja"})
"""Configuration, tokenizer and templates; of other files only weights are ever read."""
_MAX_LIST_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](\S.*)")
_SPELLED = "write it with `sha256sum *.safetensors *.json *.jinja` in the folder of the model"
_READ_BYTES = 4 << 20
_MAX_THREADS = 4
"""One thread hashes about 1.5 GB a second with the processor's instructions for SHA-256; few disks are faster
than four of them. A faster hash has no published sums."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """One list. Files in it that the server never reads are not compared."""

    path: Path
    digests: Mapping[str, str]
    """SHA-256 in hexadecimal, by the file's path in the folder of the model."""

    @classmethod
    def read(cls, path: Path) -> "Checksums":
        """Read a list. Raises StartupError, which names the first line that is wrong."""
        try:
            if path.stat().st_size > _MAX_LIST_BYTES:
                raise StartupError(f"{path} is larger than 1 MiB", fix=_SPELLED)
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartupError(f"{path} cannot be read: {why}", fix=_SPELLED) from error
        digests: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            name, digest = _parse(line, f"{path}, line {number}")
            if digests.setdefault(name, digest) != digest:
                raise StartupError(f"{path} lists {name} twice, with two checksums", fix=_SPELLED)
        if not digests:
            raise StartupError(f"{path} lists no file", fix=_SPELLED)
        return cls(path, digests)

    def check_texts(self, folder: Path) -> int:
        """Compare every configuration, tokenizer and template of the folder; returns how many there are.

        Raises StartupError: for one that differs, is not in the list, or is in the list only.
        """
        found = {_name(path, folder): path for path in _files(folder, _TEXT_SUFFIXES)}
        vocabulary = find_vocabulary(folder)
        if vocabulary is not None:
            found[vocabulary.name] = vocabulary
        listed = {name for name in self.digests if PurePosixPath(name).suffix in _TEXT_SUFFIXES}
        gone = sorted(listed - found.keys())
        if gone:
            raise StartupError(f"{folder} lacks {gone[0]}, which {self.path} lists", fix="download it again")
        for name in sorted(found):
            self._compare(name, digest_of(found[name], on_read=_ignore))
        return len(found)

    def check_weights(self, folder: Path, files: Iterable[Path], on_read: Callable[[int], None]) -> None:
        """Read and compare `files`, and weights of dense layers in folders below. Raises StartupError.

        `on_read` gets the number of bytes of `files` after each piece, from one thread at a time.
        """
        below = [path for path in _files(folder, frozenset({".safetensors"})) if path.parent != folder]
        lock = Lock()
        has_failed = False

        def count(num_bytes: int) -> None:
            with lock:
                on_read(num_bytes)

        def check(path: Path) -> None:
            nonlocal has_failed
            if has_failed:  # the first difference is reported; finding the others may take minutes
                return
            try:
                digest = digest_of(path, on_read=count if path.parent == folder else _ignore)
                self._compare(_name(path, folder), digest)
            except StartupError:
                has_failed = True
                raise

        with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="tokenyard-checksums") as pool:
            for _ in pool.map(check, [*files, *below]):
                pass

    def _compare(self, name: str, digest: str) -> None:
        expected = self.digests.get(name)
        if expected is None:
            raise StartupError(
                f"{self.path} has no checksum of {name}", fix=f"add what `sha256sum {name}` writes there"
            )
        if digest != expected:
            raise StartupError(
                f"{name} is not the file that {self.path} lists: its checksum is {digest[:12]}…, and should "
                f"be {expected[:12]}…",
                fix="download it again, and ask who changed it if it still differs",
            )


def _parse(line: str, place: str) -> tuple[str, str]:
    """Split a line into the name and the digest in lower case."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise StartupError(f"{place} is not a SHA-256, two spaces and a name", fix=_SPELLED)
    path = PurePosixPath(match[2])
    if path.is_absolute() or ".." in path.parts:
        raise StartupError(f"{place} names a file outside of the folder of the model", fix=_SPELLED)
    return str(path), match[1].lower()


def _files(folder: Path, suffixes: frozenset[str]) -> Iterator[Path]:
    """Find files in the folder and below, but for the hidden folders of download tools."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in suffixes and not is_hidden and path.is_file():
            yield path


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def digest_of(path: Path, *, on_read: Callable[[int], None]) -> str:
    """Hash a file. Raises StartupError if it cannot be read."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(piece):
                digest.update(piece[:num_read])
                on_read(num_read)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}", fix="download it again") from error
    return digest.hexdigest()


def _ignore(num_bytes: int) -> None:
    """Report nothing: texts are small."""
