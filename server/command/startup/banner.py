"""Messages to the operator: progress of loading, the loaded model, the reason of an end.

Owns: words and layout, and the choice between a terminal, lines of text, and lines of JSON.
Never: measures or decides; every number comes from ModelInfo or the configuration.
"""

import asyncio
import contextlib
import io
import json
import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from engine.errors import EngineUnavailable
from engine.logs.lines import fields
from engine.logs.setup import ERASE_LINE, Logs
from engine.media.pictures import is_installed
from engine.models.entries import ModelSpec
from engine.options.edge_config import PageParts
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.types import ModelInfo, PoolingTask
from server.edge.http.http_client import DEFAULT_URL

if TYPE_CHECKING:
    from engine.frontend.client import AsyncEngine

log = logging.getLogger(__name__)

_UNIX = "unix:"
_BAR_WIDTH = 20
_PROGRESS_EVERY_S = 0.25
_PLAIN_LINES_EVERY_S = 2.0
_MIN_FRACTION_FOR_ESTIMATE = 0.02
_ERASE_LINE = ERASE_LINE.decode()


def render_banner(info: ModelInfo, engine: EngineConfig, server: ServerConfig, *, url: str) -> str:
    """Several lines, ending with a command to paste. `url` has no slash at its end."""
    rows = [
        (
            "model",
            f"{', '.join(info.served_names)} ({info.model_type}, {_count(info.num_parameters)} parameters)",
        ),
        ("runs on", f"{info.device}, {info.dtype}" + (f", {info.kernels} kernels" if info.kernels else "")),
        ("served for", _purpose(info)),
        ("context", f"{info.max_model_len:,} tokens"),
        *_kv_cache(info),
        ("scheduler", _scheduler(engine, info)),
        ("API key", "needed" if _needs_key(server) else "not needed"),
        *_addresses(server, url),
    ]
    lines = [f"  {label:<12}{_printable(text)}" for label, text in rows]
    examples = [f"  Try: {each}" for each in (*_chat(info, url), _curl(info, server, url))]
    return "\n".join(["", *lines, "", *examples, ""])


def render_models(
    loaded: Sequence[ModelInfo], later: Sequence[str], server: ServerConfig, *, url: str
) -> str:
    """Several lines about several models, a line for each; `later` are names of those on demand.

    `url` has no slash at its end.
    """
    rows = [
        (
            "" if place else "models",
            f"{', '.join(info.served_names)}: {_purpose(info)}, {info.max_model_len:,} tokens of context,"
            f" {info.device}, {info.dtype}, KV cache {_size(info.kv_cache_bytes)}",
        )
        for place, info in enumerate(loaded)
    ]
    rows += [("on demand", each) for each in later]
    rows += [("API key", "needed" if _needs_key(server) else "not needed"), *_addresses(server, url)]
    lines = [f"  {label:<12}{_printable(text)}" for label, text in rows]
    return "\n".join(["", *lines, "", *[f"  Try: {_curl(info, server, url)}" for info in loaded], ""])


def _addresses(server: ServerConfig, url: str) -> list[tuple[str, str]]:
    if server.edge.uds is not None:  # no address that a browser could open
        return [("listens on", server.edge.uds)]
    if server.edge.page is PageParts.OFF:
        return [("listens on", f"{url}   (API description: {url}/openapi.json)")]
    return [("listens on", f"{url}   (API: {url}/docs)"), ("web page", f"{url}/")]


def _purpose(info: ModelInfo) -> str:
    if info.pooling is None:
        if info.vision is None:
            return "text"
        return "text and pictures" if is_installed() else "text; pictures need Pillow: the extra `images`"
    if info.pooling.task is PoolingTask.SCORE:
        return "scores of pairs of texts"
    return f"embeddings of {info.pooling.num_dimensions:,} dimensions"


def _kv_cache(info: ModelInfo) -> list[tuple[str, str]]:
    """Describe the KV cache; empty for an encoder, which has none."""
    if not info.kv_cache_bytes:
        return []
    tokens = info.num_blocks * info.block_size
    size = f"{tokens:,} tokens in {info.num_blocks:,} blocks, {_size(info.kv_cache_bytes)}"
    if info.is_paged:
        return [("KV cache", size), ("", _full_length_requests(info))]
    return [
        ("cache", f"{size}; each sequence has one of its own"),
        ("", "sequences are computed one after the other, slowly: docs/models.md says why"),
    ]


def _full_length_requests(info: ModelInfo) -> str:
    num_requests = info.num_full_length
    if num_requests == 0:
        return "no request can use the whole context window"
    noun = "request" if num_requests == 1 else "requests"
    return f"room for {num_requests:,} {noun} of full length at once, and for more shorter ones"


def _scheduler(engine: EngineConfig, info: ModelInfo) -> str:
    config = engine.scheduler
    prefix_caching = config.prefix_caching if info.is_paged else "off"
    return (
        f"{config.policy}, up to {config.max_num_seqs:,} sequences "
        f"and {config.max_num_batched_tokens:,} tokens a step, prefix caching {prefix_caching}"
    )


