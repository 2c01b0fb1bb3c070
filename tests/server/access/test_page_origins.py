"""A page that somebody opens in a browser must not use the model of a server that needs no key."""

from dataclasses import replace

import pytest

from server.app import build_admin_app, build_app
from tests.server.conftest import EDGE, Settings, connect

BODY = b'{"prompt": "abc", "max_tokens": 3}'
HERE = "127.0.0.1:8000"


async def ask(app, origin: str | None, host: str = HERE, path: str = "/v1/completions") -> tuple[int, str]:
    """Status and code of a request that a browser would send without asking first: without a type."""
    headers = {"host": host} | ({"origin": origin} if origin else {})
    async with connect(app) as client:
        reply = await client.post(path, content=BODY, headers=headers)
    return reply.status_code, reply.json()["error"]["code"] if reply.status_code >= 400 else ""


def with_origins(engine, *origins: str):
    return build_app(engine, Settings(edge=replace(EDGE, cors_origins=origins)))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", HERE),
        ("http://evil.example:8000", "evil.example:8000"),  # its name points to this machine now
        ("http://10.0.0.7", HERE),
        ("http://localhost.evil.example", HERE),
        ("http://[", HERE),
        ("null", HERE),
    ],
)
async def test_a_foreign_page_is_refused_before_anything_is_computed(engine, origin, host):
    app = build_app(engine, Settings())
    assert await ask(app, origin, host) == (403, "origin_not_allowed")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "evil.example"),
        ("http://localhost:3000", HERE),
        ("http://127.0.0.1:8000", HERE),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://chat.localhost", HERE),
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
        ("https://models.example", "models.example"),  # behind a proxy that speaks TLS
    ],
)
async def test_programs_and_pages_of_this_machine_are_welcome(engine, origin, host):
    assert await ask(build_app(engine, Settings()), origin, host) == (200, "")


@pytest.mark.parametrize(
    ("named", "status"), [("https://app.example", 200), ("*", 200), ("https://b.example", 403)]
)
async def test_a_page_whose_origin_is_named_may_ask(engine, named, status):
    assert (await ask(with_origins(engine, named), "https://app.example"))[0] == status


async def test_the_admin_port_refuses_them_too(engine):
    asked = Settings(edge=replace(EDGE, admin_port=0))
    admin = build_admin_app(build_app(engine, asked), asked)
    reply = await ask(admin, "https://evil.example", path="/admin/reset_prefix_cache")
    assert reply == (403, "origin_not_allowed")


async def test_with_a_key_the_key_decides(engine):
    app = build_app(engine, Settings(api_keys=("sesame",)))
    assert await ask(app, "https://evil.example") == (401, "invalid_api_key")
    async with connect(app) as client:
        headers = {"origin": "https://ui.example", "authorization": "Bearer sesame"}
        reply = await client.post("/v1/completions", content=BODY, headers=headers)
    assert reply.status_code == 200


HOSTS = replace(EDGE, hosts=frozenset({"gpu-box"}))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "gpu-box.evil.example", "127.0.0.1.evil"]
)
async def test_a_name_that_anyone_may_lend_reads_nothing(engine, host):
    """A page whose own name points here sends no origin with a GET: CVE-2024-28224 was that."""
    async with connect(build_app(engine, Settings(edge=HOSTS))) as client:
        reply = await client.get("/admin/requests", headers={"host": host})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "[::1]:8000", "10.0.0.7:8000", "gpu-box:8000", "GPU-box.", "a.localhost"],
)
async def test_addresses_localhost_and_allowed_names_are_answered(engine, host):
    async with connect(build_app(engine, Settings(edge=HOSTS))) as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_probes_may_call_the_server_by_any_name(engine):
    async with connect(build_app(engine, Settings(edge=HOSTS))) as client:
        assert (await client.get("/health/live", headers={"host": "tokenyard"})).status_code == 200


async def test_the_servers_own_page_may_ask_under_an_allowed_name(engine):
    app = build_app(engine, Settings(edge=HOSTS))
    assert await ask(app, "http://gpu-box:8000", "gpu-box:8000") == (200, "")
    assert await ask(app, "http://gpu-box:9", "gpu-box:8000") == (403, "origin_not_allowed")


async def test_with_a_key_no_name_is_refused(engine):
    app = build_app(engine, Settings(api_keys=("sesame",), edge=HOSTS))
    async with connect(app) as client:
        headers = {"host": "evil.example", "authorization": "Bearer sesame"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
