"""Keys and certificate of the server, as their files have them now.

Owns: that both follow their files while the server runs; when to look; that a broken file changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from engine.options.api_keys import ApiKey, KeysFile, given_keys
from engine.options.edge_config import EdgeConfig, TlsFiles
from engine.options.options import OptionError
from server.edge.access.key_ring import KeyRing


class LiveTls:
    """The TLS context of all connections; each new one uses the certificate that was loaded last."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises OptionError."""
        self.files = files
        self.context = files.load()

    def reload(self) -> None:
        """Take over certificate and key. The authorities stay: a context cannot forget any.

        Raises OptionError, and keeps the present ones then.
        """
        self.files.load()  # elsewhere first: a context that gets a certificate without its key has neither
        self.files.show_by(self.context)


log = logging.getLogger(__name__)

_FOR_ALL_EYES = "everybody on this machine can read %s: chmod o-r %s"


LOOK_EVERY_S = 2.0


async def reread_on_change(paths: Iterable[str], reread: Callable[[], None]) -> None:
    """Call `reread` in a thread whenever one of the files has changed, until cancelled.

    `reread` raises OptionError for files that are wrong; they are tried again once they have changed.
    """
    files = [Path(path) for path in paths]
    names = ", ".join(map(str, files))
    known = await asyncio.to_thread(_signatures, files)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            found = await asyncio.to_thread(_signatures, files)
            if found == known:
                continue
            known = found
            await asyncio.to_thread(reread)
        except OptionError as error:
            log.error("%s; what was read before stays in force", error)
        except Exception:  # or no file would be followed any more
            log.exception("%s cannot be read again; what was read before stays in force", names)
        else:
            log.info("read again: %s", names)


def _signatures(files: Iterable[Path]) -> list[tuple[int, int, int] | None]:
    return [_signature(file) for file in files]


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Changes with the file, also where a link is bent to another; None while there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Credentials:
    """Keys and certificate of one server. `keep_current` must run for changes to be seen."""

    def __init__(self, api_keys: Sequence[str], edge: EdgeConfig) -> None:
        """Raises OptionError."""
        self._given = given_keys(api_keys)
        self._file = None if edge.api_keys_file is None else KeysFile(edge.api_keys_file)
        self.keys = KeyRing(self._read_keys())
        self.tls = None if edge.tls is None else LiveTls(edge.tls)
        if self._file is not None and self._file.can_be_read_by_others():
            log.warning(_FOR_ALL_EYES, *[self._file.path] * 2)
        if edge.tls is not None and edge.tls.key_can_be_read_by_others():
            log.warning(_FOR_ALL_EYES, *[edge.tls.key or edge.tls.cert] * 2)

    async def keep_current(self) -> None:
        """Follow the files until cancelled."""
        watches: list[Coroutine[Any, Any, None]] = []
        if self._file is not None:
            watches.append(
                reread_on_change([str(self._file.path)], lambda: self.keys.replace(self._read_keys()))
            )
        if self.tls is not None:
            watches.append(reread_on_change(self.tls.files.paths, self.tls.reload))
        await asyncio.gather(*watches)

    def _read_keys(self) -> tuple[ApiKey, ...]:
        return (*self._given, *(self._file.read() if self._file is not None else ()))
