"""Ports, pages of other origins, memory: who is let in where."""

import socket
from dataclasses import replace

import pytest

from engine.frontend.memory_use import MemoryGauge
from engine.options.edge_config import HostRule, OtherHosts
from engine.options.engine_config import resolve
from engine.options.options import OptionError, Options
from server.app import build_admin_app, build_app
from server.edge.access.key_ring import KeyRing
from server.edge.http.body_limit import MemoryGate
from server.endpoints import KEYLESS_PATHS, OPEN_PATHS
from tests.server.conftest import EDGE, Settings, connect
from tests.server.edge.access.test_key_ring import as_key, key

PAGE = {"origin": "https://app.example"}


def settings(**edge) -> Settings:
    return Settings(api_keys=("k",), edge=replace(EDGE, **edge))


def routes_of(app) -> list[tuple[str, str]]:
    """Every route there really is, hidden ones too."""
    found = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        pending += getattr(getattr(route, "original_router", route), "routes", [])
        found += [(method, route.path) for method in getattr(route, "methods", None) or ()]
    return found


@pytest.mark.parametrize("locked", [False, True])
async def test_no_route_answers_without_a_key_but_the_open_ones(engine, locked):
    app = build_app(engine, settings(metrics_auth=locked))
    routes = routes_of(app)
    assert {"/v1/completions", "/admin/requests", "/openapi.json", "/health"} <= {path for _, path in routes}
    async with connect(app) as client:
        for method, path in routes:
            path = path.replace("{response_id}", "x").replace("{name}", "x").replace("{model:path}", "x")
            reply = await client.request(method, path)
            is_open = path in OPEN_PATHS | KEYLESS_PATHS and not (locked and path == "/metrics")
            assert (reply.status_code == 401) == (not is_open), (method, path)
        page = await client.get("/openapi.json", headers={"authorization": "Bearer k"})
    opened = {
        path
        for path, item in page.json()["paths"].items()
        if item["get" if "get" in item else "post"].get("security") == []
    }
    assert opened == OPEN_PATHS - ({"/metrics"} if locked else set())


async def test_the_admin_routes_are_on_their_port_and_not_on_the_other(engine):
    asked = replace(settings(admin_port=0), enable_admin=True)
    app = build_app(engine, asked)
    admin_app = build_admin_app(app, asked)
    bearer = {"authorization": "Bearer k"}
    async with connect(app) as client, connect(admin_app) as admin:
        assert (await client.get("/admin/requests", headers=bearer)).status_code == 404
        assert (await admin.get("/admin/requests")).status_code == 401
        assert (await admin.get("/admin/requests", headers=bearer)).json() == {"requests": [], "total": 0}
        assert (await admin.post("/admin/reset_prefix_cache", headers=bearer)).status_code == 204
        for path in ("/v1/models", "/openapi.json", "/metrics"):
            assert (await admin.get(path, headers=bearer)).status_code == 404


async def test_a_page_of_an_origin_that_is_not_named_is_not_let_in(engine):
    async with connect(build_app(engine, settings())) as client:
        reply = await client.get("/health", headers=PAGE)
    assert "access-control-allow-origin" not in reply.headers
    async with connect(build_app(type(engine)(), settings(cors_origins=("https://app.example",)))) as client:
        reply = await client.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("origins", "allowed"), [(("https://app.example",), "https://app.example"), (("*",), "*")]
)
async def test_a_page_of_a_named_origin_may_ask_and_is_told_of_errors(engine, origins, allowed):
    async with connect(build_app(engine, settings(cors_origins=origins))) as client:
        asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        leave = await client.options("/v1/completions", headers=PAGE | asking)
        refusal = await client.get("/v1/models", headers=PAGE)
    assert leave.status_code == 200
    assert "authorization" in leave.headers["access-control-allow-headers"].lower()
    assert refusal.status_code == 401
    for reply in (leave, refusal):
        assert reply.headers["access-control-allow-origin"] == allowed
        assert "access-control-allow-credentials" not in reply.headers


class Memory:
    """Looked at instead of the kernel's files."""

    def __init__(self) -> None:
        self.share, self.now_s, self.num_looks = 0.5, 0.0, 0

    def look(self) -> float:
        self.num_looks += 1
        return self.share

    def gauge(self) -> MemoryGauge:
        return MemoryGauge(read=self.look, clock_s=lambda: self.now_s)


async def test_new_work_is_refused_while_memory_is_short_and_everything_else_is_not(engine, monkeypatch):
    memory = Memory()
    monkeypatch.setattr("server.edge.http.body_limit.MemoryGauge", memory.gauge)
    async with connect(build_app(engine, Settings(edge=replace(EDGE, max_memory_use=0.9)))) as client:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        memory.share, memory.now_s = 0.9, 1.0
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "low_memory"
        assert int(refused.headers["retry-after"]) >= 1
        for path in ("/health", "/metrics", "/v1/models", "/admin/requests"):
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/admin/reset_prefix_cache")).status_code == 204
        memory.share, memory.now_s = 0.5, 2.0
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200