def _chat(info: ModelInfo, url: str) -> list[str]:
    """The command that talks to this server, for a model that talks."""
    if info.pooling is not None or not info.has_chat_template or url.startswith(_UNIX):
        return []
    return ["tokenyard chat" if url == DEFAULT_URL else f"tokenyard chat --base-url {url}"]


def _curl(info: ModelInfo, server: ServerConfig, url: str) -> str:
    prompt: dict[str, Any]
    if info.pooling is not None and info.pooling.task is PoolingTask.SCORE:
        path, prompt = "rerank", {"query": "Hello", "documents": ["Hi!", "No."]}
    elif info.pooling is not None:
        path, prompt = "embeddings", {"input": "Hello"}
    elif info.has_chat_template:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, prompt = "completions", {"prompt": "Hello", "max_tokens": 32}
    body = json.dumps({"model": info.served_names[0], **prompt})
    # The variable, not the key: this text ends up in log files.
    key = ' -H "Authorization: Bearer $TOKENYARD_API_KEY"' if _needs_key(server) else ""
    if url.startswith(_UNIX):
        url = f"--unix-socket {shlex.quote(url.removeprefix(_UNIX))} http://localhost"
    # In two lines, which a terminal does not break within the JSON.
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' \\\n    -d {shlex.quote(body)}"


def _needs_key(server: ServerConfig) -> bool:
    return bool(server.api_keys) or server.edge.api_keys_file is not None


def _size(num_bytes: int) -> str:
    """Format memory: `1.25 GiB`, and below one GiB `3.40 MiB`."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def _count(number: int) -> str:
    """Format a count in words: 135,000,000 is 135 million."""
    for size, word in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def _printable(text: str) -> str:
    """Replace characters that could move the cursor: names come from folders and command lines."""
    return "".join(char if char.isprintable() else "?" for char in text)


class LoadingDisplay:
    """Progress while the model loads: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._last_line_s = -math.inf
        self._is_live = stream.isatty()
        self._is_line_open = False

    def update(self, fraction: float, stage: str, detail: str = "") -> None:
        """`fraction` of the whole, 0 to 1; `detail` is text such as `1.2 of 2.7 GiB`."""
        now_s = self._clock_s()
        if not fraction:
            self._started_s = now_s  # importing libraries is no share of the load
        if not self._is_live and now_s - self._last_line_s < _PLAIN_LINES_EVERY_S:
            return
        self._last_line_s = now_s
        fraction = min(max(fraction, 0.0), 1.0)
        words = [f"{fraction:4.0%}", stage, detail, self._time_left(fraction, now_s)]
        text = _printable("  ".join(word for word in words if word))
        if self._is_live:
            filled = round(fraction * _BAR_WIDTH)
            line = f"  [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {text}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(_ERASE_LINE + line[:width])
            self._is_line_open = True
        else:
            self._stream.write(f"loading: {text.strip()}\n")
        self._stream.flush()

    async def follow(self, engine: "AsyncEngine") -> ModelInfo:
        """Show how far the model is loaded until it is, and return its facts. Raises EngineUnavailable."""
        ready = asyncio.create_task(engine.ready())
        try:
            while not (await asyncio.wait([ready], timeout=_PROGRESS_EVERY_S))[0]:
                health = engine.health()
                self.update(health.progress, health.detail)
            return ready.result()
        finally:
            ready.cancel()
            self.close()

    def close(self) -> None:
        """Leaves a clean line behind. May be called twice."""
        if self._is_line_open:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._is_line_open = False

    def _time_left(self, fraction: float, now_s: float) -> str:
        if not _MIN_FRACTION_FOR_ESTIMATE <= fraction < 1.0:
            return ""
        left_s = (now_s - self._started_s) * (1.0 - fraction) / fraction
        return f"about {left_s:.0f} s left"


class Announcement:
    """Messages to the operator. Only a terminal can block the writer; the log never does."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs

    def loading_display(self) -> LoadingDisplay:
        """Make the display of progress: one changing line on a terminal, lines of the log elsewhere."""
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

    async def follow(
        self,
        engines: "Sequence[AsyncEngine]",
        models: Sequence[ModelSpec],
        server: ServerConfig,
        *,
        url: str,
    ) -> None:
        """Show progress while each model loads, then a summary. The end of a failed engine tells why."""
        loaded: list[ModelInfo] = []
        for engine in (each for each, spec in zip(engines, models, strict=True) if spec.keep.at_start):
            with contextlib.suppress(EngineUnavailable):
                loaded.append(await self.loading_display().follow(engine))
        if (len(models) > 1 or not models[0].keep.is_always_loaded) and self._logs.is_text:
            later = [", ".join(each.names.served) for each in models if not each.keep.at_start]
            self._logs.show(render_models(loaded, later, server, url=url))
            return
        for info in loaded:
            self.ready(info, models[0].engine, server, url=url)

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
