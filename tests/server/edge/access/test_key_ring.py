"""Rights of each key, over HTTP; and that the file of keys is followed."""

import asyncio
import hashlib
import hmac
import logging
from dataclasses import replace

import httpx
import pytest

from engine.errors import TenantOverloaded
from engine.options.api_keys import ApiKey, digest_of
from server.app import build_app
from server.edge.access.credentials import Credentials
from server.edge.access.key_ring import KeyRing
from tests.server.conftest import EDGE, Settings, connect, eventually, serving

BODY = {"prompt": "abc", "max_tokens": 3}


def key(name: str, **rest) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(f"secret of {name}".encode()), **rest)


def as_key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer secret of {name}"}


def guarded(engine, *keys: ApiKey) -> httpx.AsyncClient:
    return connect(build_app(engine, Settings(), keys=KeyRing(keys)))


async def test_the_name_of_the_key_is_the_tenant_of_its_requests(engine):
    async with guarded(engine, key("team-a")) as client:
        reply = await client.post("/v1/completions", json=BODY, headers=as_key("team-a"))
    assert reply.status_code == 200
    assert engine.requests[0].terms.tenant == "team-a"


@pytest.mark.parametrize(
    ("asked", "served"), [({}, 5), ({"priority": 5}, 5), ({"priority": 9}, 9), ({"priority": None}, 5)]
)
async def test_a_key_with_a_ceiling_asks_for_no_more_than_it_may(engine, asked, served):
    async with guarded(engine, key("batch", most_urgent_priority=5)) as client:
        reply = await client.post("/v1/completions", json=BODY | asked, headers=as_key("batch"))
    assert reply.status_code == 200
    assert engine.requests[0].terms.priority == served


async def test_a_ceiling_above_the_usual_leaves_the_usual(engine):
    async with guarded(engine, key("vip", most_urgent_priority=-5)) as client:
        await client.post("/v1/completions", json=BODY, headers=as_key("vip"))
        await client.post("/v1/completions", json=BODY | {"priority": -5}, headers=as_key("vip"))
    assert [request.terms.priority for request in engine.requests] == [0, -5]


@pytest.mark.parametrize("where", ["body", "header"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_more_urgent_than_allowed_is_refused_with_the_bound(engine, path, where):
    body = {
        "/v1/completions": BODY,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }[path]
    headers = as_key("batch")
    if where == "body":
        body = body | {"priority": 4}
    else:
        headers["x-tokenyard-priority"] = "4"
    async with guarded(engine, key("batch", most_urgent_priority=5)) as client:
        reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == 403
    error = reply.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("not_permitted", "priority", "permission_error")
    assert "5" in error["message"]
    assert engine.requests == []


async def test_private_prefixes_are_shared_with_no_other_key_whatever_salt_it_sends(engine):
    keys = [key("a", cache_salt="aaa"), key("b", cache_salt="bbb"), key("shared")]
    async with guarded(engine, *keys) as client:
        for name, salt in [
            ("a", None),
            ("a", "x"),
            ("b", None),
            ("b", "x"),
            ("shared", None),
            ("shared", "x"),
        ]:
            body = BODY | ({"cache_salt": salt} if salt else {})
            await client.post("/v1/completions", json=body, headers=as_key(name))
    salts = [request.terms.cache_salt for request in engine.requests]
    assert len(set(salts)) == 6
    assert salts[4:] == ["", "x"]


async def test_a_key_has_no_more_requests_under_way_than_it_may(engine):
    engine.stall_after = 1
    app = build_app(engine, Settings(), keys=KeyRing([key("a", max_concurrent_requests=2), key("b")]))
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=5) as client:
        streaming = BODY | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=streaming, headers=as_key("a")) as first:
            assert first.status_code == 200
            waiting = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=as_key("a")))
            await eventually(lambda: engine.num_running == 2)
            refused = await client.post("/v1/completions", json=BODY, headers=as_key("a"))
            other = await client.get("/v1/models", headers=as_key("b"))
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert other.status_code == 200
            waiting.cancel()
        await eventually(lambda: engine.num_running == 0)
        engine.stall_after = None
        assert (await client.post("/v1/completions", json=BODY, headers=as_key("a"))).status_code == 200


async def test_the_limit_of_waiting_tokens_goes_with_the_request_and_its_refusal_names_the_key(engine):
    async with guarded(engine, key("a", max_queued_tokens=500), key("b")) as client:
        await client.post("/v1/completions", json=BODY, headers=as_key("a"))
        await client.post("/v1/completions", json=BODY, headers=as_key("b"))
        assert [request.max_tenant_tokens for request in engine.requests] == [500, None]
        engine.admission_error = TenantOverloaded("this key has 500 prompt tokens waiting", retry_after_s=3)
        refused = await client.post("/v1/completions", json=BODY, headers=as_key("a"))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "3"


