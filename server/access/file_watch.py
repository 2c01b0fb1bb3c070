"""Files that are read again when they have changed.

Owns: when to look, and that a broken file changes nothing.
Never: the contents of the files (credentials.py reads them).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.options.options import OptionError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0


async def reread_on_change(paths: Iterable[str], reread: Callable[[], None]) -> None:
    """Call `reread`, in a thread, whenever one of the files is another one than before. Until cancelled.

    `reread` raises OptionError for files that are wrong; they are tried again once they have changed.
    """
    files = [Path(path) for path in paths]
    names = ", ".join(map(str, files))
    known = await asyncio.to_thread(_signatures, files)
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        found = await asyncio.to_thread(_signatures, files)
        if found == known:
            continue
        known = found
        try:
            await asyncio.to_thread(reread)
        except OptionError as error:
            log.error("%s; what was read before stays in force", error)
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
