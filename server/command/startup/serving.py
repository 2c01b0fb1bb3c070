"""The HTTP servers in front of an engine that is started already, until a signal or the engine's end.

Owns: what serves beside the main port, and the order of the end. On the first SIGTERM or SIGINT readiness
ends, accepted requests are finished, and the code is 0; a second signal ends everything at once.
Never: the engine's start (launch.py), or routes (app.py).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from engine.errors import EngineUnavailable
from engine.frontend.client import AsyncEngine
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.processes.garbage import keep_what_is_loaded
from engine.version import VERSION
from server.api.batches.app_client import AppClient
from server.api.batches.queue import BatchQueue
from server.api.files.access import StateAccess
from server.api.responses.background import BackgroundResponses
from server.api.responses.kept_responses import go_on
from server.app import build_admin_app, build_app
from server.command.startup.announcement import Announcement
from server.command.startup.launched import EXIT_HTTP_ENDED, Launched, Signals
from server.edge.access.credentials import Credentials
from server.edge.access.tls import LiveTls
from server.edge.http.connections import ClientConnection
from server.edge.http.edge import ClientTimeouts, Edge
from server.edge.http.health_listener import HealthListener
from server.edge.http.listening import url_of
from server.edge.sockets.accepting import ClientServer
from server.endpoints import OPERATIONS

if TYPE_CHECKING:
    from server.edge.observe.otel_spans import OtelSpans

log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 64 * 1024
_KEEP_ALIVE_S = 75
# After the drain every reply has been made; this is for carrying it out.
_GOODBYE_S = 3


async def serve(launched: Launched, announcement: Announcement) -> int:
    """Serve until a signal or the end of the engine; return the exit code. Raises OptionError."""
    engine, signals, listeners = launched.engine, launched.signals, launched.listeners
    engine_config, server_config = launched.engine_config, launched.server_config
    patience = ClientTimeouts(keep_alive_s=server_config.stream_keep_alive_s)
    credentials = Credentials(server_config.api_keys, server_config.edge)
    spans = _open_spans(engine, engine_config, server_config)
    app = build_app(engine, server_config, patience=patience, keys=credentials.keys, spans=spans)
    desk: StateAccess = app.state.desk
    background: BackgroundResponses = app.state.background
    http = _http_server(app, credentials.tls)
    url = url_of(listeners.main, scheme="http" if credentials.tls is None else "https")
    keep_what_is_loaded()
    health = _start_health(engine, engine_config, listeners.probes, desk)
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
        if health is not None:
            health.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        await asyncio.to_thread(desk.close)


async def _work_unwatched(app: FastAPI, config: EngineConfig, stopping: asyncio.Event) -> None:
    """Work on what no client waits for, batches and responses of the background, until the server stops."""
    # Without priorities nothing yields: then a few at a time.
    num_seqs = config.scheduler.max_num_seqs
    yields = config.scheduler.policy.value == "priority"
    num_places = num_seqs if yields else max(1, num_seqs // 4)
    background: BackgroundResponses = app.state.background
    background.set_places(num_places)
    desk: StateAccess = app.state.desk
    if not desk.is_open:
        return
    edge: Edge = app.state.edge
    queue = BatchQueue(
        desk,
        lambda owner: AppClient(app, owner=owner),
        concurrency=num_places,
        count_fault=edge.metrics.count_background_fault,
    )
    # Neither ends by a fault: each takes what goes wrong with one batch or response as the end of that.
    working = [asyncio.create_task(queue.run()), asyncio.create_task(go_on(app))]
    try:
        await stopping.wait()
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    await background.leave_to_next_start()


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
    from server.edge.observe.otel_spans import OtelSpans

    return OtelSpans(
        server.otlp_traces_endpoint,
        operations=OPERATIONS,
        count_lost=engine.metrics.spans_dropped,
        model_name=config.served_names[0],
        version=VERSION,
    )


def _start_health(
    engine: AsyncEngine, config: EngineConfig, probes: socket.socket | None, desk: StateAccess
) -> HealthListener | None:
    if probes is None:
        return None
    listener = HealthListener(
        probes, engine.health, heartbeat_timeout_s=config.heartbeat_timeout_s, degraded=desk.degraded
    )
    listener.start()
    log.info("probes are answered at %s too", url_of(probes))
    return listener


async def _until_the_end(
    engine: AsyncEngine,
    signals: Signals,
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
    with contextlib.suppress(EngineUnavailable):  # reported by `_until_the_end`
        info = await announcement.loading_display().follow(engine)
        announcement.ready(info, engine_config, server_config, url=url)


def _http_server(app: FastAPI, tls: LiveTls | None) -> uvicorn.Server:
    edge: Edge = app.state.edge
    return _HttpServer(
        _uvicorn_config(app),
        max_connections=edge.patience.max_connections,
        refused=edge.metrics.refused_connections,
        context=None if tls is None else tls.context,
        early=app.state.full_queue,
    )


class _HttpServer(ClientServer):
    """uvicorn's own signals would close the port before the requests are finished."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


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
