"""/v1/files and /v1/batches: owners, bounds, and forms of every kind."""

import asyncio
import dataclasses
import json
import resource

import httpx
import pytest

from server.api.batches.app_client import AppClient
from server.api.batches.lines import BatchFileError, numbered_requests
from server.api.batches.places import FairPlaces
from server.api.batches.queue import BatchQueue
from server.api.batches.store import StateStore
from server.app import build_app
from tests.server.conftest import EDGE, Settings, connect, serving

KEYS = {"authorization": "Bearer a"}
OTHER = {"authorization": "Bearer b"}
ENDPOINT = "/v1/completions"


def line(custom_id: str = "one", **changes: object) -> str:
    body = {"prompt": "hi", "max_tokens": 3}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **changes})


@pytest.fixture
def app(engine, tmp_path):
    edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"), state_max_bytes=150_000)
    app = build_app(engine, Settings(edge=edge, api_keys=("a", "b")))
    yield app
    app.state.desk.store.close()


@pytest.fixture
async def client(app):
    async with connect(app) as client:
        yield client


async def upload(client, content: str, *, headers=KEYS) -> str:
    files = {"file": ("in.jsonl", content.encode()), "purpose": (None, "batch")}
    reply = await client.post("/v1/files", files=files, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def begin(client, file_id: str, *, headers=KEYS, **changes):
    body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h", **changes}
    return await client.post("/v1/batches", json=body, headers=headers)


async def work(app, client, batch_id: str) -> dict:
    """Let the queue of a running server work until the batch has ended."""
    queue = BatchQueue(app.state.desk, lambda owner: AppClient(app, owner=owner), FairPlaces(2))
    working = asyncio.create_task(queue.run())
    try:
        while True:
            batch = (await client.get(f"/v1/batches/{batch_id}", headers=KEYS)).json()
            if batch["status"] in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.01)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_batch_is_answered_at_the_lowest_priority_as_its_key(app, client, engine):
    file_id = await upload(client, line("x") + "\n" + line("y", method="GET"))
    batch = await work(app, client, (await begin(client, file_id)).json()["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (request,) = engine.requests
    assert request.terms.priority == 2**31 - 1
    content = (await client.get(f"/v1/files/{batch['output_file_id']}/content", headers=KEYS)).text
    assert json.loads(content)["custom_id"] == "x"
    assert json.loads(content)["response"]["status_code"] == 200


async def test_a_large_file_is_sent_part_by_part_so_that_others_have_their_turn(app, client, monkeypatch):
    monkeypatch.setattr("server.reply.generate.long_reply.SENT_AT_ONCE", 100)
    content, sizes = "".join(f"{place} " for place in range(500)), []

    async def app_seen(scope, receive, send):
        async def send_seen(message):
            sizes.append(len(message.get("body", b"")))
            await send(message)

        await app(scope, receive, send_seen)

    file_id = await upload(client, content)
    async with connect(app_seen) as seen:
        reply = await seen.get(f"/v1/files/{file_id}/content", headers=KEYS)
    assert (reply.text, reply.headers["cache-control"]) == (content, "no-store")
    assert reply.headers["content-type"] == "application/octet-stream"
    assert max(sizes) == 100


async def test_a_file_that_is_deleted_while_it_is_read_breaks_off_and_is_no_fault_of_the_server(
    app, client, monkeypatch
):
    file_id, part, num_read = await upload(client, "x" * 1000), StateStore.part, 0

    def part_of_what_is_there(store, file_id: str, after: int):
        nonlocal num_read
        num_read += 1
        assert store.delete_file("key-1", file_id)
        return part(store, file_id, after)

    monkeypatch.setattr(StateStore, "part", part_of_what_is_there)
    async with serving(app) as url, httpx.AsyncClient(base_url=url, headers=KEYS) as outside:
        with pytest.raises(httpx.TransportError):
            await outside.get(f"/v1/files/{file_id}/content")
    assert num_read == 1
    labels = {"code": "internal_error"}
    assert not app.state.edge.metrics.registry.get_sample_value("tokenyard:request_errors_total", labels)


async def test_what_one_key_keeps_is_not_there_for_another(client):
    file_id = await upload(client, line())
    batch_id = (await begin(client, file_id)).json()["id"]
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert (await client.get(path, headers=KEYS)).status_code == 200
        reply = await client.get(path, headers=OTHER)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "object_not_found")
    assert (await client.delete(f"/v1/files/{file_id}", headers=OTHER)).status_code == 404
    assert (await client.post(f"/v1/batches/{batch_id}/cancel", headers=OTHER)).status_code == 404
    assert (await begin(client, file_id, headers=OTHER)).json()["error"]["param"] == "input_file_id"
    for path in ("/v1/files", "/v1/batches"):
        assert len((await client.get(path, headers=KEYS)).json()["data"]) == 1
        assert (await client.get(path, headers=OTHER)).json()["data"] == []


async def test_a_key_that_is_gone_leaves_its_lines_with_an_error(app, client, engine):
    file_id = await upload(client, line())
    batch_id = (await begin(client, file_id)).json()["id"]
    app.state.keys.replace([key for key in app.state.keys._keys if key.name != "key-1"])
    queue = BatchQueue(app.state.desk, lambda owner: AppClient(app, owner=owner), FairPlaces(2))
    working = asyncio.create_task(queue.run())
    while (batch := app.state.desk.store.batch("key-1", batch_id))["status"] != "completed":
        await asyncio.sleep(0.01)
    working.cancel()
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    assert engine.requests == []


async def test_a_batch_that_is_cancelled_before_its_turn_ends_without_a_request(app, client, engine):
    batch_id = (await begin(client, await upload(client, line()))).json()["id"]
    reply = await client.post(f"/v1/batches/{batch_id}/cancel", headers=KEYS)
    assert reply.json()["status"] == "cancelling"
    assert (await work(app, client, batch_id))["status"] == "cancelled"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "no lines"),
        ("oops", "not JSON"),
        (line() + "\n" + line(), "twice"),
        (line(url="/v1/embeddings"), "url must be /v1/completions"),
    ],
)
async def test_a_file_that_cannot_be_a_batch_fails_it_with_the_reason(app, client, content, reason):
    batch = await work(app, client, (await begin(client, await upload(client, content))).json()["id"])
    assert batch["status"] == "failed"
    assert reason in batch["errors"]["data"][0]["message"]


