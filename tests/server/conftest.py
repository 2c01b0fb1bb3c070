"""One engine, one application; in-process or behind a real socket."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from engine.options.edge_config import EdgeConfig, HostRule, OtherHosts, PageParts
from server.app import build_app
from server.edge.http.connections import ClientConnection
from server.edge.http.edge import ClientTimeouts
from server.edge.sockets.accepting import ClientServer
from tests.server.fake_engine import FakeEngine

ANY_HOST = HostRule(names=frozenset(), others=OtherHosts.ALL)
EDGE = EdgeConfig(
    api_keys_file=None,
    metrics_auth=False,
    admin_port=None,
    tls=None,
    cors_origins=(),
    hosts=ANY_HOST,
    admin_hosts=ANY_HOST,
    state_folder=None,
    state_max_bytes=2**24,
    root_path="",
    uds=None,
    page=PageParts.YARD,
    max_memory_use=1.0,
)


@dataclass(frozen=True)
class Settings:
    api_keys: tuple[str, ...] = ()
    edge: EdgeConfig = EDGE
    max_body_bytes: int = 64 * 1024
    enable_admin: bool = True
    loads_adapters: bool = True
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    strict_fields: bool = False
    responses_store_bytes: int = 2**20
    shown_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return build_app(engine, Settings())


def connect(app: FastAPI) -> httpx.AsyncClient:
    """In-process: no socket, no server."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(app) as client:
        yield client


@asynccontextmanager
async def serving(app: FastAPI, *, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Behind the real server on a free port; yields the base URL, of HTTP."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=ClientConnection,
        h11_max_incomplete_event_size=64 * 1024,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
    )
    edge = app.state.edge
    server = ClientServer(
        config,
        max_connections=edge.patience.max_connections,
        refused=edge.metrics.refused_connections,
        context=context,
        early=app.state.full_queue,
    )
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await task
        listening.close()


@pytest.fixture
async def url(app: FastAPI) -> AsyncIterator[str]:
    async with serving(app) as base_url:
        yield base_url


async def eventually(condition, timeout_s: float = 30.0) -> None:
    """Wait for something that another task is about to do."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def impatient(engine: FakeEngine, **patience: float) -> FastAPI:
    return build_app(engine, Settings(), patience=ClientTimeouts(**patience))
