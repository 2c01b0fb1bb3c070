"""The run of a server from a checked configuration to the exit code: engine, HTTP server, signals.

Owns: the order of start and of end. On the first SIGTERM or SIGINT readiness ends, accepted requests are
finished, and the code is 0; a second signal ends everything at once.
Never: options (cli.py) or routes (app.py).
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from engine.errors import EngineUnavailable
from engine.frontend.client import AsyncEngine
from engine.logs.log_lines import ProcessName
from engine.logs.log_setup import Logs
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.options.option_declaration import OptionError
from engine.processes.garbage import keep_what_is_loaded
from engine.text.checkpoint_texts import check_files
from engine.text.tokenizer import TokenizerError
from server.access.credentials import Credentials
from server.access.tls import LiveTls
from server.app import build_admin_app, build_app
from server.batch_work.app_client import AppClient
from server.batch_work.batch_queue import BatchQueue
from server.endpoints import OPERATIONS
from server.generate.answering import VERSION
from server.http.connections import ClientConnection
from server.http.edge import Edge, Patience
from server.http.health_listener import HealthListener
from server.http.listening import CannotListen, Listeners, url_of
from server.responses.background import BackgroundResponses
from server.responses.kept_responses import go_on
from server.sockets.accepting import ClientServer
from server.startup.announcement import Announcement
from server.state.state_desk import StateDesk

if TYPE_CHECKING:
    from server.observe.otel_spans import OtelSpans

log = logging.getLogger(__name__)

EXIT_HTTP_ENDED = 70
EXIT_BAD_MODEL = 78
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
_PROGRESS_EVERY_S = 0.25
# After the drain every reply has been made; this is for carrying it out.
_GOODBYE_S = 3


def run(engine_config: EngineConfig, server_config: ServerConfig, listeners: Listeners) -> int:
    """Serve until a signal, or until there can be no engine; returns the exit code. Raises OptionError."""
    level = logging.getLevelNamesMapping()[server_config.log_level.upper()]
    with (
        Logs(engine_config.log_format, level=level, process=ProcessName.API) as logs,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        announcement = Announcement(logs)
        try:
            check_files(engine_config.worker)
            return runner.run(_serve(engine_config, server_config, listeners, announcement))
        except TokenizerError as error:
            return announcement.end(error.what, error.fix, EXIT_BAD_MODEL)
        except (OptionError, CannotListen):
            raise
        except Exception:
            log.critical("the server ends: nobody expected this", exc_info=True)
            return EXIT_HTTP_ENDED


async def _serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listeners: Listeners,
    announcement: Announcement,
) -> int:
    engine = AsyncEngine(engine_config)
    patience = Patience(
        keep_alive_s=server_config.stream_keep_alive_s, send_timeout_s=server_config.edge.send_timeout_s
    )
    credentials = Credentials(server_config.api_keys, server_config.edge)
    spans = _open_spans(engine, engine_config, server_config)
    app = build_app(engine, server_config, patience=patience, keys=credentials.keys, spans=spans)
    desk: StateDesk = app.state.desk
    background: BackgroundResponses = app.state.background
    http = _http_server(app, credentials.tls)
    url = url_of(listeners.main, scheme="http" if credentials.tls is None else "https")
    signals = _Signals()
    keep_what_is_loaded()
    engine.start()
    health = _start_health(engine, engine_config, listeners.probes)
    administering = asyncio.create_task(
        _administer(build_admin_app(app, server_config), credentials.tls, listeners.admin)
    )
    batching = asyncio.create_task(_work_unwatched(app, engine_config, signals.first))
    watching = asyncio.create_task(credentials.keep_current())
    serving = asyncio.create_task(http.serve(sockets=[listeners.main]))
    announcing = asyncio.create_task(_announce(announcement, engine, engine_config, server_config, url))
    try:
        return await _until_the_end(engine, signals, serving, server_config, announcement)
    finally:
        announcing.cancel()
        batching.cancel()
        await asyncio.gather(batching, return_exceptions=True)
        await background.close()
        watching.cancel()
        administering.cancel()
        http.should_exit = True
        http.force_exit = signals.second.is_set()
        await serving
        await engine.close()
        if health is not None:
            health.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        await asyncio.to_thread(desk.close)
        signals.restore()


async def _work_unwatched(app: FastAPI, config: EngineConfig, stopping: asyncio.Event) -> None:
    """Work on what no client waits for, batches and responses of the background, until the server stops."""
    # Without priorities nothing yields: then a few at a time.
    num_seqs = config.scheduler.max_num_seqs
    yields = config.scheduler.policy.value == "priority"
    num_places = num_seqs if yields else max(1, num_seqs // 4)
    await go_on(app, num_places=num_places)
    desk: StateDesk = app.state.desk
    if desk.is_open:
        await _run_batches(app, desk, num_places, stopping)
        background: BackgroundResponses = app.state.background
        await background.leave_to_next_start()


async def _run_batches(app: FastAPI, desk: StateDesk, concurrency: int, stopping: asyncio.Event) -> None:
    """Work on batches until the server is to stop."""
    queue = BatchQueue(desk, lambda owner: AppClient(app, owner=owner), concurrency=concurrency)
    working = asyncio.create_task(queue.run())
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        working.cancel()
        (end,) = await asyncio.gather(working, return_exceptions=True)
        if not isinstance(end, asyncio.CancelledError):
            log.error("no more batches are worked on until the next start", exc_info=end)


async def _administer(app: FastAPI, tls: LiveTls | None, listener: socket.socket | None) -> None:
    """Serve the admin routes, if they have a port, until cancelled."""
    if listener is None:
        return
    http = _http_server(app, tls)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    log.info("admin routes at %s only", url_of(listener, scheme="http" if tls is None else "https"))
    try:
        await asyncio.shield(serving)
    finally:
        http.should_exit = http.force_exit = True
        await serving


def _open_spans(engine: AsyncEngine, config: EngineConfig, server: ServerConfig) -> "OtelSpans | None":
    if server.otlp_traces_endpoint is None:
        return None
    # Not at the top: an extra, and a second of imports.
    from server.observe.otel_spans import OtelSpans

    return OtelSpans(
        server.otlp_traces_endpoint,
        operations=OPERATIONS,
        count_lost=engine.metrics.spans_dropped,
        model_name=config.served_names[0],
        version=VERSION,
    )


def _start_health(
    engine: AsyncEngine, config: EngineConfig, probes: socket.socket | None
) -> HealthListener | None:
    if probes is None:
        return None
    listener = HealthListener(probes, engine.health, heartbeat_timeout_s=config.heartbeat_timeout_s)
    listener.start()
    log.info("probes are answered at %s too", url_of(probes))
    return listener


async def _until_the_end(
    engine: AsyncEngine,
    signals: "_Signals",
    serving: "asyncio.Task[None]",
    config: ServerConfig,
    announcement: Announcement,
) -> int:
    gave_up = asyncio.create_task(engine.gave_up())
    stopped = asyncio.create_task(signals.first.wait())
    await asyncio.wait([gave_up, stopped, serving], return_when=asyncio.FIRST_COMPLETED)
    if serving.done() and not stopped.done():
        stopped.cancel()
        gave_up.cancel()
        what, fix = "the HTTP server ended by itself", "the log above may say why"
        return announcement.end(what, fix, EXIT_HTTP_ENDED)
    if gave_up.done():
        stopped.cancel()
        end = gave_up.result()
        return 0 if end is None else announcement.end(end.what, end.fix, end.exit_code)
    gave_up.cancel()
    timeout_s, delay_s = config.shutdown_timeout_s, config.drain_delay_s
    if delay_s:
        log.info("stopping: not ready any more, but whoever comes in the next %g s is served", delay_s)
    log.info("stopping: accepted requests have %.0f s to finish; a second signal ends them", timeout_s)
    drained = asyncio.create_task(engine.drain(timeout_s=timeout_s, delay_s=delay_s))
    insisted = asyncio.create_task(signals.second.wait())
    await asyncio.wait([drained, insisted], return_when=asyncio.FIRST_COMPLETED)
    if drained.done():
        insisted.cancel()
        if not drained.result():
            log.warning("requests were cut off after %.0f s", timeout_s)
    else:
        drained.cancel()
    return 0


async def _announce(
    announcement: Announcement,
    engine: AsyncEngine,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    url: str,
) -> None:
    """Show progress while the model loads, then a summary of it."""
    display = announcement.loading_display()
    ready = asyncio.create_task(engine.ready())
    try:
        while not (await asyncio.wait([ready], timeout=_PROGRESS_EVERY_S))[0]:
            health = engine.health()
            display.update(health.progress, health.detail)
    finally:
        ready.cancel()
        display.close()
    with contextlib.suppress(EngineUnavailable):  # reported by `_until_the_end`
        announcement.ready(ready.result(), engine_config, server_config, url=url)


def _http_server(app: FastAPI, tls: LiveTls | None) -> uvicorn.Server:
    edge: Edge = app.state.edge
    return _HttpServer(
        _uvicorn_config(app),
        max_connections=edge.patience.max_connections,
        refused=edge.metrics.refused_connections,
        context=None if tls is None else tls.context,
    )


class _HttpServer(ClientServer):
    """uvicorn's own signals would close the port before the requests are finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Signals:
    """Signals: the first asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._take)

    def restore(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ClientConnection,  # h11: httptools would ignore the limit on headers
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GOODBYE_S,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop where the `fast` extra installed it."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