async def test_a_limit_counts_on_through_a_change_of_the_keys():
    ring = KeyRing([key("a", max_concurrent_requests=1)])
    with ring.under_way(ring.find(b"secret of a")):
        ring.replace([key("a", max_concurrent_requests=1), key("b")])
        with pytest.raises(Exception, match="under way"), ring.under_way(ring.find(b"secret of a")):
            pass
    with ring.under_way(ring.find(b"secret of a")):
        pass


@pytest.mark.parametrize("given", ["secret of a", "secret of c", "secret of a, but longer", "", "x" * 9000])
def test_every_key_is_compared_in_constant_time_whichever_was_given(monkeypatch, given):
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr("server.edge.access.key_ring.secrets.compare_digest", compare)
    KeyRing([key("a"), key("b"), key("c")]).find(given.encode())
    assert compared == [(32, 32)] * 3, "hashes, whose length says nothing of the key"


def test_a_reload_in_the_middle_of_a_comparison_gives_nobody_the_key_of_another(monkeypatch):
    first, second = key("a"), key("b")
    ring = KeyRing([first])

    def compare(given: bytes, known: bytes) -> bool:
        ring.replace([second, first])  # as the thread that reads the file may do at any time
        return given == known

    monkeypatch.setattr("server.edge.access.key_ring.secrets.compare_digest", compare)
    assert ring.find(b"secret of a") is first


def test_a_ring_that_lost_all_its_keys_opens_to_nobody():
    ring = KeyRing([key("a")])
    ring.replace([])
    assert ring.is_locked
    assert ring.find(b"secret of a") is None


@pytest.mark.parametrize(("path", "status"), [("/admin/requests", 403), ("/v1/models", 200)])
async def test_a_key_that_may_not_administer_is_told_so(engine, path, status):
    keys = [key("user", may_administer=False), key("operator")]
    async with guarded(engine, *keys) as client:
        assert (await client.get(path, headers=as_key("user"))).status_code == status
        assert (await client.get(path, headers=as_key("operator"))).status_code == 200


# The file, followed.


def entry(name: str) -> str:
    return f'- {{name: {name}, sha256: "{hashlib.sha256(f"secret of {name}".encode()).hexdigest()}"}}\n'


@pytest.fixture
async def followed(tmp_path, monkeypatch):
    monkeypatch.setattr("server.edge.access.credentials.LOOK_EVERY_S", 0.01)
    file = tmp_path / "keys.yaml"
    file.write_text(entry("a"))
    file.chmod(0o600)
    credentials = Credentials(["given"], replace(EDGE, api_keys_file=str(file)))
    following = asyncio.create_task(credentials.keep_current())
    await asyncio.sleep(0.05)
    yield file, credentials.keys
    following.cancel()


async def test_keys_come_and_go_with_the_file_and_given_ones_stay(followed, engine):
    file, ring = followed
    async with connect(build_app(engine, Settings(), keys=ring)) as client:
        assert (await client.get("/v1/models", headers=as_key("a"))).status_code == 200
        file.write_text(entry("b"))
        await eventually(lambda: ring.find(b"secret of b") is not None)
        assert (await client.get("/v1/models", headers=as_key("a"))).status_code == 401
        given = await client.get("/v1/models", headers={"authorization": "Bearer given"})
        assert given.status_code == 200


@pytest.mark.parametrize("text", ["- name: [", "", "- name: only\n", None])
async def test_a_broken_file_keeps_the_old_keys_and_is_told_once(followed, caplog, text):
    file, ring = followed
    caplog.set_level(logging.INFO)
    if text is None:
        file.unlink()
    else:  # at once: a look at a file that is just being written would find it broken in another way
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)
    await eventually(lambda: "stays in force" in caplog.text)
    await asyncio.sleep(0.05)
    assert ring.find(b"secret of a") is not None
    assert caplog.text.count("stays in force") == 1
    file.write_text(entry("c"))
    file.chmod(0o600)
    await eventually(lambda: ring.find(b"secret of c") is not None)


def test_a_file_for_all_eyes_is_warned_of(tmp_path, caplog):
    file = tmp_path / "keys.yaml"
    file.write_text(entry("a"))
    file.chmod(0o644)
    Credentials([], replace(EDGE, api_keys_file=str(file)))
    assert "chmod o-r" in caplog.text