async def test_files_have_a_bound_together(client):
    await upload(client, "x" * 60_000)
    files = {"file": ("in.jsonl", b"x" * 60_000), "purpose": (None, "batch")}
    reply = await client.post("/v1/files", files=files, headers=KEYS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "storage_full")


FORM = {"content-type": "multipart/form-data; boundary=xx"}
PART = b'--xx\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-type": "application/json"}, b"{}", 415),
        ({"content-type": "multipart/form-data"}, b"", 415),
        (FORM, b"", 400),
        (FORM, b"--xx--\r\n", 400),
        (FORM, PART, 400),
        (FORM, PART * 2 + b"--xx--", 400),
        (FORM, PART * 40 + b"--xx--", 400),
        (FORM, b"--xx\r\nno head", 400),
        (FORM, PART + b"--xx--", 400),
    ],
)
async def test_a_form_that_cannot_be_read_is_refused(client, headers, body, status):
    reply = await client.post("/v1/files", content=body, headers={**KEYS, **headers})
    assert reply.status_code == status, reply.text


@pytest.mark.parametrize(("path", "field"), [("/v1/files", "limit"), ("/v1/batches", "limit")])
async def test_a_list_comes_in_pages(client, path, field):
    file_ids = [await upload(client, line(f"{number}")) for number in range(3)]
    if path == "/v1/batches":
        file_ids = [(await begin(client, file_id)).json()["id"] for file_id in file_ids]
    first = (await client.get(f"{path}?limit=2", headers=KEYS)).json()
    assert [one["id"] for one in first["data"]] == file_ids[:0:-1]
    assert first["has_more"]
    rest = (await client.get(f"{path}?limit=2&after={first['last_id']}", headers=KEYS)).json()
    assert [one["id"] for one in rest["data"]] == file_ids[:1]
    assert not rest["has_more"]
    for wrong in ("0", "x", "-1", "99999999"):
        reply = await client.get(f"{path}?limit={wrong}", headers=KEYS)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_without_a_folder_every_route_says_which_option_is_missing(engine):
    async with connect(build_app(engine, Settings())) as client:
        files = {"file": ("in.jsonl", b"{}"), "purpose": (None, "batch")}
        replies = [
            await client.post("/v1/files", files=files),
            await client.get("/v1/files"),
            await client.get("/v1/batches/batch_1"),
            await client.post("/v1/batches/batch_1/cancel"),
        ]
    for reply in replies:
        assert reply.status_code == 400
        assert "--state-folder" in reply.json()["error"]["message"]


async def test_on_a_full_disk_an_upload_is_refused_and_the_next_one_with_room_is_kept(client, tmp_path):
    """A limit of the size of files stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    files = {"file": ("in.jsonl", b"x" * 60_000), "purpose": (None, "batch")}
    largest = max(path.stat().st_size for path in (tmp_path / "state").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 512, limits[1]))
    try:
        replies = [await client.post("/v1/files", files=files, headers=KEYS) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [
        (400, "storage_full")
    ] * 3
    await upload(client, line())
    assert len((await client.get("/v1/files", headers=KEYS)).json()["data"]) == 1


def test_a_line_of_very_many_items_is_refused_before_any_is_built():
    content = f'{line()}\n{{"custom_id":"two","body":[{"[]," * 400_000}[]]}}'.encode()
    with pytest.raises(BatchFileError, match=r"line 2: .* more than \d+ items"):
        list(numbered_requests(content))
