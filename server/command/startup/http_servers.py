"""The HTTP servers of one process: the main port, the admin port and the port of probes."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from engine.options.engine_config import EngineConfig
from server.api.batches.access import StateAccess
from server.edge.access.credentials import LiveTls
from server.edge.http.connections import ClientConnection
from server.edge.http.edge import Edge
from server.edge.http.health_listener import HealthListener
from server.edge.http.listening import url_of
from server.edge.http.served_models import ServedModels
from server.edge.sockets.accepting import ClientServer

log = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75
# After the drain every reply has been made; this is for carrying it out.
_GOODBYE_S = 3


def http_server(app: FastAPI, tls: LiveTls | None) -> uvicorn.Server:
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
        proxy_headers=False,  # nothing here asks for the address of a client
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GOODBYE_S,
    )


async def administer(app: FastAPI, tls: LiveTls | None, listener: socket.socket | None) -> None:
    """Serve the admin routes, if they have a port, until cancelled."""
    if listener is None:
        return
    http = http_server(app, tls)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    log.info("admin routes at %s only", url_of(listener, scheme="http" if tls is None else "https"))
    try:
        await asyncio.shield(serving)
    finally:
        http.should_exit = http.force_exit = True
        await serving


def start_health(
    models: ServedModels, config: EngineConfig, probes: socket.socket | None, desk: StateAccess
) -> HealthListener | None:
    if probes is None:
        return None
    listener = HealthListener(
        probes, models.health, heartbeat_timeout_s=config.heartbeat_timeout_s, degraded=desk.degraded
    )
    listener.start()
    log.info("probes are answered at %s too", url_of(probes))
    return listener
