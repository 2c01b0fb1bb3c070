"""A page that somebody opens in a browser must not use the model of a server that needs no key."""

from dataclasses import replace

import pytest

from engine.options.edge_config import HostRule, OtherHosts
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
        ("http://gpu-box:8000", "gpu-box:8000"),
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


NAMES = frozenset({"gpu-box", "llm.example"})
LOCAL = replace(EDGE, hosts=HostRule(names=NAMES, others=OtherHosts.LOCAL))
OPEN = replace(EDGE, hosts=HostRule(names=NAMES, others=OtherHosts.PRIVATE))


async def get(engine, edge, host: str, path: str = "/v1/models") -> tuple[int, str]:
    async with connect(build_app(engine, Settings(edge=edge))) as client:
        reply = await client.get(path, headers={"host": host})
    return reply.status_code, reply.text


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "gpu-box.evil.example", "127.0.0.1.evil", "local.example"),
        *("pod-0.yard", "tasks.yard", "gpu.tail1.ts.net", "yard.default.svc.k8s.example", "my_box.evil"),
        *(
            "svc.evil",
            "localhost.evil.example",
            "evil.home.arpa.example",
            "home.arpa",
            "localhost@evil.example",
        ),
    ],
)
@pytest.mark.parametrize("edge", [LOCAL, OPEN], ids=["loopback", "open"])
async def test_a_name_that_anyone_may_lend_reads_nothing(engine, edge, host):
    """A page whose own name points here sends no origin with a GET: CVE-2024-28224 was that."""
    status, text = await get(engine, edge, host, "/admin/requests")
    assert (status, "host_not_allowed" in text) == (403, True)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "localhost", "[::1]:8000", "10.0.0.7:8000", "a.localhost"),
        *("gpu-box:8000", "GPU-box.", "LLM.example:443"),
    ],
)
@pytest.mark.parametrize("edge", [LOCAL, OPEN], ids=["loopback", "open"])
async def test_addresses_localhost_and_allowed_names_are_answered(engine, edge, host):
    assert (await get(engine, edge, host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "tokenyard:8000",
            "my_box",
            "tokenyard.project_default",
            "tokenyard.default.svc",
            "tokenyard.default.svc.cluster.local:8000",
        ),
        *("gpu.local", "gpu.corp", "gpu.lan.", "gpu.home", "gpu.internal", "gpu.test", "GPU.home.arpa"),
    ],
)
@pytest.mark.parametrize(("edge", "status"), [(OPEN, 200), (LOCAL, 403)], ids=["open", "loopback"])
async def test_names_that_nobody_can_register_are_answered_but_on_loopback(engine, edge, status, host):
    """Others on the link could say that such a name is this machine's."""
    assert (await get(engine, edge, host))[0] == status


async def test_every_name_is_answered_where_the_operator_allows_all(engine):
    edge = replace(EDGE, hosts=HostRule(names=NAMES, others=OtherHosts.ALL))
    assert (await get(engine, edge, "evil.example"))[0] == 200


@pytest.mark.parametrize(
    ("host", "named"),
    [("LLM.example.com:80", "--allowed-host llm.example.com,"), ("a b.c; rm", "--allowed-host NAME,")],
)
async def test_who_is_refused_learns_which_option_allows_the_name(engine, host, named):
    assert named in (await get(engine, OPEN, host))[1]


async def test_probes_may_call_the_server_by_any_name(engine):
    assert (await get(engine, OPEN, "probe.example", "/health/live"))[0] == 200


@pytest.mark.parametrize("name", ["llm.example", "gpu-box", "yard", "tokenyard.default.svc"])
async def test_the_servers_own_page_may_ask_under_a_name_that_is_its_own(engine, name):
    app = build_app(engine, Settings(edge=OPEN))
    assert await ask(app, f"http://{name}:8000", f"{name}:8000") == (200, "")
    assert await ask(app, f"http://{name}:9", f"{name}:8000") == (403, "origin_not_allowed")


@pytest.mark.parametrize("edge", [LOCAL, OPEN], ids=["loopback", "open"])
async def test_a_name_of_cors_origin_is_answered_but_only_its_own_origin_may_ask(engine, edge):
    app = build_app(engine, Settings(edge=replace(edge, cors_origins=("https://app.example:8443",))))
    assert await ask(app, None, "App.example:8000") == (200, "")
    assert await ask(app, "https://app.example:8443", "app.example") == (200, "")
    for origin in ("http://app.example", "http://app.example:9"):
        assert await ask(app, origin, origin[7:]) == (403, "origin_not_allowed")


async def test_without_a_host_no_page_is_the_servers_own(engine):
    assert await ask(build_app(engine, Settings(edge=OPEN)), "null", "") == (403, "origin_not_allowed")


async def test_with_a_key_no_name_is_refused(engine):
    app = build_app(engine, Settings(api_keys=("sesame",), edge=OPEN))
    async with connect(app) as client:
        headers = {"host": "evil.example", "authorization": "Bearer sesame"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