def test_the_memory_is_looked_at_once_a_second_at_most() -> None:
    memory = Memory()
    gauge = memory.gauge()
    for now_s in (0.0, 0.5, 0.99, 1.0, 1.5):
        memory.now_s = now_s
        assert gauge.share() == 0.5
    assert memory.num_looks == 2


async def test_a_gate_that_refuses_nothing_does_not_look() -> None:
    memory = Memory()

    async def app(scope, receive, send):
        pass

    gate = MemoryGate(app, max_use=1.0, gauge=memory.gauge())
    await gate({"type": "http", "method": "POST", "path": "/v1/completions"}, None, None)
    assert memory.num_looks == 0


def asked(**options) -> Options:
    return replace(Options(), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metrics_auth": True}, "no API key"),
        ({"admin_port": 8000}, "--port too"),
        ({"tls_key": "k"}, "without --tls-cert"),
        ({"tls_client_ca": "k"}, "without --tls-cert"),
        ({"tls_cert": "/absent"}, "no such file"),
        ({"api_keys_file": "/absent"}, "no such file"),
        ({"cors_origin": ("app.example",)}, "no origin"),
        ({"cors_origin": ("https://app.example/path",)}, "no origin"),
        ({"cors_origin": ("null",)}, "no origin"),
        ({"host": "0.0.0.0"}, "without an API key"),
    ],
)
def test_what_would_not_work_or_not_protect_is_refused_at_the_start(options, words) -> None:
    with pytest.raises(OptionError, match=words):
        resolve(asked(**options))


def test_a_file_of_keys_is_enough_for_an_address_that_others_reach(tmp_path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f'- name: a\n  sha256: "{key("a").digest.hex()}"\n')
    file.chmod(0o600)
    _, server = resolve(asked(host="0.0.0.0", api_keys_file=str(file), metrics_auth=True, admin_port=9))
    assert server.edge.api_keys_file == str(file)


OPEN = {"host": "0.0.0.0", "allow_unauthenticated": True}


@pytest.mark.parametrize(
    ("options", "hosts", "others"),
    [
        ({}, set(), OtherHosts.LOCAL),
        ({"allowed_host": ("LLM.example.",)}, {"llm.example"}, OtherHosts.LOCAL),
        ({"cors_origin": ("https://app.example", "*")}, set(), OtherHosts.LOCAL),
        (OPEN, {"0.0.0.0", "gpu1.example"}, OtherHosts.PRIVATE),
        (OPEN | {"host": "in.example"}, {"in.example", "gpu1.example"}, OtherHosts.PRIVATE),
        (OPEN | {"allowed_host": ("a",)}, {"0.0.0.0", "gpu1.example", "a"}, OtherHosts.PRIVATE),
        (OPEN | {"allowed_host": ("*",)}, {"0.0.0.0", "gpu1.example"}, OtherHosts.ALL),
    ],
)
def test_names_are_looked_at_wherever_the_server_listens(options, hosts, others, monkeypatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU1.example")
    _, server = resolve(asked(**options))
    assert server.edge.hosts == HostRule(names=frozenset(hosts), others=others)


def test_names_are_looked_at_behind_a_unix_socket_too(tmp_path) -> None:
    _, server = resolve(asked(uds=str(tmp_path / "s")))
    assert server.edge.hosts.others is OtherHosts.PRIVATE


@pytest.mark.parametrize("reached", [OPEN, {"uds": "s"}], ids=["every address", "socket"])
async def test_the_admin_port_keeps_to_the_rule_of_its_own_address(engine, reached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu1.example")
    _, server = resolve(asked(**reached, admin_port=9, allowed_host=("ops.example",)))
    app = build_app(engine, server)
    for host in ("foo.local", "gpu1.example", "0.0.0.0.example", "ops.example", "127.0.0.1:9"):
        headers = {"host": host}
        async with connect(app) as client, connect(build_admin_app(app, server)) as admin:
            statuses = [(await client.get("/v1/models", headers=headers)).status_code]
            statuses.append((await admin.get("/admin/requests", headers=headers)).status_code)
        expected = {"foo.local": [200, 403], "gpu1.example": [200, 403], "0.0.0.0.example": [403, 403]}
        assert statuses == expected.get(host, [200, 200]), host


def test_the_admin_port_answers_to_more_names_where_the_operator_says_so():
    _, server = resolve(asked(admin_port=9, allowed_host=("*",)))
    assert server.edge.hosts.others is OtherHosts.ALL
    assert server.edge.admin_hosts.others is OtherHosts.ALL


async def test_a_ring_and_a_port_share_their_keys(engine):
    ring = KeyRing([key("op")])
    app = build_app(engine, Settings(), keys=ring)
    async with connect(build_admin_app(app, Settings())) as admin:
        assert (await admin.get("/admin/requests", headers=as_key("op"))).status_code == 200
        ring.replace([key("new")])
        assert (await admin.get("/admin/requests", headers=as_key("op"))).status_code == 401
