"""Messages to the operator: progress of loading, the loaded model, the reason of an end.

Owns: the choice between a terminal, lines of text, and lines of JSON.
Never: the words of the summary (banner.py), or the log itself (engine/logs/setup.py).
"""

import io
import logging
import sys

from engine.logs.lines import fields
from engine.logs.setup import Logs
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.types import ModelInfo
from server.command.startup.banner import LoadingDisplay, render_banner

log = logging.getLogger(__name__)


class Announcement:
    """No part of it waits for a reader, but for a terminal."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def loading_display(self) -> LoadingDisplay:
        """One line that changes on a terminal, lines of the log elsewhere."""
        if self._logs.is_text and sys.stderr.isatty():
            return LoadingDisplay(sys.stderr)
        return LoadingDisplay(_LinesOfLog(self._logs))

    def ready(self, info: ModelInfo, engine: EngineConfig, server: ServerConfig, *, url: str) -> None:
        """Announce the loaded model, and the address of the server."""
        if self._logs.is_text:
            self._logs.show(render_banner(info, engine, server, url=url))
            return
        facts = fields(
            url=url,
            model=info.served_names[0],
            model_type=info.model_type,
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )
        log.info("listens on %s and serves %s", url, ", ".join(info.served_names), extra=facts)

    def end(self, what: str, fix: str, exit_code: int) -> int:
        """Write the last line, readable in every format: why the server ends, and what to do."""
        self._logs.show(f"tokenyard: {what}; {fix}")
        return exit_code


class _LinesOfLog(io.StringIO):
    """Takes whole lines. Not a terminal."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def write(self, text: str) -> int:
        line = text.rstrip("\n")
        if self._logs.is_text:
            self._logs.show(line)
        else:
            log.info("%s", line)
        return len(text)
