"""The HTTP servers in front of an engine that is started already, until a signal or the engine's end.

Owns: the parts of a running server, and the order of the end. On the first SIGTERM or SIGINT readiness
ends, accepted requests are finished, and the code is 0; a second signal ends everything at once.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.frontend.client import AsyncEngine
from engine.models.engines import ModelEngines
from engine.models.entries import ModelSpec
from engine.options.engine_config import EngineConfig, ServerConfig
from engine.processes.garbage import keep_what_is_loaded
from server.api.batches.access import StateAccess
from server.app import build_admin_app, build_app
from server.command.startup.banner import Announcement
from server.command.startup.http_servers import administer, http_server, start_health
from server.command.startup.signals import EXIT_HTTP_ENDED, Signals
from server.command.startup.unwatched import work_unwatched
from server.edge.access.credentials import Credentials
from server.edge.http.edge import ClientTimeouts, Parsers, Served
from server.edge.http.listening import Listeners, url_of
from server.endpoints import OPERATIONS

if TYPE_CHECKING:
    from server.edge.observe.otel_spans import OtelSpans

log = logging.getLogger(__name__)


async def serve(
    engines: ModelEngines,
    models: tuple[ModelSpec, ...],
    server_config: ServerConfig,
    listeners: Listeners,
    signals: Signals,
    announcement: Announcement,
) -> int:
    """Serve until a signal or the end of the engine; return the exit code. Raises OptionError."""
    engine_config = models[0].engine
    credentials = Credentials(server_config.api_keys, server_config.edge)
    engine = engines.all[0]
    spans = _open_spans(engine, engine_config, server_config)
    app = build_app(
        engine,
        server_config,
        patience=ClientTimeouts(keep_alive_s=server_config.stream_keep_alive_s),
        keys=credentials.keys,
        spans=spans,
        models=_served(engines, models),
    )
    desk: StateAccess = app.state.desk
    http = http_server(app, credentials.tls)
    url = url_of(listeners.main, scheme="http" if credentials.tls is None else "https")
    keep_what_is_loaded()
    health = start_health(app.state.models, engine_config, listeners.probes, desk)
    administering = asyncio.create_task(
        administer(build_admin_app(app, server_config), credentials.tls, listeners.admin)
    )
    batching = asyncio.create_task(work_unwatched(app, engine_config, signals.first))
    watching = asyncio.create_task(credentials.keep_current())
    serving = asyncio.create_task(http.serve(sockets=[listeners.main]))
    announcing = asyncio.create_task(announcement.follow(engines.all, models, server_config, url=url))
    try:
        return await _until_the_end(engines, signals, serving, server_config, announcement)
    finally:
        announcing.cancel()
        batching.cancel()
        await asyncio.gather(batching, return_exceptions=True)
        await app.state.background.close()
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


def _served(engines: ModelEngines, models: Sequence[ModelSpec]) -> list[Served]:
    places = engines.places or [None] * len(models)
    return [
        Served(engine, Parsers(tool_calls=spec.tool_call_parser, reasoning=spec.reasoning_parser), place)
        for engine, spec, place in zip(engines.all, models, places, strict=True)
    ]


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
    )


async def _until_the_end(
    engines: ModelEngines,
    signals: Signals,
    serving: "asyncio.Task[None]",
    config: ServerConfig,
    announcement: Announcement,
) -> int:
    gave_up = asyncio.create_task(engines.gave_up())
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
        log.info("stopping: not ready any more, but requests of the next %g s are served", delay_s)
    log.info("stopping: accepted requests have %.0f s to finish; a second signal ends them", timeout_s)
    drained = asyncio.create_task(engines.drain(timeout_s=timeout_s, delay_s=delay_s))
    insisted = asyncio.create_task(signals.second.wait())
    await asyncio.wait([drained, insisted], return_when=asyncio.FIRST_COMPLETED)
    if drained.done():
        insisted.cancel()
        if not drained.result():
            log.warning("requests were cut off after %.0f s", timeout_s)
    else:
        drained.cancel()
    return 0
